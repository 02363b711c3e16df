"""What a request says: fields that would load, run or fetch something, or take unbounded work, are refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ktmoe.messages import show
from ktmoe.transformers.server.choices import check_choice
from ktmoe.transformers.server.content import check_input, check_messages, check_prompt, check_tools, media_of
from ktmoe.transformers.server.parameters import served
from ktmoe.transformers.server.refusal import Refusal

#: Characters of a request for each token of the context. Text has 2 to 5; this bounds what is tokenized.
CHARACTERS = 8
#: Levels of objects and lists in a request: each later reader of JSON stops at another depth of its own.
DEPTH = 100


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
        most = CHARACTERS * self.context
        # each of these is a character of the request, wherever it stands; a value takes up to 100 times as many bytes
        if sum(body.count(sign) for sign in b",[{") > most:
            raise self._too_long(f"more than {most}")
        try:
            request = json.loads(body.decode("utf-8-sig"))  # of bytes it would take UTF-16, too
            text = json.dumps(request, ensure_ascii=False)
            text.encode()
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"expected an object of JSON in UTF-8, found something else: {error}") from None
        if not isinstance(request, dict):
            raise Refusal(400, f"expected an object of JSON, found {show(request)}")
        if request.get("model", self.name) != self.name:
            words = f"model: expected {show(self.name)}, found {show(request['model'])}"
            raise Refusal(404, words, "model_not_found", param="model")
        _check_depth(request)
        length = len(text) - sum(len(medium) for medium in media_of(request, self.media))
        if length > most:
            raise self._too_long(str(length))
        request = served(path, request)
        self._check_text(path, request)
        check_choice(request)
        if not isinstance(request.get("stream", False), bool):
            raise Refusal(400, f"stream: expected true or false, found {show(request['stream'])}", param="stream")
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

    def _too_long(self, characters: str) -> Refusal:
        return Refusal(
            400,
            f"the request has {characters} characters: expected at most {CHARACTERS * self.context}, since prompt and answer"
            f" may have {self.context} tokens together",
            "context_length_exceeded",
        )


def _check_depth(request: dict) -> None:
    for name, field in request.items():
        level = [field]
        for _ in range(DEPTH):
            level = [one for value in level for one in _inside(value)]
            if not level:
                break
        else:
            raise Refusal(400, f"{name}: expected at most {DEPTH} levels of objects and lists", param=name)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
