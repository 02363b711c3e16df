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
FIELDS = Fields("tiny", 100, frozenset({"enable_thinking"}), MEDIA, True)
CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
#: What each route must have.
READ = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, TEXT: {"prompt": "x"}, RESPONSE: {"input": "x"}}


def chat(*parts: dict) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def parse(request: object, path: str, fields: Fields = FIELDS) -> dict:
    return fields.parse(path, json.dumps(request).encode())


def refused(request: object, path: str, fields: Fields = FIELDS) -> Refusal:
    with pytest.raises(Refusal) as error:
        parse(request, path, fields)
    assert error.value.content()["error"]["message"] == str(error.value)
    return error.value


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("path", "request_"),
    [
        (TEXT, {"model": "tiny", "prompt": "x" * 700, "max_tokens": 10**9, "temperature": 0.5}),
        (TEXT, {"prompt": "ж" * 700}),
        (TEXT, {"temperature": 2, "top_p": 0, "frequency_penalty": -2, "seed": -(2**63), "stream": True}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, {"stop": ["a", "b", "c", "d" * 64]}),
        (CHAT, {"generation_config": '{"max_new_tokens": 256, "temperature": null, "transformers_version": "5"}'}),
        (CHAT, chat({"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}})),
        (CHAT, chat({"type": "input_image", "image_url": "data:image/png;base64,AAAA"})),
        (CHAT, chat({"type": "input_audio", "input_audio": {"data": "A" * 5000, "format": "wav"}})),
        (CHAT, {"tools": [{"type": "function", "function": {"parameters": {"type": ["object", "null"]}}}]}),
        (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": "x"}]}),
        (CHAT, chat({"type": "text", "text": "x"})),
        (RESPONSE, {"instructions": "x", "stream": True}),
        (RESPONSE, {"input": [{"type": "input_text", "text": "x"}], "stream": True}),
        (RESPONSE, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "stream": True}),
        (RESPONSE, {"input": [{"role": "user", "content": "x"}, {"type": "reasoning", "content": [{}]}], "stream": True}),
    ],
)
def test_fields_that_are_served(path, request_):
    request_ = READ[path] | request_
    assert parse(request_, path) == request_


#: Field and value that ask for what happens anyway.
ASKS_NOTHING = [
    *((CHAT, name, value) for name, value in (("n", 1), ("logprobs", False), ("top_logprobs", 0), ("presence_penalty", 0.0))),
    *((CHAT, name, []) for name in ("tools", "stop", "functions")),
    *((CHAT, name, None) for name in ("n", "logprobs", "messages_of_another_interface", "chat_template_kwargs", "logit_bias")),
    *((CHAT, name, {}) for name in ("logit_bias", "metadata")),
    (CHAT, "response_format", {"type": "text"}),
    (CHAT, "tool_choice", "auto"),
    (CHAT, "tool_choice", "none"),
    (CHAT, "parallel_tool_calls", False),
    (CHAT, "stream_options", {"include_usage": True}),
    (CHAT, "user", "someone"),
    (TEXT, "best_of", 1),
    (TEXT, "echo", False),
    (TEXT, "logprobs", None),
    (TEXT, "suffix", ""),
    (RESPONSE, "store", True),
    (RESPONSE, "text", {"format": {"type": "text"}}),
    (RESPONSE, "truncation", "disabled"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("path", "name", "value"), ASKS_NOTHING)
def test_fields_that_ask_for_nothing(path, name, value):
    assert name not in parse(READ[path] | {name: value}, path)


NOT_SERVED = [
    *((CHAT, name, value) for name, value in (("n", 2), ("n", True), ("logprobs", True), ("top_logprobs", 2))),
    *((TEXT, name, value) for name, value in (("n", 2), ("best_of", 2), ("logprobs", 0), ("echo", True), ("suffix", "END"))),
    (CHAT, "response_format", {"type": "json_object"}),
    (CHAT, "presence_penalty", 0.5),
    (CHAT, "tool_choice", "required"),
    (CHAT, "reasoning_effort", "low"),
    (CHAT, "prompt", "x"),
    (CHAT, "guided_json", {}),
    (TEXT, "logit_bias", {"97": 1}),
    (RESPONSE, "stop", "a"),
    (RESPONSE, "previous_response_id", "resp_1"),
    (RESPONSE, "text", {"format": {"type": "json_object"}}),
    (RESPONSE, "truncation", "auto"),
]


def test_how_tools_are_called():
    """What asks for nothing without tools asks for something with them."""
    tools = {"tools": [{"type": "function", "function": {"parameters": {}}}]}
    for name, value in (("tool_choice", "none"), ("parallel_tool_calls", False)):
        assert refused(READ[CHAT] | tools | {name: value}, CHAT).param == name


def test_a_list_of_one_text():
    assert parse({"prompt": ["x"]}, TEXT) == {"prompt": "x"}
    assert refused({"prompt": ["x", "y"]}, TEXT).param == "prompt"


@pytest.mark.smoke
@pytest.mark.parametrize(("path", "name", "value"), NOT_SERVED)
def test_fields_that_are_not_served(path, name, value):
    """transformers would drop most of them, and answer."""
    error = refused(READ[path] | {name: value}, path)
    assert (error.status, error.param, error.content()["error"]["type"]) == (400, name, "invalid_request_error")
    assert str(error).startswith(f"{name}: ")


def test_what_a_route_does_not_serve_in_words():
    assert str(refused(READ[CHAT] | {"n": 2}, CHAT)) == "n: expected 1, which is all that is served, found 2"
    words = "reasoning: /v1/completions does not serve it: expected some of frequency_penalty, generation_config, max_tokens,"
    assert str(refused(READ[TEXT] | {"reasoning": {}}, TEXT)).startswith(words)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("path", "request_", "status", "param", "words"),
    [
        (TEXT, {"model": "other"}, 404, "model", "model: expected 'tiny', found 'other'"),
        (TEXT, {"model": None}, 404, "model", "model: expected 'tiny', found None"),
        (TEXT, {"model": "/etc"}, 404, "model", "model"),
        (TEXT, {"model": "tiny@main"}, 404, "model", "model"),
        (TEXT, {"prompt": "x" * 801}, 400, None, "the request has 815 characters: expected at most 800"),
        (CHAT, chat(*[{"type": "text", "text": ""}] * 100), 400, None, "characters"),
        (
            CHAT,
            {"chat_template_kwargs": {"chat_template": "{% for i in range(9) %}{% endfor %}"}},
            400,
            "chat_template_kwargs",
            "chat_template_kwargs",
        ),
        (
            CHAT,
            {"chat_template_kwargs": {"enable_thinking": True, "max_length": 10**9}},
            400,
            "chat_template_kwargs",
            "(enable_thinking)",
        ),
        (CHAT, {"chat_template_kwargs": ["enable_thinking"]}, 400, "chat_template_kwargs", "chat_template_kwargs"),
        (TEXT, {"max_tokens": 0}, 400, "max_tokens", "max_tokens: expected a number of tokens, 1 or more, found 0"),
        (RESPONSE, {"max_output_tokens": float("inf")}, 400, "max_output_tokens", "max_output_tokens"),
        (CHAT, {"max_completion_tokens": True}, 400, "max_completion_tokens", "max_completion_tokens"),
        (CHAT, {"stop": ["a"] * 5}, 400, "stop", "stop: expected up to 4 texts"),
        (CHAT, {"stop": "a" * 65}, 400, "stop", "stop"),
        (CHAT, {"stop": {}}, 400, "stop", "stop"),
        (CHAT, {"stop": 1}, 400, "stop", "stop"),
        (CHAT, {"temperature": "x"}, 400, "temperature", "temperature: expected a number from 0 to 2, found 'x'"),
        (CHAT, {"temperature": 10**400}, 400, "temperature", "found an integer of"),
        (CHAT, {"temperature": True}, 400, "temperature", "found True"),
        (CHAT, {"top_p": float("nan")}, 400, "top_p", "top_p: expected a number from 0 to 1, found nan"),
        (CHAT, {"seed": 1.5}, 400, "seed", "seed: expected an integer from -9223372036854775808"),
        (CHAT, {"stream": "yes"}, 400, "stream", "stream: expected true or false, found 'yes'"),
        (CHAT, {"logit_bias": {"-1": 1}}, 400, "logit_bias", "logit_bias: expected an object of token ids and numbers"),
        (CHAT, {"logit_bias": {"1": 101}}, 400, "logit_bias", "from -100 to 100"),
        (CHAT, {"logit_bias": [1]}, 400, "logit_bias", "found [1]"),
        (CHAT, {"generation_config": '{"num_beams": 1000}'}, 400, "generation_config", "found ['num_beams']"),
        (CHAT, {"generation_config": '{"max_new_tokens": 1e999}'}, 400, "generation_config", "max_new_tokens: expected"),
        (CHAT, {"generation_config": "[" * 300}, 400, "generation_config", "generation_config: expected an object of JSON"),
        (CHAT, {"generation_config": {}}, 400, "generation_config", "generation_config: expected an object of JSON, as text"),
        (CHAT, {"messages": None}, 400, "messages", "messages: expected a list of messages, each with a role, found None"),
        (CHAT, {"messages": []}, 400, "messages", "found []"),
        (CHAT, {"messages": [1]}, 400, "messages", "found [1]"),
        (CHAT, {"messages": [{"content": "x"}]}, 400, "messages", "each with a role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages", "content: expected a text or a list of parts"),
        (CHAT, chat({"type": "file", "file": {}}), 400, "messages", "messages: a part's type: expected text, audio_url, "),
        (CHAT, chat({"type": "text"}), 400, "messages", "text: expected a text, found None"),
        (TEXT, {"prompt": ["x", "y"]}, 400, "prompt", "prompt: expected one text, found ['x', 'y']"),
        (RESPONSE, {"input": 5}, 400, "input", "input: expected a text or a list of objects, found 5"),
        (RESPONSE, {"input": [{"type": "input_file"}]}, 400, "input", "input: a part's type: expected text"),
        (RESPONSE, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, 400, "input", "found 'input_file'"),
        (RESPONSE, {"instructions": 5}, 400, "instructions", "instructions: expected a text, found 5"),
        (RESPONSE, {"tools": [{"type": "web_search"}]}, 400, "tools", "tools: expected functions"),
        (
            CHAT,
            chat({"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}),
            400,
            "messages",
            "image_url: expected a URL",
        ),
        (CHAT, chat({"type": "image_url", "image_url": {"url": "/etc/passwd"}}), 400, "messages", "/etc/passwd"),
        (RESPONSE, {"input": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}, 400, "input", "input_image"),
        (CHAT, chat({"type": "video_url", "video_url": {}}), 400, "messages", "video_url"),
        (CHAT, chat({"type": "audio_url", "audio_url": ["data:"]}), 400, "messages", "audio_url"),
        (CHAT, chat({"type": "input_audio", "input_audio": {"data": "/etc/passwd"}}), 400, "messages", "input_audio"),
        (CHAT, chat({"type": "input_audio", "input_audio": "/etc/passwd"}), 400, "messages", "input_audio"),
    ],
)
def test_fields_that_are_refused(path, request_, status, param, words):
    error = refused(READ[path] | request_, path)
    assert (error.status, error.param, words in str(error)) == (status, param, True), str(error)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b'{"prompt": "\\ud800"}', b"1" * 5000]
)
def test_bodies_that_are_no_request(body):
    with pytest.raises(Refusal) as error:
        FIELDS.parse(TEXT, body)
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
        found = str(refused(request, CHAT, Fields("tiny", 1000, frozenset(), media, True)))
        assert found == f"image_url: expected {words} which this model reads"


def test_a_template_that_reads_no_tools():
    """The model would never see them."""
    fields = Fields("tiny", 1000, frozenset(), (), False)
    error = refused(READ[CHAT] | {"tools": [{"type": "function", "function": {"name": "f"}}]}, CHAT, fields)
    assert str(error).startswith("tools: expected none, since the model's chat template does not read them, found [{")
