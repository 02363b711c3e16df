"""Names that checkpoints fuse, and names that they split: qkv_proj for q_proj, k_proj and v_proj; gate_up_proj for gate and up.

Rows stand one after another, as in transformers' models that have such a module (Phi-3, Phi-4, GLM-4): all of q before all of k
before all of v, and gate before up. A stored matrix is never changed: rows are taken from it, or it is joined with others.
"""

from __future__ import annotations

from ktmoe.errors import CheckpointError
from ktmoe.loaders import model_config, one_matrix
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.one_matrix import StoredMatrix
from ktmoe.matrix_cuts import check_rows, join_rows, joined_format, take_rows
from ktmoe.messages import show

#: The last part of a fused name, and of those that it holds, in the order of its rows.
WHOLES = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_WHOLE_OF = {part: whole for whole, parts in WHOLES.items() for part in parts}


def find(checkpoint: Checkpoint, name: str, scheme: str = "auto") -> StoredMatrix:
    """The matrix of that name, which may be some rows of a stored one, or several stored ones joined.

    Raises what one_matrix.find() raises; FormatError also for rows that cut what shares a scale, and for matrices of different
    formats; CheckpointError also for a checkpoint that has both names, and where config.json does not say how many rows are
    whose.
    """
    one_matrix.check_name("name", name)
    base, dot, last = name.rpartition(".")
    whole, parts = _WHOLE_OF.get(last), WHOLES.get(last, ())
    others = [
        base + dot + other for other in ((whole,) if whole else parts) if one_matrix.endings(checkpoint, base + dot + other)
    ]
    if one_matrix.endings(checkpoint, name):
        if others:
            raise CheckpointError(f"{checkpoint.path}: expected {name} or {others[0]}, found both")
        return one_matrix.find(checkpoint, name, scheme)
    if not others:
        return one_matrix.find(checkpoint, name, scheme)  # which says what is there
    if whole:
        return _part(checkpoint, name, one_matrix.find(checkpoint, others[0], scheme), WHOLES[whole].index(last))
    return _joined(name, [one_matrix.find(checkpoint, base + dot + part, scheme) for part in parts])


def _part(checkpoint: Checkpoint, name: str, whole: StoredMatrix, index: int) -> StoredMatrix:
    """The index-th matrix in a fused one."""
    n, k = whole.shape
    counts = _qkv_rows(checkpoint) if whole.name.endswith("qkv_proj") else (n // 2, n // 2)
    if sum(counts) != n:
        raise CheckpointError(
            f"{whole.name}: expected {' + '.join(map(str, counts))} rows for {', '.join(WHOLES[_last(whole.name)])}, found {n}"
        )
    first = sum(counts[:index])
    last = first + counts[index]
    check_rows(whole.name, whole.format, n, first, last)
    return StoredMatrix(
        name,
        whole.format,
        (last - first, k),
        whole.has_bias,
        lambda: take_rows(whole.read(), first, last, name),
        whole,
        (first, last),
    )


def _joined(name: str, parts: list[StoredMatrix]) -> StoredMatrix:
    weight_format = joined_format([(part.name, part.format, part.shape) for part in parts])
    shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
    has_bias = any(part.has_bias for part in parts)
    return StoredMatrix(name, weight_format, shape, has_bias, lambda: join_rows([part.read() for part in parts], name))


def _qkv_rows(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Rows of q, k and v, by config.json. Raises CheckpointError."""
    heads = _count(checkpoint, "num_attention_heads")
    shared = _count(checkpoint, "num_key_value_heads", heads)
    size = _count(checkpoint, "head_dim", 0) or _count(checkpoint, "hidden_size") // heads
    return heads * size, shared * size, shared * size


def _count(checkpoint: Checkpoint, key: str, otherwise: int | None = None) -> int:
    """A count of config.json. otherwise: where it is absent or null."""
    found = model_config.value(checkpoint, key)
    if found is None and otherwise is not None:
        return otherwise
    if type(found) is not int or not 0 < found < 2**31:
        place = model_config.place(checkpoint, key)
        raise CheckpointError(
            f"{checkpoint.path}: {place}: expected a count, to know the rows of qkv_proj, found {show(found)}"
        )
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]
