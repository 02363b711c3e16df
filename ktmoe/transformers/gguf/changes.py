"""What llama.cpp's converters do to tensors beside renaming them, undone: orders of rows, and numbers of small tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ktmoe.errors import CheckpointError
from ktmoe.transformers.gguf.metadata import GgufMetadata

#: Of a matrix of so many rows: which stored row each row of the model's matrix is.
Order = Callable[[GgufMetadata, int], np.ndarray]
#: Of a tensor's numbers, float32: the parameter's.
Change = Callable[[np.ndarray], np.ndarray]


def _halves(heads_key: str) -> Order:
    """Rows of heads whose first and second halves stand in turn, as llama.cpp rotates pairs of neighbours."""

    def order(of: GgufMetadata, rows: int) -> np.ndarray:
        heads = of.count(heads_key, of.count("attention.head_count"))
        if not heads or rows % (2 * heads):
            expected = f"{heads_key} whose heads have an even number of {rows} rows each"
            raise CheckpointError(f"{of.checkpoint.path}: expected {expected}, found {heads}")
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)

    return order


#: By GGUF's stems: q and k of models with llama.cpp's first kind of rotary embedding.
INTERLEAVED: Mapping[str, Order] = {
    "attn_q": _halves("attention.head_count"),
    "attn_k": _halves("attention.head_count_kv"),
}


def _by_key_heads(of: GgufMetadata, rows: int) -> np.ndarray:
    """Qwen3-Next's q, k, v and z of all heads, one after another: the model has them together for each key head."""
    heads, size = of.count("ssm.group_count"), of.count("ssm.state_size")
    values = of.count("ssm.inner_size")
    if not heads or values % heads or rows != 2 * heads * size + 2 * values:
        expected = f"{2 * heads * size + 2 * values} rows of q, k, v and z, as ssm.group_count and others say"
        raise CheckpointError(f"{of.checkpoint.path}: expected {expected}, found {rows}")
    parts = np.split(np.arange(rows), np.cumsum([heads * size, heads * size, values]))
    return np.concatenate([part.reshape(heads, -1) for part in parts], axis=1).reshape(-1)


#: By the first of GGUF's stems that are one module. Older files have one tensor, ssm_in, in the model's own order.
BY_KEY_HEADS: Mapping[str, Order] = {"attn_qkv": _by_key_heads}


def one_row(values: np.ndarray) -> np.ndarray:
    """A matrix of one row, of its numbers."""
    return values.reshape(1, -1)


#: By parameters of a layer, or of the model: of Qwen3-Next, whose norms multiply by 1 + weight.
QWEN3_NEXT: Mapping[str, Change] = {
    **dict.fromkeys(
        (
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
            "model.norm.weight",
        ),
        lambda values: values - np.float32(1),
    ),
    "linear_attn.A_log": lambda values: np.log(-values.astype(np.float64)).astype(np.float32),
    "linear_attn.conv1d.weight": lambda values: values.reshape(len(values), 1, -1),
}
