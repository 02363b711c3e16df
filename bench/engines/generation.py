"""One call of generate(), timed: the prompt, the tokens after it, and the experts' share of both. Needs torch."""

from __future__ import annotations

import time

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from bench.engines import texts

#: Longer prompts are read in parts: eager attention holds a number for each head and pair of a part's tokens and all tokens.
LONG_PROMPT, CHUNK = 2048, 512


class Script(LogitsProcessor):
    """Dictates the tokens, so that all ways go on with the same ones, and notes when each was asked for.

    tokens: [batch, new].
    """

    def __init__(self, tokens: torch.Tensor):
        self._tokens = tokens
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self._tokens[:, len(self.times)]
        self.times.append(time.perf_counter())
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)


class ExpertsClock:
    """Notes each call of a model's modules of experts: when it began and ended, its layer, and the ids that it was given."""

    def __init__(self, model: PreTrainedModel):
        self.calls: list[tuple[float, float, int, torch.Tensor]] = []
        modules = [module for name, module in model.named_modules() if name.endswith(".experts")]
        self._layers = {module: layer for layer, module in enumerate(modules)}
        self._handles = [module.register_forward_pre_hook(self._begin) for module in modules]
        self._handles += [module.register_forward_hook(self._end) for module in modules]

    def __enter__(self) -> ExpertsClock:
        return self

    def __exit__(self, *error) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: torch.nn.Module, inputs: tuple) -> None:
        self._began = time.perf_counter()

    def _end(self, module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.calls.append((self._began, time.perf_counter(), self._layers[module], inputs[1]))

    def of(self, begin: float, end: float) -> dict:
        """Seconds of the calls between two times, and the distinct experts of each, added up for each layer."""
        calls = [call for call in self.calls if begin <= call[0] < end]
        experts = [0] * len(self._layers)
        for _, _, layer, ids in calls:
            experts[layer] += ids.unique().numel()
        return {"seconds": sum(ended - began for began, ended, *_ in calls), "experts": experts}


def tokens(model: PreTrainedModel, batch: int, count: int, seed: int) -> torch.Tensor:
    """Random ones, [batch, count]."""
    return torch.from_numpy(texts.tokens(model.config.vocab_size, batch, count, seed))


def generate(model: PreTrainedModel, batch: int, prompt: int, new: int, seed: int) -> dict:
    """{"prefill": {...}, "decode": {...}}, each with its seconds, and "experts": what ExpertsClock.of() says.

    The prompt's part ends when the first token is asked for, the other one when the last is.
    """
    words = tokens(model, batch, prompt + new, seed)
    script = Script(words[:, prompt:])
    chunks = {"prefill_chunk_size": CHUNK} if prompt > LONG_PROMPT else {}
    settings = GenerationConfig(max_new_tokens=new, do_sample=False, use_cache=True, **chunks)
    inputs = {"inputs": words[:, :prompt], "attention_mask": torch.ones(batch, prompt, dtype=torch.long)}
    with ExpertsClock(model) as clock:
        began = time.perf_counter()
        model.generate(**inputs, generation_config=settings, logits_processor=LogitsProcessorList([script]))
    first, last = script.times[0], script.times[-1]
    return {
        "prefill": {"seconds": first - began, "experts": clock.of(began, first)},
        "decode": {"seconds": last - first, "experts": clock.of(first, last)},
    }


def logits(model: PreTrainedModel, count: int) -> torch.Tensor:
    """The logits of a random text of so many tokens, float32 [count, vocabulary]."""
    with torch.no_grad():
        return model(tokens(model, 1, count, 0)).logits[0].float()
