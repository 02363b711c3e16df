"""The one order in which a token's partial sums are added, whoever has which of them.

It is a binary tree over the virtual shards: neighbours are added, then neighbours of these sums, and so on. A shard that the
token does not need is passed over. A rank that has all shards below a node adds them before anything travels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def add(at: np.ndarray, whole: np.ndarray, sums: np.ndarray | None = None) -> None:
    """Add up as far as the nodes of the tree are whole.

    at: int64 [tokens, shards], the row of sums that has a token's sum of a shard; -1: it has none. whole: bool, likewise,
    whether that sum is complete, or nothing. Both are changed: a node's sum is then at its first shard, and -1 at the others.
    sums: float32 [rows, hidden], added in place; None: only at and whole are changed.
    """
    shards, step = at.shape[1], 1
    while step < shards:
        right, whole_right = at[:, step :: 2 * step], whole[:, step :: 2 * step]
        pairs = right.shape[1]
        left, whole_left = at[:, :: 2 * step][:, :pairs], whole[:, :: 2 * step][:, :pairs]
        whole_left &= whole_right
        here = whole_left & (right >= 0)
        if sums is not None:
            both = here & (left >= 0)
            sums[left[both]] += sums[right[both]]
        alone = here & (left < 0)
        left[alone] = right[alone]
        right[whole_left] = -1
        step *= 2


def sent(wanted: np.ndarray, computed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, shards) of the sums that a rank sends, in the order of sending.

    wanted: the shards that tokens need, bool [tokens, shards]. computed: those of them that the rank computes.
    """
    at, whole = np.where(computed, 0, -1), computed | ~wanted
    add(at, whole)
    return np.nonzero(at >= 0)


def added(parts: Sequence[np.ndarray], places: Sequence[tuple[np.ndarray, np.ndarray]], tokens: int, shards: int) -> np.ndarray:
    """The outputs, float32 [tokens, hidden], from the sums of all ranks, float32 [any, hidden] each.

    places: (tokens, shards) of each rank's sums. A token without any has zeros.
    """
    sums = np.concatenate(parts)
    at = np.full((tokens, shards), -1)
    at[np.concatenate([t for t, _ in places]), np.concatenate([s for _, s in places])] = np.arange(len(sums))
    add(at, np.ones(at.shape, bool), sums)
    y = np.zeros((tokens, sums.shape[1]), np.float32)
    has = at[:, 0] >= 0
    y[has] = sums[at[has, 0]]
    return y


def numbered(chosen: np.ndarray) -> np.ndarray:
    """0, 1, 2 ... where chosen, in the order of np.nonzero(); -1 elsewhere."""
    at = np.full(chosen.shape, -1)
    at[chosen] = np.arange(np.count_nonzero(chosen))
    return at
