"""Pairs (A, B) of a layer's experts as PEFT has them for parameters of all experts, and back.

PEFT's lora_A of such a parameter is [experts * rank, inputs], the rank the fastest; its lora_B is [outputs, rank * experts],
the experts the fastest. gate and up are one parameter, which has one A: two pairs become one of twice the rank, with B in two
blocks, [[B_gate, 0], [0, B_up]]. Numbers are float32 or bfloat16 and never rounded.
"""

from __future__ import annotations

import numpy as np

#: (a [experts, rank, inputs], b [experts, outputs, rank]).
Pair = tuple[np.ndarray, np.ndarray]


def joined(gate: Pair | None, up: Pair | None, interleaved: bool) -> Pair:
    """One pair for the parameter gate_up_proj; at least one of both is given.

    Its rank is that of the pair that is given, or twice that of both. interleaved: outputs are g0, u0, g1, u1 and so on, else
    gate's come first.
    """
    given = [pair for pair in (gate, up) if pair]
    dtype = common_dtype([a for a, _ in given])
    a = np.concatenate([a.astype(dtype, copy=False) for a, _ in given], axis=1)
    experts, outputs, rank = given[0][1].shape
    dtype = common_dtype([b for _, b in given])
    b = np.zeros((experts, 2 * outputs, a.shape[1]), dtype)
    first = 0
    for second, pair in enumerate((gate, up)):
        if pair:
            b[:, _rows(outputs, bool(second), interleaved), first : first + rank] = pair[1]
            first += rank
    return a, b


def common_dtype(arrays: list[np.ndarray]) -> np.dtype:
    """The dtype that all arrays have, else float32, which has all numbers of bfloat16."""
    dtypes = {array.dtype for array in arrays}
    return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)


def separated(pair: Pair, interleaved: bool) -> dict[str, Pair]:
    """joined() the other way round, {"gate": ..., "up": ...} or one of them.

    Where B is in two blocks, each has its half of the rank. Otherwise both get A and their rows of B: the same matrices, of the
    whole rank. A projection whose B is 0 beside another's that is not is left out.
    """
    a, b = pair
    rank, outputs = a.shape[1], b.shape[1] // 2
    halves = {projection: b[:, _rows(outputs, projection == "up", interleaved)] for projection in ("gate", "up")}
    there = {projection: bool(_magnitudes(half).any()) for projection, half in halves.items()}
    if sum(there.values()) == 1:
        return {projection: (a, np.ascontiguousarray(halves[projection])) for projection in halves if there[projection]}
    middle = rank // 2
    whole = rank % 2 or not any(there.values())
    if whole or _magnitudes(halves["gate"][:, :, middle:]).any() or _magnitudes(halves["up"][:, :, :middle]).any():
        return {projection: (a.copy(), np.ascontiguousarray(half)) for projection, half in halves.items()}
    ranges = {"gate": slice(None, middle), "up": slice(middle, None)}
    return {
        projection: (np.ascontiguousarray(a[:, own]), np.ascontiguousarray(halves[projection][:, :, own]))
        for projection, own in ranges.items()
    }


def stored(pair: Pair) -> Pair:
    """A pair in the shapes that PEFT gives a parameter's: ([experts * rank, inputs], [outputs, rank * experts])."""
    a, b = pair
    experts, outputs, rank = b.shape
    return a.reshape(experts * rank, -1), np.ascontiguousarray(b.transpose(1, 2, 0)).reshape(outputs, rank * experts)


def restored(a: np.ndarray, b: np.ndarray, rank: int) -> Pair:
    """stored() the other way round; the rows of a must be a multiple of rank, and as many as the columns of b."""
    experts = len(a) // rank
    return a.reshape(experts, rank, -1), np.ascontiguousarray(b.reshape(len(b), rank, experts).transpose(2, 0, 1))


def padded(pair: Pair, rank: int) -> Pair:
    """The same matrices with a larger rank: zeros in A and in B, of which no gradient ever comes."""
    a, b = pair
    more = rank - a.shape[1]
    return (np.pad(a, ((0, 0), (0, more), (0, 0))), np.pad(b, ((0, 0), (0, 0), (0, more)))) if more else pair


def scaled(b: np.ndarray, factor: float) -> np.ndarray | None:
    """b * factor, a power of two; None if a number would be rounded."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        made = (_float32(b) * np.float32(factor)).astype(b.dtype)
        back = (_float32(made) * np.float32(1 / factor)).astype(b.dtype)
    return made if np.array_equal(back, b) else None


def _rows(outputs: int, second: bool, interleaved: bool) -> slice:
    """The rows of gate (second: up) among those of gate and up together."""
    return slice(int(second), None, 2) if interleaved else slice(second * outputs, (second + 1) * outputs)


def _magnitudes(array: np.ndarray) -> np.ndarray:
    """What is not 0 where a number is not: bfloat16's any() makes objects, and float32's warns of signalling NaNs."""
    return array.view(f"u{array.itemsize}") << 1


def _float32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32, copy=False)
