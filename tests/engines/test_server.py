"""What stands before transformers' server: clients get the model and nothing else, in bounded work, while they wait for it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from urllib.parse import urlsplit

import commands
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.cli.chat import RichInterface

from ktmoe import synthetic
from ktmoe.errors import InputError, UnavailableError
from ktmoe.transformers import serving
from ktmoe.transformers.server import connections, context, guard
from ktmoe.transformers.server.access import Access, is_local
from ktmoe.transformers.server.fields import Fields
from ktmoe.transformers.server.generation import Generations
from ktmoe.transformers.server.refusal import Refusal
from ktmoe.transformers.view import view

CONTEXT, MANY = 1500, 1200
POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


# ---- the fields of a request ----

FIELDS = Fields("tiny", 100, frozenset({"enable_thinking"}))


def chat(*parts: dict) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"model": "tiny", "prompt": "x" * 700, "max_tokens": 10**9, "temperature": 0.5},
        {"prompt": "ж" * 700},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"stop": ["a", "b", "c", "d" * 64]},
        {"generation_config": '{"do_sample": true, "max_new_tokens": 256, "temperature": null, "transformers_version": "5"}'},
        chat({"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}),
        chat({"type": "input_image", "image_url": "data:image/png;base64,AAAA"}),
        chat({"type": "input_audio", "input_audio": {"data": "A" * 5000, "format": "wav"}}),
        {"tools": [{"type": "function", "function": {"parameters": {"type": ["object", "null"]}}}]},
    ],
)
def test_fields_that_are_served(request_):
    assert FIELDS.parse(json.dumps(request_).encode()) == request_


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        ({"model": "other"}, 404, "model: expected 'tiny', found 'other'"),
        ({"model": None}, 404, "model: expected 'tiny', found None"),
        ({"model": "/etc"}, 404, "model"),
        ([], 400, "expected an object of JSON"),
        ({"prompt": "x" * 801}, 400, "the request has 815 characters: expected at most 800"),
        (chat(*[{"type": "text", "text": ""}] * 100), 400, "characters"),
        ({"chat_template_kwargs": {"chat_template": "{% for i in range(9) %}{% endfor %}"}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": True, "max_length": 10**9}}, 400, "(enable_thinking)"),
        ({"chat_template_kwargs": ["enable_thinking"]}, 400, "chat_template_kwargs"),
        ({"max_tokens": 0}, 400, "max_tokens: expected a number of tokens, 1 or more, found 0"),
        ({"max_output_tokens": float("inf")}, 400, "max_output_tokens"),
        ({"max_completion_tokens": True}, 400, "max_completion_tokens"),
        ({"stop": ["a"] * 5}, 400, "stop: expected up to 4 texts"),
        ({"stop": "a" * 65}, 400, "stop"),
        ({"stop": {"a": 1}}, 400, "stop"),
        ({"stop": 1}, 400, "stop"),
        ({"generation_config": '{"num_beams": 1000}'}, 400, "found ['num_beams']"),
        ({"generation_config": '{"max_new_tokens": 1e999}'}, 400, "max_new_tokens"),
        ({"generation_config": "[" * 300}, 400, "generation_config: expected an object of JSON"),
        ({"generation_config": {}}, 400, "generation_config: expected an object of JSON, as text"),
        (chat({"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}), 400, "image_url: expected a URL that begins"),
        (chat({"type": "image_url", "image_url": {"url": "/etc/passwd"}}), 400, "/etc/passwd"),
        ({"input": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}, 400, "input_image"),
        (chat({"type": "video_url", "video_url": {}}), 400, "video_url"),
        (chat({"type": "audio_url", "audio_url": ["data:"]}), 400, "audio_url"),
        (chat({"type": "input_audio", "input_audio": {"data": "/etc/passwd"}}), 400, "input_audio"),
        (chat({"type": "input_audio", "input_audio": "/etc/passwd"}), 400, "input_audio"),
    ],
)
def test_fields_that_are_refused(request_, status, words):
    with pytest.raises(Refusal) as error:
        FIELDS.parse(json.dumps(request_).encode())
    assert (error.value.status, words in str(error.value)) == (status, True), str(error.value)
    assert error.value.content()["error"]["message"] == str(error.value)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b'{"prompt": "\\ud800"}', b"1" * 5000]
)
def test_bodies_that_are_no_request(body):
    with pytest.raises(Refusal) as error:
        FIELDS.parse(body)
    assert error.value.status == 400


# ---- who may ask ----


def scope(path: str, method: str = "POST", **headers: str) -> dict:
    return {"path": path, "method": method, "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}


def status(access: Access, path: str = "/v1/models", method: str = "GET", **headers: str) -> int:
    try:
        access.check(scope(path, method, **headers))
    except Refusal as refusal:
        return refusal.status
    return 200


@pytest.mark.parametrize("listening", ["localhost", "127.0.0.1", "::1"])
def test_hosts_of_a_local_server(listening):
    access = Access(listening, cors=False)
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "[::1]"):
        assert status(access, host=host) == 200, host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "192.168.0.1:8000", "[::2]:8000", "8000", ":8"):
        assert status(access, host=host) == 403, host
    assert status(access) == 200  # HTTP/1.0; no browser speaks it


def test_hosts_of_a_server_for_others():
    assert [is_local(host) for host in ("0.0.0.0", "192.168.0.1", "::", "\ud800", "")] == [False] * 5
    assert status(Access("0.0.0.0", cors=False), host="a.name.of.it:8000") == 200


def test_origins():
    for origin, found in (
        ("http://localhost:8000", 200),
        ("http://localhost:3000", 403),
        ("http://localhost", 403),
        ("https://evil.example", 403),
        ("null", 403),
    ):
        assert status(Access("localhost", cors=False), host="localhost:8000", origin=origin) == found, origin
        assert status(Access("localhost", cors=True), host="localhost:8000", origin=origin) == 200
    # a page that has pointed its own name at this machine
    assert status(Access("localhost", cors=True), host="evil.example", origin="http://evil.example") == 403


def test_methods():
    for path, method, cors, found in (
        ("/v1/models", "GET", False, 200),
        ("/v1/completions", "GET", False, 405),
        ("/health", "POST", False, 405),
        ("/v1/completions", "OPTIONS", False, 405),
        ("/v1/completions", "OPTIONS", True, 200),
        ("/reset", "OPTIONS", True, 404),
    ):
        assert status(Access("localhost", cors=cors), path, method) == found, (path, method)


# ---- the guard, before an application that calls a module as often as it is told ----


class Work:
    """What a model would do, in its thread. calls: of a module, so far. allowed: set to let it begin."""

    def __init__(self, steps: int):
        self.steps, self.calls, self.begun = steps, 0, 0
        self.allowed = threading.Event()
        self.allowed.set()
        self._module = torch.nn.Identity()

    def __call__(self) -> None:
        self.begun += 1
        self.allowed.wait(commands.PATIENCE)
        for _ in range(self.steps):
            self._module(0)
            self.calls += 1
            time.sleep(0.001)


class Front:
    """A guard and its application. ask() -> (status, body), or None for a client that was told nothing."""

    def __init__(self, work: Callable[[], None], seconds: float = commands.PATIENCE):
        self.generations = Generations(100)
        self.work = work
        self.guard = guard.Guard(self._app, Access("localhost", cors=False), FIELDS, self.generations, seconds)

    async def _app(self, scope, receive, send) -> None:
        assert (await receive())["type"] == "http.request"
        try:
            await self.generations.async_submit(self.work)
        except Refusal as refusal:
            await refusal.send(send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(self, *chunks: bytes, whole: bool = True, gone: asyncio.Event | None = None, send=None):
        sent, left, gone = [], list(chunks or [b"{}"]), gone or asyncio.Event()

        async def receive() -> dict:
            if left:
                return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or not whole}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def keep(message: dict) -> None:
            sent.append(message)

        await self.guard({"type": "http"} | scope("/v1/completions"), receive, send or keep)
        return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(commands.PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_large_body():
    async def run():
        front = Front(Work(1))
        chunk = b" " * 1_000_000
        found, content = await front.ask(*[chunk] * 11, whole=False)  # its end is not waited for
        assert (found, content["error"]["message"]) == (413, "the request is too large: expected at most 10000000 bytes")
        assert (await front.ask())[0] == 200

    asyncio.run(run())


def test_a_body_without_an_end(monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.05)

    async def run():
        front = Front(Work(1))
        assert (await front.ask(b"{", whole=False))[0] == 408
        gone = asyncio.Event()
        gone.set()
        assert await front.ask(b"{", whole=False, gone=gone) is None

    asyncio.run(run())


def test_many_at_once():
    """Some are refused at once; the others are answered one after the other."""

    async def run():
        front = Front(Work(1))
        front.work.allowed.clear()
        asked = [asyncio.create_task(front.ask()) for _ in range(guard.REQUESTS + 8)]
        await until(lambda: sum(one.done() for one in asked) == 8 and front.work.begun == 1)
        front.work.allowed.set()
        found = [await one for one in asked]
        assert sorted(status for status, _ in found) == [200] * guard.REQUESTS + [503] * 8
        assert (await front.ask())[0] == 200

    asyncio.run(run())


def test_a_client_that_goes_while_it_waits():
    async def run():
        front, gone = Front(Work(1)), asyncio.Event()
        front.work.allowed.clear()
        first = asyncio.create_task(front.ask())
        await until(lambda: front.work.begun == 1)
        second, third = asyncio.create_task(front.ask(gone=gone)), asyncio.create_task(front.ask())
        await asyncio.sleep(0.01)
        gone.set()
        assert await second is None
        front.work.allowed.set()
        assert [(await one)[0] for one in (first, third)] == [200, 200]
        assert front.work.begun == 2

    asyncio.run(run())


def test_a_client_that_goes_while_it_is_answered():
    async def run():
        front, gone = Front(Work(10**9)), asyncio.Event()
        asked = asyncio.create_task(front.ask(gone=gone))
        await until(lambda: front.work.calls > 3)
        gone.set()
        await asked
        front.work = Work(1)
        assert (await front.ask())[0] == 200

    asyncio.run(run())


def test_an_answer_that_takes_too_long():
    async def run():
        found, content = await Front(Work(10**9), seconds=0.05).ask()
        assert (found, content["error"]["code"]) == (504, "timeout")
        assert "took longer than 0.05 s" in content["error"]["message"]

    asyncio.run(run())


def test_a_client_that_does_not_read(monkeypatch):
    """Others are answered meanwhile; in the end it is left alone."""
    monkeypatch.setattr(guard, "TAKING_SECONDS", 0.2)

    async def run():
        front, never = Front(Work(1)), asyncio.Event()
        slow = asyncio.create_task(front.ask(send=lambda _: never.wait()))
        await until(lambda: front.work.calls == 1)
        assert (await front.ask())[0] == 200
        await slow

    asyncio.run(run())


def test_the_end_of_the_server():
    async def run():
        front = Front(Work(10**9))
        asked = [asyncio.create_task(front.ask()) for _ in range(3)]
        await until(lambda: front.work.calls > 3)
        assert await asyncio.to_thread(front.generations.close, commands.PATIENCE)
        asked.append(asyncio.create_task(front.ask()))
        for one in asked:
            found, content = await one
            assert (found, content["error"]["message"]) == (503, "the server was stopped")
        assert front.work.begun == 1

    asyncio.run(run())


# ---- the context ----


def model_of(**config: object) -> SimpleNamespace:
    config = SimpleNamespace(num_attention_heads=10, **config)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))


def test_the_context(monkeypatch):
    """Eager attention has the scores of all pairs of tokens; half of the memory is for them."""
    eager = model_of(max_position_embeddings=10_000, _attn_implementation="eager")
    fast = model_of(max_position_embeddings=10_000, _attn_implementation="sdpa")
    for available, expected in ((None, (10_000, 10_000)), (2 * 100 * 4000**2, (4000, 10_000)), (-1, (0, 0))):
        monkeypatch.setattr(context, "available_bytes", lambda available=available: available)
        assert (context.context_of(eager), context.context_of(fast)) == expected
    assert context.context_of(eager, 9999) == 9999
    with pytest.raises(InputError, match="context: expected at most the model's own, 10000 tokens, found 10001"):
        context.context_of(eager, 10_001)
    assert context.declared(model_of()) == 32_768


# ---- transformers' server behind the guard ----


class Served:
    """A server in this process. steps: how often the model was called."""

    def __init__(self, name: str, found: serving.Listening):
        self.name, self.found, self.steps = name, found, 0
        self.address = urlsplit(found.url)

    def count(self, module, _arguments) -> None:
        self.steps += type(module).__name__ == "Qwen3MoeForCausalLM"

    def send(self, path: str, method: str = "POST", headers: dict | None = None, **body: object) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.address.hostname, self.address.port, timeout=commands.PATIENCE)
        text = json.dumps(body) if method == "POST" else None
        connection.request(method, path, text, {"Content-Type": "application/json"} | (headers or {}))
        return connection

    def ask(self, path: str, method: str = "POST", headers: dict | None = None, **body: object) -> tuple[int, dict]:
        connection = self.send(path, method, headers, **body)
        with connection.getresponse() as response:
            text = response.read()
        connection.close()
        return response.status, json.loads(text)

    def wait_for_steps(self, steps: int) -> None:
        end = time.monotonic() + commands.PATIENCE
        while self.steps < steps:
            assert time.monotonic() < end
            time.sleep(0.001)


@contextmanager
def running(folder, limits: serving.Limits):
    with view(folder) as made:
        arguments = serving.arguments(made, "127.0.0.1", 0, ["--log-level", "error"])
        with serving.serving(made, serving.parse(arguments, "test"), limits) as found:
            served = Served(made.name, found)
            handle = register_module_forward_pre_hook(served.count)
            try:
                yield served
            finally:
                handle.remove()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    synthetic.write_chat_model(folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def server(model):
    with running(model, serving.Limits(context=CONTEXT)) as found:
        yield found


def test_only_the_model_is_served(server):
    for path, method in (
        ("/reset", "POST"),
        ("/load_model/", "POST"),
        ("//load_model", "POST"),
        ("/v1/systemone", "POST"),
        ("/v1/audio/transcriptions", "POST"),
        ("/docs", "GET"),
        ("/openapi.json", "GET"),
    ):
        assert server.ask(path, method)[0] == 404, path
    for path in (*POSTS, "/load_model"):
        found, content = server.ask(path, model="elsewhere/other", prompt="x", messages=[], input="x")
        assert (found, content["error"]["code"]) == (404, "model_not_found"), path
    connection = server.send("/load_model", model="tiny")  # transformers' chat client begins with that
    assert connection.getresponse().read() == b'data: {"status": "ready", "cached": true}\n\n'
    connection.close()
    assert server.ask("/v1/models", "GET")[1]["data"][0]["id"] == "tiny"
    assert server.ask("/v1/completions", prompt="x", max_tokens=1)[0] == 200


def test_pages_in_a_browser(server):
    before = server.steps
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert server.ask("/v1/completions", headers=headers, prompt="x", max_tokens=1)[0] == 403
    assert server.steps == before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * CONTEXT}]}),
        ("/v1/completions", {"prompt": "x" * CONTEXT}),
        ("/v1/responses", {"input": "x" * CONTEXT}),
        ("/v1/completions", {"prompt": "x" * 1_000_000}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_long_prompt(server, path, body, stream):
    before = server.steps
    found, content = server.ask(path, stream=stream, **body)
    assert (found, content["error"]["code"]) == (400, "context_length_exceeded")
    assert server.steps == before


def test_an_answer_fits_the_context(server):
    """Whatever the client asks for."""
    for path, body in (
        ("/v1/completions", {"prompt": "x" * (CONTEXT - 5), "max_tokens": 10**9}),
        ("/v1/completions", {"prompt": "x" * (CONTEXT - 5)}),
        ("/v1/completions", {"prompt": "x" * (CONTEXT - 5), "generation_config": "{}"}),
        ("/v1/responses", {"input": "x" * (CONTEXT - 50), "max_output_tokens": 10**9, "stream": False}),
    ):
        found, content = server.ask(path, **body)
        assert (found, content["usage"]["total_tokens"]) == (200, CONTEXT)


def test_a_template_of_the_client(server):
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "{{ 'x' * 9 }}"}}
    found, content = server.ask("/v1/chat/completions", **body)
    assert (found, "chat_template_kwargs" in content["error"]["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_gone(server, stream):
    """The model is not called for it any more, and the next one is answered."""
    before = server.steps
    connection = server.send("/v1/completions", prompt="x", max_tokens=MANY, stream=stream)
    server.wait_for_steps(before + 3)
    assert server.ask("/health", "GET") == (200, {"status": "ok"})
    connection.close()
    assert server.ask("/v1/completions", prompt="x", max_tokens=2)[1]["usage"]["completion_tokens"] == 2
    assert server.steps - before < MANY


def test_half_a_head(server, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    for answered in (False, True):
        with socket.create_connection((server.address.hostname, server.address.port), timeout=commands.PATIENCE) as client:
            if answered:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                received = b""
                while not received.endswith(b'{"status":"ok"}'):
                    received += client.recv(10_000)
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
            assert client.recv(1) == b""


def test_a_connection_with_a_long_answer(server, monkeypatch):
    """A request that takes longer than a connection may wait for one."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.01)
    connection = server.send("/v1/completions", prompt="x", max_tokens=100)
    assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 100
    connection.close()


def test_a_conversation_that_the_server_ends(server, monkeypatch, tmp_path):
    monkeypatch.setattr(RichInterface, "input", lambda _: "x" * CONTEXT)
    with pytest.raises(UnavailableError, match=r"^the conversation ends: the prompt has \d+ tokens: expected fewer than 1500"):
        serving.converse("tiny", server.found.url, flags=[], system=None, save_folder=tmp_path)


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_while_it_answers(model, stream):
    """The client is told; the model is left at once. Half a request holds nothing up."""
    with running(model, serving.Limits()) as server:
        half = socket.create_connection((server.address.hostname, server.address.port), timeout=commands.PATIENCE)
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        connection = server.send("/v1/completions", prompt="x", max_tokens=MANY, stream=stream)
        server.wait_for_steps(3)
    with half:
        assert half.recv(1) == b""
    response = connection.getresponse()
    text = response.read().decode()
    assert (response.status, "the server was stopped" in text) == (200 if stream else 503, True)
    assert server.steps < MANY
    connection.close()
