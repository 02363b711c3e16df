"""One answer of a model, streamed as text, and how long its parts took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ktmoe.errors import InputError


@dataclass(frozen=True)
class Answer:
    """text: without special tokens. prompt_tokens, new_tokens: how many. stopped: whether the model ended it, not the limit.

    prefill_seconds: from the call to the first new token. decode_seconds: from there to the last one.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    stopped: bool
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_tokens_s(self) -> float:
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_s(self) -> float | None:
        """Tokens per second after the first one; None for an answer of one token."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 else None

    def data(self) -> dict[str, Any]:
        """The fields and the rates, for JSON."""
        return vars(self) | {"prefill_tokens_s": self.prefill_tokens_s, "decode_tokens_s": self.decode_tokens_s}


class _Streamer(TextStreamer):
    """Gives the text to a function, and notes when tokens come."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []
        self._write = write

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, system: str | None) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask, int64 [1, tokens], of a user's turn by the chat template; without one, of the bare prompt.

    Raises InputError for a system prompt without a template, for what the template refuses, and for a prompt of no tokens.
    """
    if tokenizer.chat_template:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        try:
            found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        except TemplateError as error:
            raise InputError(f"the model's chat template refuses this conversation: {error}") from error
    elif system:
        raise InputError("a system prompt needs a chat template, which this model does not have")
    else:
        found = tokenizer(prompt, return_tensors="pt")
    if not found["input_ids"].numel():
        raise InputError("expected a prompt of at least one token, found an empty one")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, torch.Tensor],
    write: Callable[[str], object],
    **options: Any,
) -> Answer:
    """Generate, and give the text to write() piece by piece. inputs: encode()'s. options: generate()'s."""
    streamer = _Streamer(tokenizer, write)
    start = time.perf_counter()
    found = model.generate(**{name: ids.to(model.device) for name, ids in inputs.items()}, streamer=streamer, **options)
    tokens = inputs["input_ids"].shape[1]
    new = found[0, tokens:]
    return Answer(
        text=tokenizer.decode(new, skip_special_tokens=True),
        prompt_tokens=tokens,
        new_tokens=len(new),
        stopped=len(new) < options["max_new_tokens"],
        prefill_seconds=streamer.times[1] - start,
        decode_seconds=streamer.times[-1] - streamer.times[1],
    )
