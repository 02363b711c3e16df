"""What a request says: fields that would load, run or fetch something, or take unbounded work, are refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ktmoe.messages import show
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
_MEDIA = {"image_url", "input_image", "video_url", "audio_url", "input_audio"}


@dataclass(frozen=True)
class Fields:
    """name: the model's. context: tokens of prompt and answer together. variables: what the model's chat template reads.

    media: parts of a message that the model reads besides text, such as image_url.
    """

    name: str
    context: int
    variables: frozenset[str]
    media: Collection[str]

    def parse(self, body: bytes) -> dict:
        """The request that a body holds, checked. Raises Refusal."""
        try:
            request = json.loads(body)
            text = json.dumps(request, ensure_ascii=False)
            text.encode()
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"expected an object of JSON in UTF-8, found something else: {error}") from None
        if not isinstance(request, dict):
            raise Refusal(400, f"expected an object of JSON, found {show(request)}")
        if request.get("model", self.name) != self.name:
            raise Refusal(404, f"model: expected {show(self.name)}, found {show(request['model'])}", "model_not_found")
        length = len(text) - sum(len(medium) for medium in _media(request, self.media))
        if length > CHARACTERS * self.context:
            raise Refusal(
                400,
                f"the request has {length} characters: expected at most {CHARACTERS * self.context}, since prompt and answer"
                f" may have {self.context} tokens together",
                "context_length_exceeded",
            )
        self._check(request)
        return request

    def _check(self, request: dict) -> None:
        _check_counts(request)
        _check_stops(request.get("stop"))
        if (config := request.get("generation_config")) is not None:
            _check_generation(config)
        given = request.get("chat_template_kwargs") or {}
        if not isinstance(given, dict) or not given.keys() <= self.variables:
            allowed = f"variables of the model's template ({', '.join(sorted(self.variables)) or 'none'})"
            raise Refusal(400, f"chat_template_kwargs: expected {allowed}, found {show(given)}")


def _check_counts(values: dict, names: tuple[str, ...] = _COUNTS) -> None:
    for name in names:
        value = values.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise Refusal(400, f"{name}: expected a number of tokens, 1 or more, found {show(value)}")


def _check_stops(stops: object) -> None:
    texts = [stops] if isinstance(stops, str) else stops or []
    fits = isinstance(texts, list) and len(texts) <= STOPS
    if not fits or not all(isinstance(text, str) and len(text) <= STOP_LENGTH for text in texts):
        raise Refusal(400, f"stop: expected up to {STOPS} texts of up to {STOP_LENGTH} characters, found {show(stops)}")


def _check_generation(text: object) -> None:
    try:
        config = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise Refusal(400, f"generation_config: expected an object of JSON, as text, found {show(text)}")
    if unknown := sorted(config.keys() - GENERATION):
        raise Refusal(400, f"generation_config: expected some of {', '.join(sorted(GENERATION))}, found {show(unknown)}")
    _check_counts(config, ("max_new_tokens",))


def _media(request: dict, kinds: Collection[str]) -> Iterator[str]:
    """Images, sounds and videos, of kinds that the model reads.

    Raises Refusal for another kind, which transformers would drop, and for one that is elsewhere: it would fetch it, or read
    a file.
    """
    found: list[object] = [request]
    while found:
        value = found.pop()
        if isinstance(value, dict):
            kind = value.get("type")
            if isinstance(kind, str) and kind in _MEDIA:
                if kind not in kinds:
                    raise Refusal(400, f"{kind}: expected {', '.join(['text', *sorted(kinds)])}, which this model reads")
                yield _medium(kind, value)
            found += value.values()
        elif isinstance(value, list):
            found += value


def _medium(kind: str, part: dict) -> str:
    value = part.get("image_url" if kind == "input_image" else kind)
    if kind == "input_audio":
        # without a format, transformers takes the data for a path
        data, form = (value.get(name) if isinstance(value, dict) else None for name in ("data", "format"))
        if isinstance(data, str) and isinstance(form, str) and form.isalnum():
            return data
        raise Refusal(400, f"input_audio: expected data and their format, found {show(value)}")
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url.startswith("data:"):
        raise Refusal(400, f"{kind}: expected a URL that begins with data:, found {show(url)}")
    return url
