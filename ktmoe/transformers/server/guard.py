"""What stands before transformers' server: it bounds what clients send, and ends what none of them waits for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable

from ktmoe.transformers.server.access import Access
from ktmoe.transformers.server.fields import Fields
from ktmoe.transformers.server.generation import Generations, PendingAnswer, current
from ktmoe.transformers.server.refusal import Refusal, in_words

logger = logging.getLogger(__name__)

#: Bytes of a request: room for a few pictures. Seconds to send it, and to take the rest of an answer that is made.
BODY_BYTES, BODY_SECONDS, TAKING_SECONDS = 10_000_000, 30, 60
#: Whole requests at a time, of which one is answered while the others wait.
REQUESTS = 32
#: Requests of more than so many bytes that are sent at a time. They would take the memory; smaller ones are not counted.
LARGE, LARGE_BYTES = 8, 65_536
#: How an error begins in a stream of transformers'. No text of an answer can hold it: JSON would have a \ before each ".
_ERROR = b'data: {"error": "'

Receive = Callable[[], Awaitable[dict]]
Send = Callable[[dict], Awaitable[None]]


class Guard:
    """An ASGI application around `app`. seconds: for one answer, from its turn on."""

    def __init__(self, app, access: Access, fields: Fields, generations: Generations, seconds: float):
        self._app, self._access, self._fields, self._generations = app, access, fields, generations
        self._seconds = seconds
        self._requests = self._large = 0
        self._turn = asyncio.Lock()

    async def __call__(self, scope: dict, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the application's start and end
            asyncio.get_running_loop().set_exception_handler(_log)
            await self._app(scope, receive, send)
            return
        scope["query_string"] = b""  # no route reads it, and uvicorn would log what it holds
        try:
            self._access.check(scope)
            if scope["method"] == "POST":
                await self._post(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Refusal as refusal:
            await refusal.send(send)
        except asyncio.CancelledError:
            if self._generations.closed is None:  # else uvicorn has waited long enough for the end
                raise
        except Exception as error:  # the client was told; uvicorn would write a traceback
            logger.error("%s: %s", scope["path"], in_words(error))

    async def _post(self, scope: dict, receive: Receive, send: Send) -> None:
        self._check_room()
        body = await self._body(scope, receive)
        if body is None:
            return
        body = json.dumps(self._fields.parse(scope["path"], body)).encode()
        self._check_room()
        self._requests += 1
        try:
            await self._answer(scope, body, receive, send)
        finally:
            self._requests -= 1

    def _check_room(self) -> None:
        """Raise Refusal if enough requests wait. Those that are not whole do not count: slow clients could take all places."""
        if self._requests >= REQUESTS:
            raise _busy(f"{REQUESTS} requests wait already")

    async def _body(self, scope: dict, receive: Receive) -> bytes | None:
        """What a client sends; None if it goes before the end. Raises Refusal."""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if int(length) > BODY_BYTES:
            raise _too_large()
        body, large, more = bytearray(), False, True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > BODY_BYTES:
                        raise _too_large()
                    if more and len(body) > LARGE_BYTES and not large:
                        if self._large >= LARGE:
                            raise _busy(f"{LARGE} requests of more than {LARGE_BYTES} bytes are being sent already")
                        large = True
                        self._large += 1
        except TimeoutError:
            raise Refusal(408, f"the request was not whole after {BODY_SECONDS} s, found {len(body)} bytes") from None
        finally:
            self._large -= large
        return bytes(body)

    async def _answer(self, scope: dict, body: bytes, receive: Receive, send: Send) -> None:
        """Answer a request, until the answer was sent or its client has gone."""
        answer, gone = PendingAnswer(), asyncio.create_task(_gone(receive))
        sent = asyncio.create_task(self._in_turn(answer, scope, _once(body, gone), _told(answer, send)))
        try:
            await asyncio.wait({sent, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not sent.done():
                self._generations.cancel(answer, Refusal(499, "the client has gone"))
                if not answer.begun:
                    return
            await sent
        finally:
            gone.cancel()
            sent.cancel()

    async def _in_turn(self, answer: PendingAnswer, scope: dict, receive: Receive, send: Send) -> None:
        """The turn ends when the answer is made, so that nobody waits for a client that reads it slowly."""
        async with self._turn:
            if self._generations.closed:
                raise self._generations.closed
            answer.begun = True
            current.set(answer)
            late = Refusal(504, f"the answer took longer than {self._seconds:g} s, this server's limit", "timeout")
            timer = answer.loop.call_later(self._seconds, self._generations.cancel, answer, late)
            sent, made = asyncio.create_task(self._app(scope, receive, send)), asyncio.create_task(answer.made.wait())
            await asyncio.wait({sent, made}, return_when=asyncio.FIRST_COMPLETED)
            timer.cancel()
            made.cancel()
        with contextlib.suppress(TimeoutError):  # the connection ends with an answer that is not whole
            await asyncio.wait_for(sent, TAKING_SECONDS)


def _busy(words: str) -> Refusal:
    return Refusal(503, words, "server_overloaded", headers={"retry-after": "10"})


def _too_large() -> Refusal:
    return Refusal(413, f"the request is too large: expected at most {BODY_BYTES} bytes")


def _log(_loop: asyncio.AbstractEventLoop, context: dict) -> None:
    """One line in the place of asyncio's traceback."""
    error = context.get("exception")
    logger.error("%s%s", context["message"], f": {in_words(error)}" if error else "")


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _once(body: bytes, gone: asyncio.Task) -> Receive:
    """What an application receives: the body, which was read already; then that the client has gone, once it has."""
    given = False

    async def receive() -> dict:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.wait({gone})
        return {"type": "http.disconnect"}

    return receive


def _told(answer: PendingAnswer, send: Send) -> Send:
    """What an application sends. An error in a stream gets the form of OpenAI's: transformers has a text in its place."""

    async def told(message: dict) -> None:
        before, error, _ = message.get("body", b"").rpartition(_ERROR)
        if error and answer.failed is not None:
            message = message | {"body": before + f"data: {json.dumps(answer.failed.content())}\n\n".encode()}
        await send(message)

    return told
