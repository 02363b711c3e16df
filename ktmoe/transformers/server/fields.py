"""What a request says: fields that would load, run or fetch something, or take unbounded work, are refused."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from ktmoe.messages import show
from ktmoe.transformers.server.content import check_input, check_messages, check_prompt, check_tools, media_of
from ktmoe.transformers.server.parameters import served
from ktmoe.transformers.server.refusal import Refusal

#: Characters of a request for each token of the context. Text has 2 to 5; this bounds what is tokenized.
CHARACTERS = 8
#: The most texts that end an answer, and characters of each: transformers compares them with all its vocabulary.
STOPS, STOP_LENGTH = 4, 64
#: What `generation_config`, a field of transformers' own chat client, may choose: how tokens are chosen, and how many.
GENERATION = {
    "bos_token_id",
    "do_sample",
    "eos_token_id",
    "epsilon_cutoff",
    "eta_cutoff",
    "max_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "pad_token_id",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "transformers_version",
    "typical_p",
}
_COUNTS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
#: Numbers: their type, the least and the most.
_NUMBERS = {
    "frequency_penalty": ((int, float), -2, 2),
    "seed": (int, -(2**63), 2**63 - 1),
    "temperature": ((int, float), 0, 2),
    "top_p": ((int, float), 0, 1),
}


@dataclass(frozen=True)
class Fields:
    """name: the model's. context: tokens of prompt and answer together. variables: what the model's chat template reads.

    media: parts of a message that the model reads besides text, such as image_url. tools: whether its template reads tools.
    """

    name: str
    context: int
    variables: frozenset[str]
    media: Collection[str]
    tools: bool

    def parse(self, path: str, body: bytes) -> dict:
        """The request that a body holds, checked: the fields that ask for something. Raises Refusal."""
        try:
            request = json.loads(body)
            text = json.dumps(request, ensure_ascii=False)
            text.encode()
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"expected an object of JSON in UTF-8, found something else: {error}") from None
        if not isinstance(request, dict):
            raise Refusal(400, f"expected an object of JSON, found {show(request)}")
        if request.get("model", self.name) != self.name:
            words = f"model: expected {show(self.name)}, found {show(request['model'])}"
            raise Refusal(404, words, "model_not_found", param="model")
        length = len(text) - sum(len(medium) for medium in media_of(request, self.media))
        if length > CHARACTERS * self.context:
            raise Refusal(
                400,
                f"the request has {length} characters: expected at most {CHARACTERS * self.context}, since prompt and answer"
                f" may have {self.context} tokens together",
                "context_length_exceeded",
            )
        request = served(path, request)
        self._check_text(path, request)
        self._check_choice(request)
        return request

    def _check_text(self, path: str, request: dict) -> None:
        """What the model is asked to read."""
        if path == "/v1/chat/completions":
            check_messages(request.get("messages"), self.media)
        elif path == "/v1/completions":
            if isinstance(request.get("prompt"), list) and len(request["prompt"]) == 1:  # as some clients send one text
                [request["prompt"]] = request["prompt"]
            check_prompt(request.get("prompt"))
        elif path == "/v1/responses":
            check_input(request.get("input"), self.media)
            if not isinstance(request.get("instructions", ""), str):
                found = show(request["instructions"])
                raise Refusal(400, f"instructions: expected a text, found {found}", param="instructions")
            request.setdefault("stream", False)  # transformers streams where OpenAI does not
        if "tools" in request:
            check_tools(request["tools"], read=self.tools)
        given = request.get("chat_template_kwargs", {})
        if not isinstance(given, dict) or not given.keys() <= self.variables:
            allowed = f"variables of the model's template ({', '.join(sorted(self.variables)) or 'none'})"
            words = f"chat_template_kwargs: expected {allowed}, found {show(given)}"
            raise Refusal(400, words, param="chat_template_kwargs")

    def _check_choice(self, request: dict) -> None:
        """How tokens are chosen, how many, and how they are sent."""
        _check_counts(request)
        for name in _NUMBERS:
            if name in request:
                _check_number(name, request[name])
        if not isinstance(request.get("stream", False), bool):
            raise Refusal(400, f"stream: expected true or false, found {show(request['stream'])}", param="stream")
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


def _check_number(name: str, value: object) -> None:
    kinds, least, most = _NUMBERS[name]
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= most:
        number = "an integer" if kinds is int else "a number"
        raise Refusal(400, f"{name}: expected {number} from {least} to {most}, found {show(value)}", param=name)


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
    try:
        config = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        words = f"expected an object of JSON, as text, found {show(text)}"
    elif unknown := sorted(config.keys() - GENERATION):
        words = f"expected some of {', '.join(sorted(GENERATION))}, found {show(unknown)}"
    else:
        _check_counts(config, ("max_new_tokens",), within="generation_config")
        return
    raise Refusal(400, f"generation_config: {words}", param="generation_config")
