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
    if attend and _attends_alike(model):
        model.set_attn_implementation(attention.NAME)
    grow_caches(model)


def _attends_alike(model: PreTrainedModel) -> bool:
    chosen = model.config._attn_implementation
    if chosen == "eager":
        return model.config.model_type in attention.WITH_SINKS
    try:
        source = inspect.getsource(sys.modules[type(model).__module__])
    except (OSError, TypeError):  # a class without a file
        return False
    return chosen == "sdpa" and not model.config.sub_configs and not _ASKS.search(source)
