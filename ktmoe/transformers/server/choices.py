"""How tokens are chosen, and how many: the fields of a request, and those of transformers' own chat client."""

from __future__ import annotations

import json

from ktmoe.messages import show
from ktmoe.transformers.server.refusal import Refusal

#: The most texts that end an answer, and characters of each: transformers compares them with all its vocabulary.
STOPS, STOP_LENGTH = 4, 64
#: The least temperature above 0: float32 has no room for what a smaller one makes of the scores.
LEAST_TEMPERATURE = 1e-10
_COUNTS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
#: Numbers: their type, the least and the most.
_NUMBERS = {
    "frequency_penalty": ((int, float), -2, 2),
    "seed": (int, -(2**63), 2**63 - 1),
    "temperature": ((int, float), 0, 2),
    "top_p": ((int, float), 0, 1),
}
#: The same of `generation_config`, a field of transformers' own chat client.
_OF_CLIENT = {
    "epsilon_cutoff": ((int, float), 0, 1),
    "eta_cutoff": ((int, float), 0, 1),
    "min_p": ((int, float), 0, 1),
    "no_repeat_ngram_size": (int, 0, 2**31 - 1),
    "repetition_penalty": ((int, float), 0.001, 1000),
    "temperature": ((int, float), 0, 1000),
    "top_k": (int, 0, 2**31 - 1),
    "top_p": ((int, float), 0, 1),
    "typical_p": ((int, float), 0, 1),
}
#: Ids of tokens in it, or lists of them; transformers writes -1 where a model has none.
_IDS, _MOST_IDS = ("bos_token_id", "eos_token_id", "pad_token_id"), 64
#: What it may choose.
GENERATION = {*_OF_CLIENT, *_IDS, "do_sample", "max_new_tokens", "transformers_version"}


def check_choice(request: dict) -> None:
    """Raise Refusal for a field of another type or out of its range. Biases become what transformers takes."""
    _check_counts(request)
    for name in _NUMBERS:
        if name in request:
            _check_number(name, request[name], _NUMBERS[name])
    if "stop" in request:
        _check_stops(request["stop"])
    if "logit_bias" in request:
        request["logit_bias"] = _biases(request["logit_bias"])
    if "generation_config" in request:
        _check_generation(request["generation_config"])


def _check_counts(values: dict, names: tuple[str, ...] = _COUNTS, *, within: str | None = None) -> None:
    """within: the field that holds them, if they are no fields of the request."""
    for name in names:
        value = values.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            words = f"{name}: expected a number of tokens, 1 or more, found {show(value)}"
            raise Refusal(400, words, param=within or name)


def _check_number(name: str, value: object, bounds: tuple, *, within: str | None = None) -> None:
    kinds, least, most = bounds
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= most:
        number = "an integer" if kinds is int else "a number"
        raise Refusal(400, f"{name}: expected {number} from {least} to {most}, found {show(value)}", param=within or name)
    if name == "temperature" and 0 < value < LEAST_TEMPERATURE:
        words = f"{name}: expected 0, or a number of at least {LEAST_TEMPERATURE}, found {show(value)}"
        raise Refusal(400, words, param=within or name)


def _biases(value: object) -> dict[str, float]:
    """`logit_bias` as transformers takes it: OpenAI's clients give integers, too."""
    fits = isinstance(value, dict) and all(token.isascii() and token.isdecimal() for token in value)
    if not fits or not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()):
        expected = "an object of token ids and numbers from -100 to 100"
        raise Refusal(400, f"logit_bias: expected {expected}, found {show(value)}", param="logit_bias")
    return {token: float(bias) for token, bias in value.items()}


def _check_stops(stops: object) -> None:
    texts = [stops] if isinstance(stops, str) else stops
    fits = isinstance(texts, list) and len(texts) <= STOPS
    if not fits or not all(isinstance(text, str) and len(text) <= STOP_LENGTH for text in texts):
        expected = f"up to {STOPS} texts of up to {STOP_LENGTH} characters"
        raise Refusal(400, f"stop: expected {expected}, found {show(stops)}", param="stop")


def _check_generation(text: object) -> None:
    """transformers' client writes null for what it does not choose."""
    name = "generation_config"
    try:
        config = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise Refusal(400, f"{name}: expected an object of JSON, as text, found {show(text)}", param=name)
    if unknown := sorted(config.keys() - GENERATION):
        words = f"{name}: expected some of {', '.join(sorted(GENERATION))}, found {show(unknown)}"
        raise Refusal(400, words, param=name)
    given = {key: value for key, value in config.items() if value is not None}
    _check_counts(given, ("max_new_tokens",), within=name)
    for key in _OF_CLIENT.keys() & given.keys():
        _check_number(key, given[key], _OF_CLIENT[key], within=name)
    for key in given.keys() & {*_IDS, "do_sample", "transformers_version"}:
        expected = _expected(key, given[key])
        if expected is not None:
            raise Refusal(400, f"{key}: expected {expected}, found {show(given[key])}", param=name)


def _expected(name: str, value: object) -> str | None:
    """What the field should be, if it is something else."""
    if name == "do_sample":
        return None if isinstance(value, bool) else "true or false"
    if name == "transformers_version":
        return None if isinstance(value, str) else "a text"
    ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
    fits = 0 < len(ids) <= _MOST_IDS and all(type(token) is int and -1 <= token < 2**31 for token in ids)
    return None if fits else f"ids of tokens, at most {_MOST_IDS}"
