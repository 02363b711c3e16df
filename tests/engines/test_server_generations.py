"""An answer that is made: ending it ends nothing else."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from ktmoe.transformers.server.generation import Generations, PendingAnswer, current
from ktmoe.transformers.server.refusal import Refusal


@pytest.mark.smoke
def test_other_models_of_the_process():
    """Until its thread has left, an answer that is ended raises in that thread alone."""
    begun, ended, left = threading.Event(), threading.Event(), threading.Event()
    module, x = torch.nn.Identity(), torch.zeros(1)

    def fn():
        begun.set()
        ended.wait(60)
        with pytest.raises(Refusal, match=r"^the client has gone$"):
            module(x)
        left.wait(60)

    async def run():
        generations, answer = Generations(100), PendingAnswer()
        current.set(answer)
        made = generations.async_submit(fn)
        await asyncio.to_thread(begun.wait, 60)
        generations.cancel(answer, Refusal(499, "the client has gone"))
        ended.set()
        try:
            assert module(x) is x
        finally:
            left.set()
            await made

    asyncio.run(run())
