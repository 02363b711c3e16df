"""Whether two models have the same shape, by what their configurations say."""

from __future__ import annotations

from collections.abc import Callable

from ktmoe.messages import show

#: What must be the same, where both say it.
KEYS = (
    *("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "tie_word_embeddings"),
)


def difference(one: Callable[[str], object], other: Callable[[str], object]) -> str | None:
    """The first difference in words, "hidden_size is 64, expected 128"; None if there is none.

    one, other: functions of a key that give its value, None where the configuration does not say it; other is what is expected.
    """
    for key in KEYS:
        found, expected = one(key), other(key)
        if found is not None and expected is not None and found != expected:
            return f"{key} is {show(found)}, expected {show(expected)}"
    return None
