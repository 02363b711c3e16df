"""What stands before transformers' server: clients get the model and nothing else, in bounded work, while they wait for it."""

from __future__ import annotations

import json
import logging
import socket

import commands
import pytest
from servers import hooked, running
from transformers.cli.chat import RichInterface

from ktmoe import synthetic
from ktmoe.errors import UnavailableError
from ktmoe.transformers import serving
from ktmoe.transformers.server import connections

CONTEXT, MANY = 1500, 1200
POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    synthetic.write_chat_model(folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def server(model):
    with running(model, serving.ServerLimits(context=CONTEXT)) as found:
        yield found


@pytest.mark.smoke
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
        for name in ("elsewhere/other", "tiny@main"):
            found, content = server.ask(path, model=name, prompt="x", messages=[], input="x")
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


def logged(caplog) -> list[str]:
    """Warnings and errors."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"messages": [MESSAGE | {"tool_calls": [{}]}]}, "KeyError: 'arguments'"),
        ("/v1/chat/completions", {"messages": [MESSAGE], "logit_bias": {"10000": 1}}, "token"),
        ("/v1/completions", {"prompt": ""}, "the prompt has no tokens"),
        ("/v1/responses", {"input": [MESSAGE, {"type": "another"}]}, "Unsupported input item type: 'another'"),
    ],
)
def test_what_transformers_does_not_check(server, path, body, words, caplog):
    found, content = server.ask(path, **body)
    assert (found, words in content["error"]["message"]) == (400, True), content
    assert logged(caplog) == []


def test_another_type_of_content(server):
    found, content = server.ask("/v1/completions", headers={"Content-Type": "text/plain"}, prompt="x", max_tokens=1)
    assert (found, content["error"]["message"]) == (400, "Content-Type: expected application/json, found 'text/plain'")


def test_an_error_of_the_model(server, caplog):
    """One line in the log, and the next one is answered."""

    def fail(module, _arguments) -> None:
        raise RuntimeError("no room\nfor it")

    with hooked(fail):
        found, content = server.ask("/v1/completions", prompt="x", max_tokens=1)
    assert (found, content["error"]["type"]) == (500, "server_error")
    assert content["error"]["message"] == "the model cannot answer: RuntimeError: no room for it"
    assert server.ask("/v1/completions", prompt="x", max_tokens=1)[0] == 200
    assert logged(caplog) == ["/v1/completions: RuntimeError: no room for it"]


def test_an_error_in_a_stream(server):
    """It is what it would be without a stream, after what was sent before."""

    def fail(module, _arguments) -> None:
        raise RuntimeError('no "room"\nfor \\ it')

    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [MESSAGE]})):
        with hooked(fail):
            _, expected = server.ask(path, max_tokens=1, **body)
            connection = server.send(path, max_tokens=1, stream=True, **body)
            with connection.getresponse() as response:
                *_, last = response.read().decode().strip().split("\n\n")
            connection.close()
        assert json.loads(last.removeprefix("data: ")) == expected
        assert expected["error"]["message"] == 'the model cannot answer: RuntimeError: no "room" for \\ it'


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
    connection = server.send("/v1/completions", prompt="x", max_tokens=30)
    assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 30
    connection.close()


def test_a_conversation_that_the_server_ends(server, monkeypatch, tmp_path):
    monkeypatch.setattr(RichInterface, "input", lambda _: "x" * CONTEXT)
    with pytest.raises(UnavailableError, match=r"^the conversation ends: the prompt has \d+ tokens: expected fewer than 1500"):
        serving.converse("tiny", server.found.url, flags=[], system=None, save_folder=tmp_path)


def test_a_conversation_that_the_model_ends(server, monkeypatch, tmp_path):
    """In the middle of a stream."""

    def fail(module, _arguments) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(RichInterface, "input", lambda _: "x")
    words = "^the conversation ends: the model cannot answer: RuntimeError: no room$"
    with hooked(fail), pytest.raises(UnavailableError, match=words):
        serving.converse("tiny", server.found.url, flags=[], system=None, save_folder=tmp_path)


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_while_it_answers(model, stream):
    """The client is told; the model is left at once. Half a request holds nothing up."""
    with running(model, serving.ServerLimits()) as server:
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
