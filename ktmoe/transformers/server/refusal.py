"""The answer to a request that is not served, in the form of OpenAI's errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from jinja2 import TemplateError

from ktmoe.errors import KtmoeError
from ktmoe.messages import printable

#: What transformers and a chat template raise for fields that are not there, or are of a type or value that they do not expect.
#: They check few fields before they use them.
OF_REQUESTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TemplateError, TypeError, ValueError)
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}


class Refusal(Exception):
    """status: of HTTP. code: a word for programs, such as "model_not_found". param: the field that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(printable(message))
        self.status, self.code, self.param, self.headers = status, code, param, headers or {}

    def content(self) -> dict:
        """The body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    async def send(self, send: Callable[[dict], Awaitable[None]]) -> None:
        """Answer by ASGI."""
        body = json.dumps(self.content()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body))} | self.headers
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})


def refusal_of(error: Exception) -> Refusal:
    """The refusal for an error of transformers or the model."""
    if isinstance(error, OF_REQUESTS) and not isinstance(error, KtmoeError):
        return Refusal(400, f"transformers does not understand the request: {in_words(error)}")
    return Refusal(500, f"the model cannot answer: {in_words(error)}")


def in_words(error: Exception) -> str:
    """An error's type and message, in one line."""
    return printable(f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": "))
