"""The guard of `ktmoe serve`, before an application that calls a module as often as it is told: no client stops another."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine

import commands
import pytest
import torch

from ktmoe.transformers.server import guard
from ktmoe.transformers.server.access import Access
from ktmoe.transformers.server.fields import Fields
from ktmoe.transformers.server.generation import Generations
from ktmoe.transformers.server.refusal import Refusal

#: It needs no model.
pytestmark = pytest.mark.smoke


class Work:
    """What a model would do, in its thread. calls: of a module, so far. allowed: set to let it begin."""

    def __init__(self, steps: int):
        self.steps, self.calls, self.begun = steps, 0, 0
        self.allowed = threading.Event()
        self.allowed.set()
        self._module = torch.nn.Identity()

    def __call__(self) -> None:
        self.begun += 1
        self.allowed.wait(commands.PATIENCE)
        for _ in range(self.steps):
            self._module(0)
            self.calls += 1
            time.sleep(0.001)


class Front:
    """A guard and its application. ask() -> (status, body), or None for a client that was told nothing."""

    def __init__(self, work: Callable[[], None], seconds: float = 3600):
        self.generations = Generations(100)
        self.work = work
        self.guard = guard.Guard(
            self._app, Access("localhost", cors=False), Fields("tiny", 100, frozenset(), (), False), self.generations, seconds
        )

    async def _app(self, scope, receive, send) -> None:
        assert (await receive())["type"] == "http.request"
        try:
            await self.generations.async_submit(self.work)
        except Refusal as refusal:
            await refusal.send(send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(self, *chunks: bytes, whole: bool = True, gone: asyncio.Event | None = None, send=None):
        sent, left, gone = [], list(chunks or [b'{"prompt": "x"}']), gone or asyncio.Event()

        async def receive() -> dict:
            if left:
                return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or not whole}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def keep(message: dict) -> None:
            sent.append(message)

        await self.guard({"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}, receive, send or keep)
        return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else None


def in_a_loop(run: Callable[[], Coroutine]) -> None:
    asyncio.run(asyncio.wait_for(run(), commands.PATIENCE))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_large_body():
    async def run():
        front = Front(Work(1))
        chunk = b" " * 1_000_000
        found, content = await front.ask(*[chunk] * 11, whole=False)  # its end is not waited for
        assert (found, content["error"]["message"]) == (413, "the request is too large: expected at most 10000000 bytes")
        assert (await front.ask())[0] == 200

    in_a_loop(run)


def test_a_body_without_an_end(monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.05)

    async def run():
        front = Front(Work(1))
        assert (await front.ask(b"{", whole=False))[0] == 408
        gone = asyncio.Event()
        gone.set()
        assert await front.ask(b"{", whole=False, gone=gone) is None

    in_a_loop(run)


def test_many_at_once():
    """Some are refused at once; the others are answered one after the other."""

    async def run():
        front = Front(Work(1))
        front.work.allowed.clear()
        asked = [asyncio.create_task(front.ask()) for _ in range(guard.REQUESTS + 8)]
        await until(lambda: sum(one.done() for one in asked) == 8 and front.work.begun == 1)
        front.work.allowed.set()
        found = [await one for one in asked]
        assert sorted(status for status, _ in found) == [200] * guard.REQUESTS + [503] * 8
        assert (await front.ask())[0] == 200

    in_a_loop(run)


def test_a_client_that_goes_while_it_waits():
    async def run():
        front, gone = Front(Work(1)), asyncio.Event()
        front.work.allowed.clear()
        first = asyncio.create_task(front.ask())
        await until(lambda: front.work.begun == 1)
        second, third = asyncio.create_task(front.ask(gone=gone)), asyncio.create_task(front.ask())
        await asyncio.sleep(0.01)
        gone.set()
        assert await second is None
        front.work.allowed.set()
        assert [(await one)[0] for one in (first, third)] == [200, 200]
        assert front.work.begun == 2

    in_a_loop(run)


def test_a_client_that_goes_while_it_is_answered():
    async def run():
        front, gone = Front(Work(10**9)), asyncio.Event()
        asked = asyncio.create_task(front.ask(gone=gone))
        await until(lambda: front.work.calls > 3)
        gone.set()
        await asked
        front.work = Work(1)
        assert (await front.ask())[0] == 200

    in_a_loop(run)


def test_an_answer_that_takes_too_long():
    async def run():
        found, content = await Front(Work(10**9), seconds=0.05).ask()
        assert (found, content["error"]["code"]) == (504, "timeout")
        assert "took longer than 0.05 s" in content["error"]["message"]

    in_a_loop(run)


def test_a_client_that_does_not_read(monkeypatch):
    """Others are answered meanwhile; in the end it is left alone."""
    monkeypatch.setattr(guard, "TAKING_SECONDS", 0.2)

    async def run():
        front, never = Front(Work(1)), asyncio.Event()
        slow = asyncio.create_task(front.ask(send=lambda _: never.wait()))
        await until(lambda: front.work.calls == 1)
        assert (await front.ask())[0] == 200
        await slow

    in_a_loop(run)


def test_the_end_of_the_server():
    async def run():
        front = Front(Work(10**9))
        asked = [asyncio.create_task(front.ask()) for _ in range(3)]
        await until(lambda: front.work.calls > 3)
        assert await asyncio.to_thread(front.generations.close, commands.PATIENCE)
        asked.append(asyncio.create_task(front.ask()))
        for one in asked:
            found, content = await one
            assert (found, content["error"]["message"]) == (503, "the server was stopped")
        assert front.work.begun == 1

    in_a_loop(run)
