"""How tokens are chosen, as requests to `ktmoe serve` say it: what the model's numbers have no room for is refused."""

from __future__ import annotations

import json

import pytest

from ktmoe.transformers.server.choices import GENERATION
from ktmoe.transformers.server.fields import DEPTH, Fields
from ktmoe.transformers.server.refusal import Refusal

TEXT = "/v1/completions"
FIELDS = Fields("tiny", 1000, frozenset(), (), True)


def parse(**fields: object) -> dict:
    return FIELDS.parse(TEXT, json.dumps({"prompt": "x"} | fields).encode())


def refused(body: bytes) -> Refusal:
    with pytest.raises(Refusal) as error:
        FIELDS.parse(TEXT, body)
    return error.value


def test_temperatures():
    for value in (0, 1e-10, 1, 2):
        assert parse(temperature=value)["temperature"] == value
    for value in (1e-11, 1e-320):
        error = refused(json.dumps({"prompt": "x", "temperature": value}).encode())
        assert str(error) == f"temperature: expected 0, or a number of at least 1e-10, found {value}"


#: Of the client of transformers: what it may send, and what it may not.
GOOD = {
    "bos_token_id": [0, -1, None],
    "do_sample": [True, False],
    "eos_token_id": [1, [1, 2], [0] * 64],
    "epsilon_cutoff": [0, 0.5],
    "eta_cutoff": [0, 0.5],
    "max_new_tokens": [1, 10**12, None],
    "min_p": [0, 1],
    "no_repeat_ngram_size": [0, 2],
    "pad_token_id": [0, -1],
    "repetition_penalty": [0.5, 1, 1.5],
    "temperature": [0, 0.5, 10],
    "top_k": [0, 50],
    "top_p": [0, 1],
    "transformers_version": ["5.23.0"],
    "typical_p": [1, 0.5],
}
BAD = {
    "bos_token_id": ["x", 10**20, []],
    "do_sample": [1, "x"],
    "eos_token_id": [[], [0] * 65, [[1]], "x", -2, {}, True],
    "epsilon_cutoff": [-1, "x"],
    "eta_cutoff": [2, []],
    "max_new_tokens": [0, -1, 1.5, "x"],
    "min_p": [-0.1, 1.1, float("nan")],
    "no_repeat_ngram_size": [-1, 1.5, 2**31],
    "pad_token_id": [[0], "x"],
    "repetition_penalty": [0, 1e-300, 1e300, float("inf"), 10**400],
    "temperature": [-1, 1e-320, float("nan"), "x"],
    "top_k": [-1, 10**12, 1.5, True],
    "top_p": [-1, 2],
    "transformers_version": [5],
    "typical_p": [-1, {}],
}


@pytest.mark.parametrize("name", sorted(GENERATION))
def test_the_client_of_transformers(name):
    for value in GOOD[name]:
        text = json.dumps({name: value})
        assert parse(generation_config=text)["generation_config"] == text
    for value in BAD[name]:
        error = refused(json.dumps({"prompt": "x", "generation_config": json.dumps({name: value})}).encode())
        assert (error.status, error.param, str(error).startswith(f"{name}: expected ")) == (400, "generation_config", True)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_other_encodings(encoding):
    assert "expected an object of JSON in UTF-8" in str(refused('{"prompt": "é"}'.encode(encoding)))


def test_a_mark_before_utf_8():
    assert FIELDS.parse(TEXT, '{"prompt": "é"}'.encode("utf-8-sig")) == {"prompt": "é"}


def test_levels():
    """transformers and its templates read a request again, deeper in the stack."""
    for opened, closed in (("[", "]"), ('{"a":', "}")):
        for depth in (DEPTH + 1, 400, 900):
            error = refused(b'{"prompt": "x", "user": %s1%s}' % (opened.encode() * depth, closed.encode() * depth))
            assert (error.param, str(error)) == ("user", "user: expected at most 100 levels of objects and lists")
        FIELDS.parse(TEXT, b'{"prompt": "x", "user": %s1%s}' % (opened.encode() * (DEPTH - 1), closed.encode() * (DEPTH - 1)))


def test_many_values():
    """They are counted before they are read, since each takes many times its bytes of memory."""
    error = refused(b'{"prompt": "x", "user": [' + b"[]," * 4000 + b"[]]}")
    assert str(error).startswith("the request has more than 8000 characters: expected at most 8000, since prompt and answer")
    assert error.code == "context_length_exceeded"
    assert parse(prompt="[" * 3000 + "," * 3000)["prompt"].endswith(",,")
