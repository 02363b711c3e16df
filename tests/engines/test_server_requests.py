"""Which requests `ktmoe serve` takes: by their fields, their Host and Origin, and the tokens that memory has room for."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ktmoe.errors import InputError
from ktmoe.transformers.server import context
from ktmoe.transformers.server.access import Access, is_local
from ktmoe.transformers.server.fields import Fields
from ktmoe.transformers.server.refusal import Refusal

MEDIA = {"image_url", "input_image", "video_url", "audio_url", "input_audio"}
FIELDS = Fields("tiny", 100, frozenset({"enable_thinking"}), MEDIA)


def chat(*parts: dict) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.smoke
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


@pytest.mark.smoke
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


def test_a_model_that_reads_text():
    """transformers would drop the image, and answer."""
    request = chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    for media, words in (((), "text,"), ({"input_audio"}, "text, input_audio,")):
        with pytest.raises(Refusal, match=f"^image_url: expected {words} which this model reads"):
            Fields("tiny", 1000, frozenset(), media).parse(json.dumps(request).encode())
