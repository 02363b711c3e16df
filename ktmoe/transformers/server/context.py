"""How many tokens a prompt and its answer may have together: what the model was made for, and what memory allows."""

from __future__ import annotations

import math

from transformers import PreTrainedModel

from ktmoe.errors import InputError
from ktmoe.machine.memory import available_bytes

#: Tokens, where a model does not say.
DEFAULT = 32_768
#: Bytes for each pair of a prompt's tokens: eager attention has the scores of each head in several dtypes, the others a mask.
_SCORES, _MASK = 10, 3


def declared(model: PreTrainedModel) -> int:
    """Tokens that the model was made for."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or DEFAULT


def context_of(model: PreTrainedModel, wanted: int | None = None) -> int:
    """Tokens. wanted: in the place of what half of the memory that is available allows.

    Raises InputError if the model was made for less than is wanted.
    """
    most = declared(model)
    if wanted is not None:
        if wanted > most:
            raise InputError(f"context: expected at most the model's own, {most} tokens, found {wanted}")
        return wanted
    config, available = model.config.get_text_config(), available_bytes()
    if available is None:
        return most
    eager = config._attn_implementation == "eager"
    pair = _SCORES * getattr(config, "num_attention_heads", 1) if eager else _MASK
    return min(most, math.isqrt(max(available, 0) // 2 // pair))
