"""What a loaded model is given, so that little is left of a step beside its matrix products."""

from __future__ import annotations

import inspect
import re
import sys

from transformers import PreTrainedModel

from ktmoe.transformers import attention
from ktmoe.transformers.growing_cache import grow_caches

#: A model that asks for the name of its attention, to prepare what that one takes.
_ASKS = re.compile(r"_attn_implementation (==|!=|in)\b")


def prepare(model: PreTrainedModel, *, attend: bool = True) -> None:
    """Let model attend by torch's flash kernel where that computes the same, and its key-value caches grow in place.

    attend: False leaves the attention, for callers that have chosen one. A model whose attention is neither transformers' sdpa
    nor one with sinks that is known keeps its own.
    """
    if attend and (name := _attention_of(model)):
        model.set_attn_implementation(name)
    grow_caches(model)


def _attention_of(model: PreTrainedModel) -> str | None:
    """The name of the attention that computes what the model's own does; None if it has to keep its own."""
    chosen = model.config._attn_implementation
    if chosen == "eager":
        return attention.WITH_SINKS.get(model.config.model_type)
    try:
        source = inspect.getsource(sys.modules[type(model).__module__])
    except (OSError, TypeError):  # a class without a file
        return None
    return attention.NAME if chosen == "sdpa" and not model.config.sub_configs and not _ASKS.search(source) else None
