"""Clients of a server that send bytes as they are, and what is left in the server's process."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import socket
from pathlib import Path
from urllib.parse import SplitResult

import commands

HOST = b"Host: localhost\r\n"
CLOSE = b"Connection: close\r\n"
#: Fields of an error of OpenAI's.
ERROR = {"message", "type", "param", "code"}


class _Received(io.BytesIO):
    """What http.client takes for a socket. It does not close between two answers."""

    def makefile(self, _mode: str) -> _Received:
        return self

    def close(self) -> None:
        pass


def connect(address: SplitResult) -> socket.socket:
    return socket.create_connection((address.hostname, address.port), timeout=commands.PATIENCE)


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    """A request, after which the connection ends. headers: further ones."""
    head = b"POST %s HTTP/1.1\r\n%s%sContent-Type: application/json\r\n" % (path.encode(), HOST, CLOSE)
    return b"%s%sContent-Length: %d\r\n\r\n%s" % (head, b"".join(headers), len(body), body)


def received(client: socket.socket) -> bytes:
    """All until the server closes."""
    found = bytearray()
    while chunk := client.recv(65_536):
        found += chunk
    return bytes(found)


def answers(data: bytes) -> list[tuple[int, bytes]]:
    """(status, body) of each."""
    source, found = _Received(data), []
    while source.tell() < len(data):
        response = http.client.HTTPResponse(source)
        response.begin()
        found.append((response.status, response.read()))
    return found


def exchange(address: SplitResult, data: bytes) -> list[tuple[int, bytes]]:
    with connect(address) as client:
        client.sendall(data)
        return answers(received(client))


def message(body: bytes) -> str:
    """Of an error, which must have the form of OpenAI's, and nothing of where the server is."""
    error = json.loads(body)["error"]
    assert (error.keys(), type(error["message"])) == (ERROR, str)
    for word in ("Traceback", 'File "', "site-packages", str(Path(__file__).parents[2]), "ktmoe-view-"):
        assert word not in error["message"]
    return error["message"]


def resident(pid: int) -> int:
    """MiB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) // 1024


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
