"""A model whose generate() goes on from the text before, as far as the new prompt begins like it."""

from __future__ import annotations

import inspect

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cli.serving.utils import _GenerationCancelled
from transformers.generation import GenerationMode

from ktmoe.transformers.server.kept_cache import KeptCache
from ktmoe.transformers.server.refusal import Refusal

#: Tokens at a prompt's end, such as <think>, that a template may drop once the answer is there.
TAIL = 16
_ARGUMENTS = {"input_ids", "attention_mask", "generation_config", "tokenizer", "streamer"}


class Keeping:
    """A model, and the cache of its last answer, if that was made in a way that is understood here.

    It is dropped when a prompt shares nothing with it, before the next cache is made, and after errors.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._understood = _keeps_text_only(model)
        self._kept: KeptCache | None = None
        self._tail = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def generate(self, **arguments) -> object:
        if not self._understood or not self._understands(arguments):
            self._kept = None
            return self.model.generate(**arguments)
        kept = self._begin(arguments["input_ids"][0])
        arguments |= {"past_key_values": kept.cache, "logits_processor": LogitsProcessorList([_Watch(kept)])}
        try:
            self._read_to_tail(kept, arguments)
            found = self.model.generate(**arguments)
        except _GenerationCancelled:  # between two steps
            self._keep(kept)
            raise
        except Refusal:  # between two modules
            kept.interrupted()
            self._kept = kept if len(kept.tokens) else None
            raise
        self._keep(kept)
        return found

    def _understands(self, arguments: dict) -> bool:
        """Whether it is one text, which generate() makes with one cache of its usual kind, token after token."""
        ids, mask = arguments["input_ids"], arguments.get("attention_mask")
        if not arguments.keys() <= _ARGUMENTS or len(ids) != 1 or (mask is not None and not bool((mask == 1).all())):
            return False
        return all(_is_usual(config) for config in (arguments["generation_config"], self.model.generation_config))

    def _begin(self, prompt: torch.Tensor) -> KeptCache:
        """The cache for a prompt: the kept one, as far as it fits, else a new one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            shared = kept.shared(prompt)
            if kept.go_back(shared):
                return kept
            if kept.before_mark(shared) <= TAIL:
                self._tail = max(self._tail, kept.before_mark(shared))
        del kept  # two conversations are never there at once
        return KeptCache(DynamicCache(config=self.model.config))  # as generate() makes it

    def _read_to_tail(self, kept: KeptCache, arguments: dict) -> None:
        """Let the mark be before the tail of the prompt, where an earlier prompt showed that the template drops it."""
        ids = arguments["input_ids"]
        length = ids.shape[1] - self._tail
        if self._tail and kept.forgets() and length > len(kept.tokens):
            config = GenerationConfig(max_new_tokens=1, do_sample=False)
            part = {"input_ids": ids[:, :length], "attention_mask": torch.ones_like(ids[:, :length])}
            self.model.generate(**arguments | part | {"generation_config": config, "streamer": None})

    def _keep(self, kept: KeptCache) -> None:
        """Keep it if it holds what is known of it."""
        if len(kept.tokens) and kept.cache.get_seq_length() == len(kept.tokens):
            self._kept = kept


class _Watch(LogitsProcessor):
    """Sees the tokens that the cache holds after each step, and marks the first of them, the prompt's end."""

    def __init__(self, kept: KeptCache):
        self._kept, self._marked = kept, False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._kept.tokens = input_ids[0]
        if not self._marked:
            self._kept.mark()
            self._marked = True
        return scores


def _keeps_text_only(model: PreTrainedModel) -> bool:
    """Whether generate() makes a DynamicCache for it; where it reads images, their tokens would not say which they were."""
    config = model.config
    usual = not config.is_encoder_decoder and config.get_text_config() is config and model._supports_default_dynamic_cache()
    return usual and "past_key_values" in inspect.signature(model.forward).parameters


def _is_usual(config: GenerationConfig) -> bool:
    one = config.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    one = one and (config.num_return_sequences or 1) == 1 and config.guidance_scale in (None, 1)
    return one and config.use_cache is not False and config.cache_implementation is None and not config.token_healing
