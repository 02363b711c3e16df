"""The answers that the model makes, one at a time: each is bounded, and can be stopped while it is made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar

from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import GenerationConfig, PreTrainedModel
from transformers.cli.serving.utils import GenerateManager, _GenerationCancelled

from ktmoe.transformers.server.keeping import Keeping
from ktmoe.transformers.server.refusal import Refusal, refusal_of

#: Tokens of an answer where neither the client nor the checkpoint says how many.
DEFAULT_TOKENS = 1024


class PendingAnswer:
    """An answer that a client waits for. begun: whether it is its turn. stopped: why it must end.

    made: set, in the server's loop, when the model has made it. failed: the error that ended a stream.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.begun = False
        self.made = asyncio.Event()
        self.stopped: Refusal | None = None
        self.failed: Refusal | None = None


#: What a handler of transformers' server works for.
current: ContextVar[PendingAnswer] = ContextVar("current")


class Generations(GenerateManager):
    """transformers' own way to make answers, in a thread, within a context of so many tokens."""

    def __init__(self, context: int):
        super().__init__()
        self._context = context
        self._changing = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._answer: PendingAnswer | None = None
        self._maker: int | None = None
        self._hook = None
        self._closed: Refusal | None = None
        self._keeping: Keeping | None = None

    @property
    def closed(self) -> Refusal | None:
        """The reason why no answer is made any more, or None."""
        return self._closed

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        self._bound(inputs, gen_config)
        model = _Streamed(self._kept(model), current.get())
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        self._bound(inputs, gen_config)
        return await super().generate_non_streaming(self._kept(model), processor, inputs, gen_config, request_id)

    def _kept(self, model: PreTrainedModel) -> Keeping:
        """The model, which keeps its cache from answer to answer."""
        if self._keeping is None or self._keeping.model is not model:
            self._keeping = Keeping(model)
        return self._keeping

    def _bound(self, inputs: dict, config: GenerationConfig) -> None:
        """Leave the answer what the prompt leaves of the context. Raises Refusal if that is nothing, and for no prompt."""
        tokens = inputs["input_ids"].shape[-1]
        if tokens == 0:
            raise Refusal(400, "the prompt has no tokens: expected some")
        if tokens >= self._context:
            limit = f"fewer than {self._context}, which prompt and answer may have together"
            raise Refusal(400, f"the prompt has {tokens} tokens: expected {limit}", "context_length_exceeded")
        config.max_new_tokens = min(config.max_new_tokens or DEFAULT_TOKENS, self._context - tokens)

    def submit(self, fn: Callable, *args, **kwargs) -> Future:
        return super().submit(self._make, current.get(), fn, *args, **kwargs)

    def async_submit(self, fn: Callable, *args, **kwargs) -> asyncio.Future:
        return super().async_submit(self._make, current.get(), fn, *args, **kwargs)

    def _make(self, answer: PendingAnswer, fn: Callable, *args, **kwargs) -> object:
        with self._changing:
            self._answer, self._maker = answer, threading.get_ident()
            self._idle.clear()
            self._interrupt()
        try:
            return fn(*args, **kwargs)
        finally:
            with self._changing:
                self._answer = None
                if self._hook is not None:
                    self._hook.remove()
                    self._hook = None
            self._idle.set()
            answer.loop.call_soon_threadsafe(answer.made.set)

    def cancel(self, answer: PendingAnswer, why: Refusal) -> None:
        """End an answer, if it is being made, before the model's next module is called; else as soon as it begins."""
        with self._changing:
            answer.stopped = answer.stopped or why
            self._interrupt()

    def close(self, seconds: float) -> bool:
        """End all answers; whether the thread has left the model within so many seconds."""
        with self._changing:
            self._closed = Refusal(503, "the server was stopped")
            self._interrupt()
        return self._idle.wait(seconds)

    def _interrupt(self) -> None:
        """Let the model's next module raise, if there is a reason. Without one there is no hook: it would slow each module."""
        if self._reason() is not None and self._hook is None:
            self._hook = register_module_forward_pre_hook(self._refuse)

    def _reason(self) -> Refusal | None:
        return self._answer and (self._closed or self._answer.stopped)

    def _refuse(self, *_: object) -> None:
        """Raise in the thread that makes the answer. Hooks are the process's: other threads may be in models of their own."""
        if threading.get_ident() == self._maker and (reason := self._reason()) is not None:
            raise reason


class _Streamed:
    """A model whose errors are those of its answer: in a stream, transformers keeps no more of them than the text."""

    def __init__(self, model, answer: PendingAnswer):
        self._model, self._answer = model, answer

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def generate(self, **arguments) -> object:
        try:
            return self._model.generate(**arguments)
        except _GenerationCancelled:
            raise
        except Exception as error:
            self._answer.failed = error if isinstance(error, Refusal) else refusal_of(error)
            raise self._answer.failed from None
