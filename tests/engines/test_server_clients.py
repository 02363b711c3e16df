"""Many clients of `ktmoe serve`, slow ones, and those that go: the others are answered meanwhile."""

from __future__ import annotations

import json
import resource
import select
import socket
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import commands
import pytest
from raw_http import CLOSE, HOST, answers, connect, exchange, message, post, received
from servers import running

from ktmoe import synthetic
from ktmoe.transformers import serving
from ktmoe.transformers.server import connections, guard

CONTEXT, MANY = 1500, 1200
TEXT = "/v1/completions"
GET = b"GET /health HTTP/1.1\r\n" + HOST
SHORT, LONG = (json.dumps({"prompt": "x", "max_tokens": tokens}).encode() for tokens in (1, MANY))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    synthetic.write_chat_model(folder, seed=3)
    with running(folder, serving.ServerLimits(context=CONTEXT)) as found:
        yield found


def is_answered(server) -> bool:
    return [status for status, _ in exchange(server.address, post(TEXT, SHORT))] == [200]


def trickle(client: socket.socket, data: bytes, seconds: float) -> bytes:
    """What is received, or b"" for a connection that ends, while a byte is sent every so many seconds."""
    for at in range(len(data)):
        try:
            client.sendall(data[at : at + 1])
        except OSError:
            return b""
        if select.select([client], [], [], seconds)[0]:
            return received(client)
    raise AssertionError("all was sent")


def test_a_byte_at_a_time(server, monkeypatch):
    """Of a head, and of a body: neither goes on for ever."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    with connect(server.address) as client:
        assert trickle(client, b"GET /health HTTP/1.1\r\nX: " + b"a" * 1000, 0.05) == b""
    with connect(server.address) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000\r\n" + HOST + CLOSE + b"\r\n")
        ((status, body),) = answers(trickle(client, b"{" * 1000, 0.05))
        assert (status, message(body)[:34]) == (408, "the request was not whole after 0.")


@contextmanager
def held(server, count: int, data: bytes):
    """So many clients that have sent it, and send no more."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(server.address)) for _ in range(count)]
        for client in clients:
            client.sendall(data)
        yield clients


def test_requests_that_are_not_whole(server):
    """They take nobody's place, as many as they are; of large ones a few are taken."""
    half = post(TEXT, SHORT)[:-1]
    large = post(TEXT, b" " * 200_000)[:-100_000]
    with held(server, 2 * guard.REQUESTS, half) as clients:
        assert is_answered(server)
        with held(server, guard.LARGE + 1, large) as others:
            ready, _, _ = select.select(others, [], [], commands.PATIENCE)
            ((status, body),) = answers(received(ready[0]))
            assert (status, json.loads(body)["error"]["code"]) == (503, "server_overloaded")
            assert is_answered(server)
        clients[-1].sendall(half[-1:] and b"}")
        assert [status for status, _ in answers(received(clients[-1]))] == [200]


def test_a_hundred_requests_at_once(server):
    """As many as may wait are answered, the others are refused at once."""
    before = server.steps
    first = connect(server.address)
    first.sendall(post(TEXT, LONG))
    server.wait_for_steps(before + 3)
    with held(server, 99, post(TEXT, SHORT)) as clients:
        refused = set()
        while len(refused) < 100 - guard.REQUESTS:
            ready, _, _ = select.select([one for one in clients if one not in refused], [], [], commands.PATIENCE)
            assert ready
            refused |= set(ready)
        for client in refused:
            ((status, body),) = answers(received(client))
            assert (status, message(body)) == (503, f"{guard.REQUESTS} requests wait already")
        first.close()
        left = [answers(received(client))[0][0] for client in clients if client not in refused]
    assert left == [200] * (guard.REQUESTS - 1)


@pytest.mark.parametrize("more", [b"G", GET + b"\r\n"])
def test_a_client_that_asks_again_and_goes(server, more):
    """uvicorn stops to read at a second request, and would not see that it goes."""
    before = server.steps
    with connect(server.address) as client:
        client.sendall(post(TEXT, LONG).replace(CLOSE, b""))
        server.wait_for_steps(before + 3)
        client.sendall(more)
    assert is_answered(server)
    assert server.steps - before < MANY


def test_a_client_that_asks_too_much_ahead(server):
    with connect(server.address) as client:
        client.sendall(post(TEXT, LONG).replace(CLOSE, b""))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            client.sendall(b"a" * 10_000_000)
    assert is_answered(server)


def test_too_many_connections(server, monkeypatch, caplog):
    """Those that have waited longest are closed; whoever has sent a request keeps its own."""
    monkeypatch.setattr(connections, "CONNECTIONS", 20)
    monkeypatch.setattr(connections.Connection, "said", -100)
    before = server.steps
    with connect(server.address) as whole:
        whole.sendall(post(TEXT, LONG))
        server.wait_for_steps(before + 3)
        with held(server, 60, b"POST /v1") as clients:
            assert exchange(server.address, GET + CLOSE + b"\r\n")[0][0] == 200
            closed = [client for client in clients if select.select([client], [], [], 0)[0]]
            assert len(closed) >= 40
            assert closed[0] is clients[0]
        assert not select.select([whole], [], [], 0)[0]
    said = [record.getMessage() for record in caplog.records if "connections" in record.getMessage()]
    assert said == ["Over 20 connections: those without a whole request are closed."]
    assert is_answered(server)


def test_connections_that_all_wait_for_an_answer(server, monkeypatch):
    pending, whole = guard.PendingAnswer, []
    monkeypatch.setattr(guard, "PendingAnswer", lambda: whole.append(pending()) or whole[-1])
    monkeypatch.setattr(connections, "CONNECTIONS", 8)
    with held(server, 8, post(TEXT, LONG)) as clients:
        while len(whole) < 8:
            time.sleep(0.01)
        ((status, body),) = exchange(server.address, GET + CLOSE + b"\r\n")
        assert (status, message(body)) == (503, "too many connections")
        assert not select.select(clients, [], [], 0)[0]
    monkeypatch.undo()
    assert is_answered(server)


def test_nothing_else_is_read(server):
    """No file is opened and no address is asked, whatever a request names."""
    found, own = [], threading.get_ident()

    def watch(event: str, arguments: tuple) -> None:
        if watching and threading.get_ident() != own and event in ("open", "socket.connect", "socket.getaddrinfo", "exec"):
            found.append((event, arguments))

    watching = True
    sys.addaudithook(watch)  # for as long as this process lives
    thread = threading.Thread(target=lambda: open(__file__).close())
    thread.start()
    thread.join()
    assert [event for event, _ in found] == ["open"]
    found.clear()
    for name in ("../../etc/passwd", "/etc/passwd", "openai/gpt-oss-20b", "http://localhost/x", "tiny"):
        part = {"type": "image_url", "image_url": {"url": name}}
        chat = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        for path, body in (("/v1/chat/completions", chat), (TEXT, {"model": name, "prompt": name, "max_tokens": 1})):
            status = exchange(server.address, post(path, json.dumps(body).encode()))[0][0]
            assert status in (200, 400, 404)
    watching = False
    assert found == []


def test_the_limit_of_files(monkeypatch):
    """There are file descriptors for all connections that are taken."""
    for files, most in ((resource.RLIM_INFINITY, 1000), (10**6, 1000), (1024, 892), (256, 124), (64, 8)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert connections.most_connections() == most
