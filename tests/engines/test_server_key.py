"""The key of `ktmoe serve`: who has it is served, nobody else; it is shown nowhere."""

from __future__ import annotations

import json
import os
import select
import time
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import commands
import openai
import pytest
from click.testing import CliRunner
from listening import addresses
from raw_http import CLOSE, HOST, answers, connect, descriptors, exchange, message, post, received

from ktmoe import synthetic
from ktmoe.cli.serve import command
from ktmoe.errors import InputError
from ktmoe.machine import environment
from ktmoe.transformers.server.access import ROUTES, Access
from ktmoe.transformers.server.refusal import Refusal

KEY = "sk-0123456789abcdef"
#: File descriptors that the server may have.
FILES = 256


def status(headers: dict[bytes, bytes], path: str = "/v1/models", method: str = "GET", *, cors: bool = False) -> int:
    access = Access("localhost", cors=cors, key=KEY)
    try:
        access.check({"path": path, "method": method, "headers": list(headers.items())})
    except Refusal as refusal:
        return refusal.status
    return 200


@pytest.mark.smoke
def test_what_has_the_key():
    for value in (f"Bearer {KEY}", f"bearer {KEY}", f"Bearer  {KEY} "):
        assert status({b"authorization": value.encode()}) == 200, value
    for value in (
        "",
        "Bearer",
        "Bearer ",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY}0",
        f"Bearer {KEY.upper()}",
    ):
        assert status({b"authorization": value.encode()}) == 401, value
    assert status({b"authorization": b"Bearer \xff\xfe"}) == 401
    assert status({}) == 401


@pytest.mark.smoke
def test_routes_without_the_key():
    """Whether a route is there is not told, either; a browser that may ask must first ask whether it may, without a key."""
    for path, methods in ROUTES.items():
        assert status({}, path, *methods) == (200 if path == "/health" else 401)
    assert status({}, "/absent") == status({}, "/v1/models", "DELETE") == status({}, "/v1/models", "OPTIONS") == 401
    assert status({b"origin": b"http://evil.example"}, "/v1/models", "OPTIONS", cors=True) == 200
    assert status({b"origin": b"http://evil.example"}, "/v1/models", "GET", cors=True) == 401


@pytest.mark.parametrize("key", ["", " ", "a b", "ä", "a\n", "a" * 1001, "\ud800"])
def test_keys_that_cannot_be_sent(monkeypatch, key):
    monkeypatch.setattr(os, "environ", {"KTMOE_API_KEY": key})
    with pytest.raises(InputError, match=r"^environment variable KTMOE_API_KEY must be 1 to 1000 ") as error:
        environment.api_key()
    done = CliRunner().invoke(command, [".", "--api-key", key])
    assert (done.exit_code, "--api-key: expected 1 to 1000 characters of ASCII, without spaces" in done.output) == (2, True)
    assert key.strip() in ("", "ä") or key not in str(error.value) + done.output


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """For everybody who has the key, with few files."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    synthetic.write_chat_model(folder, seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KTMOE_API_KEY", KEY)
        temporary = tmp_path_factory.mktemp("temporary")
        with commands.server(folder, temporary, "--host", "0.0.0.0", "--context", "200", files=FILES) as started:
            yield started


@pytest.fixture
def address(server):
    return urlsplit(server.url.replace("0.0.0.0", "127.0.0.1"))


def test_where_it_listens(server):
    assert addresses(server.process.pid) == {ip_address("0.0.0.0")}


def test_a_client_with_the_key(address):
    url = address.geturl()
    fields = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=commands.PATIENCE) as client:
        assert client.completions.create(**fields).usage.completion_tokens == 1
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=commands.PATIENCE) as client:
        with pytest.raises(openai.AuthenticationError, match="expected this server's key") as error:
            client.completions.create(**fields)
        assert (error.value.code, error.value.type) == ("invalid_api_key", "invalid_request_error")


def test_a_body_without_the_key(address):
    """It is not waited for."""
    with connect(address) as client:
        client.sendall(post("/v1/completions", b'{"prompt": "x"}')[:-1])
        ((found, body),) = answers(received(client))
    assert (found, message(body)) == (401, "expected this server's key, as Authorization: Bearer KEY")


def test_a_thousand_connections(server, address):
    """More than there are file descriptors. It says so in one line, serves on, and has closed all in the end."""
    files = descriptors(server.process.pid)
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(address)) for _ in range(1000)]
        for client in clients:
            client.setblocking(False)
            with suppress(OSError):  # closed already
                client.send(b"GET /health HTTP/1.1\r\n")
        assert exchange(address, b"GET /health HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n")[0][0] == 200
        assert descriptors(server.process.pid) < FILES
        poll = select.poll()
        for client in clients:
            poll.register(client, select.POLLIN)
        assert len(poll.poll(0)) > 1000 - FILES
    deadline = time.monotonic() + commands.PATIENCE
    while descriptors(server.process.pid) > files:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    said = server.errors.read_text()
    assert said.count("Over 124 connections: those without a whole request are closed.") == 1
    assert "Traceback" not in said


def test_nothing_secret_is_shown(server, address):
    """Neither the key nor what a client sends in its place."""
    wrong = b"GET /v1/models?api_key=sk-query HTTP/1.1\r\nAuthorization: Bearer sk-header\r\n" + HOST + CLOSE + b"\r\n"
    ((found, body),) = exchange(address, wrong)
    shown = server.output.read_text() + server.errors.read_text() + json.dumps(message(body))
    assert (found, "Authorization: Bearer KEY" in server.line) == (401, True)
    shown += Path(f"/proc/{server.process.pid}/cmdline").read_text()
    assert '"GET /v1/models HTTP/1.1" 401' in shown
    assert [word for word in (KEY, "sk-query", "sk-header") if word in shown] == []
    assert "whoever reaches it" not in shown
