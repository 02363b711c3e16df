"""What ranks send each other in a call, by formulas of the experts that tokens chose. Nothing is sent here.

ktmoe.distributed.Division says who computes what, ktmoe.distributed.sums which partial sums remain to be sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ktmoe.distributed import Division
from ktmoe.distributed.messages import AT_ONCE, HEADER
from ktmoe.distributed.own_tokens import TOP_K_ROOM
from ktmoe.distributed.sums import sent

FLOAT32 = 4


def same_tokens(division: Division, ids: np.ndarray, hidden: int, gathered: int = 1, itemsize: int = 2) -> list[np.ndarray]:
    """Bytes that each rank sends to each in every round of a call with tokens="same", int64 [ranks, ranks].

    ids: [tokens, top_k], num_experts is no expert. gathered: of the Distribution. itemsize: of a value of y.
    """
    return [each for some in _at_once(ids) for each in _same(division, some, hidden, gathered, itemsize)]


def own_tokens(division: Division, ids: Sequence[np.ndarray], hidden: int, gathered: int = 1) -> list[np.ndarray]:
    """The same with tokens="own". ids: of each rank's tokens."""
    rounds = []
    for chunks in itertools.zip_longest(*map(_at_once, ids)):
        nothing = np.empty((0, 0), np.int64)
        rounds += _own(division, [nothing if some is None else some for some in chunks], hidden, gathered)
    return rounds


def most_bytes(sent_bytes: np.ndarray) -> int:
    """Of a round: the most that one rank sends, or that one receives."""
    others = sent_bytes * ~np.eye(len(sent_bytes), dtype=bool)
    return int(max(others.sum(axis=0).max(), others.sum(axis=1).max()))


def rows_bytes(tokens: int, hidden: int, top_k: int) -> int:
    """Of so many tokens' rows with tokens="own": x in bfloat16, ids in int32, weights in float32, and 8 bytes of shards."""
    return tokens * (2 * hidden + 8 * top_k + 8)


def _at_once(ids: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, max(1, len(ids)), AT_ONCE):
        yield ids[first : first + AT_ONCE]


def _same(division: Division, ids: np.ndarray, hidden: int, gathered: int, itemsize: int) -> Iterator[np.ndarray]:
    """Headers with room for a few tokens' sums; sums to whoever adds them; outputs to all."""
    size = division.ranks
    room = [gathered * division.most_rows(rank) * hidden * FLOAT32 for rank in range(size)]
    yield _to_all([HEADER.itemsize + nbytes for nbytes in room])
    if len(ids) <= gathered:
        return
    wanted = division.wanted(ids)
    owners = division.owners(ids, wanted)
    ends = np.linspace(0, len(ids), size + 1).astype(int)
    sums = np.zeros((size, size), np.int64)
    for rank in range(size):
        tokens, _ = sent(wanted, wanted & (owners == rank))
        sums[rank] = np.diff(np.searchsorted(tokens, ends))
    yield sums * hidden * FLOAT32
    yield _to_all(np.diff(ends) * hidden * itemsize)


def _own(division: Division, ids: Sequence[np.ndarray], hidden: int, gathered: int) -> Iterator[np.ndarray]:
    """Headers with room for a few tokens' rows; rows to whoever computes them; headers with partial sums back."""
    size = division.ranks
    room = gathered * rows_bytes(1, hidden, TOP_K_ROOM)
    yield _to_all([HEADER.itemsize + room] * size)
    rows, sums = np.zeros((2, size, size), np.int64)
    for rank, some in enumerate(ids):
        wanted = division.wanted(some)
        owners = division.owners(some, wanted)
        for other in range(size):
            computed = wanted & (owners == other)
            rows[rank, other] = rows_bytes(np.count_nonzero(computed.any(axis=1)), hidden, some.shape[1])
            sums[other, rank] = len(sent(wanted, computed)[0])
    later = (rows > room).any(axis=1)
    if later.any():
        yield rows * later[:, None]
    yield HEADER.itemsize + sums * hidden * FLOAT32


def _to_all(nbytes: Sequence[int]) -> np.ndarray:
    """Each rank gives all the same number of bytes."""
    return np.repeat(np.asarray(nbytes, np.int64)[:, None], len(nbytes), axis=1)
