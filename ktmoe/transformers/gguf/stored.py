"""What stands in a GGUF file for a parameter: small numbers, and matrices of one tensor, of several, or of a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ktmoe.dequantization import dequantize
from ktmoe.errors import CheckpointError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.dense import find_matrix
from ktmoe.loaders.gguf import matrix_of_rows
from ktmoe.loaders.one_matrix import StoredMatrix
from ktmoe.loaders.scheme import float32
from ktmoe.matrix import Matrix
from ktmoe.matrix_cuts import check_rows, take_rows
from ktmoe.transformers.dense_names import StoredParameter
from ktmoe.transformers.gguf.changes import Change, Order
from ktmoe.transformers.gguf.metadata import GgufMetadata
from ktmoe.weights.formats import BF16, F16, F32


def small_values(checkpoint: Checkpoint, name: str, change: Change | None) -> Callable[[], np.ndarray]:
    """A function that gives a tensor's numbers, changed, float32."""

    def read() -> np.ndarray:
        info = checkpoint.info(name)
        if info.dtype in ("F32", "F16", "BF16"):
            values = float32(checkpoint.read(name), info).reshape(info.shape)
        else:
            values = dequantize(matrix_of_rows(checkpoint, name)).astype(np.float32).reshape(info.shape)
        return values if change is None else change(values)

    return read


def stored_matrix(of: GgufMetadata, bases: Sequence[str], order: Order | None) -> StoredParameter:
    """A matrix of these tensors' rows, one after another. order: which of these rows each row of the model's matrix is."""

    def find() -> list[StoredMatrix]:
        return [find_matrix(of.checkpoint, base) for base in bases]

    rows = sum(of.checkpoint.info(f"{base}.weight").shape[0] for base in bases)
    return StoredParameter(tuple(bases), False, find, None if order is None else order(of, rows))


def split_qkv(of: GgufMetadata, base: str, orders: Mapping[str, Order]) -> Iterator[tuple[str, StoredParameter]]:
    """(stem, matrix) of q, k and v of one tensor, whose rows come in this order. orders: by stems."""
    heads = of.count("attention.head_count")
    shared = of.count("attention.head_count_kv", heads)
    key = of.count("attention.key_length", of.count("embedding_length") // max(1, heads))
    value = of.count("attention.value_length", key)
    counts, shape = (heads * key, shared * key, shared * value), of.checkpoint.info(f"{base}.weight").shape
    n, k = shape if len(shape) == 2 else (0, 0)
    if sum(counts) != n:
        raise CheckpointError(f"{base}: expected {' + '.join(map(str, counts))} rows of q, k and v, found {list(shape)}")
    first = 0
    for stem, count in zip(("attn_q", "attn_k", "attn_v"), counts, strict=True):

        def find(first: int = first, last: int = first + count) -> list[StoredMatrix]:
            whole = find_matrix(of.checkpoint, base)
            check_rows(whole.name, whole.format, n, first, last)
            name = f"{base}[{first}:{last}]"

            def read() -> Matrix:
                return take_rows(whole.read(), first, last, name)

            return [StoredMatrix(name, whole.format, (last - first, k), whole.has_bias, read, whole, (first, last))]

        order = orders.get(stem)
        yield stem, StoredParameter((), False, find, None if order is None else order(of, count))
        first += count


def keys_and_values(of: GgufMetadata, prefix: str) -> StoredParameter:
    """DeepSeek's kv_b_proj: of each head, rows of keys and then rows of values.

    Keys were transposed before they were quantised. So what shares a scale in the file lies across this matrix's rows: it is
    float32, the numbers that the file stands for, unless the file has 16 bits.
    """
    keys, values = f"{prefix}attn_k_b.weight", f"{prefix}attn_v_b.weight"
    infos = [of.checkpoint.info(name) for name in (keys, values)]
    (heads, latents, key), (heads_too, value, latents_too) = (
        info.shape if len(info.shape) == 3 else (0, 0, 0) for info in infos
    )
    if (heads, latents) != (heads_too, latents_too) or not heads:
        expected = "[heads, latents, keys] and [heads, values, latents]"
        raise CheckpointError(f"{keys}: expected {expected}, found {list(infos[0].shape)} and {list(infos[1].shape)}")
    types = {info.dtype for info in infos}
    weight_format = {("F16",): F16, ("BF16",): BF16}.get(tuple(types), F32)
    name, shape = f"{prefix}attn_kv_b", (heads * (key + value), latents)

    def read() -> Matrix:
        transposed = dequantize(matrix_of_rows(of.checkpoint, keys)).reshape(heads, latents, key).swapaxes(1, 2)
        straight = dequantize(matrix_of_rows(of.checkpoint, values)).reshape(heads, value, latents)
        joined = np.concatenate([transposed, straight], axis=1).reshape(shape)
        return Matrix(name, weight_format, shape, joined.astype(weight_format.arrays(*shape)["codes"][0]))

    return StoredParameter((), False, lambda: [StoredMatrix(name, weight_format, shape, False, read)], None)
