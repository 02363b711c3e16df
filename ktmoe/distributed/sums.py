"""The one order in which a token's partial sums are added, whoever has which of them.

It is a binary tree over the virtual shards: neighbours are added, then neighbours of these sums, and so on. A shard that the
token does not need is passed over. A rank that has all shards below a node adds them before anything travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: (tokens, shards) of sums that are rows one after another.
Places = tuple[np.ndarray, np.ndarray]


class Additions(NamedTuple):
    """What is added, before anything is. steps: (to, of): rows `of` are added to rows `to`, one step after the other.

    at: int64 [tokens, shards], the row where the sum of a node is then, at its first shard; -1 elsewhere.
    """

    steps: list[tuple[np.ndarray, np.ndarray]]
    at: np.ndarray

    def run(self, sums: np.ndarray) -> None:
        """Add rows of sums, float32 [rows, hidden], in place."""
        for to, of in self.steps:
            sums[to] += sums[of]


def additions(at: np.ndarray, whole: np.ndarray) -> Additions:
    """Add up as far as the nodes of the tree are whole.

    at: int64 [tokens, shards], the row of a token's sum of a shard; -1: there is none. whole: bool, likewise, whether that sum
    is complete, or nothing.
    """
    at, whole, steps = at.copy(), whole.copy(), []
    step = 1
    while step < at.shape[1]:
        right, whole_right = at[:, step :: 2 * step], whole[:, step :: 2 * step]
        pairs = right.shape[1]
        left, whole_left = at[:, :: 2 * step][:, :pairs], whole[:, :: 2 * step][:, :pairs]
        whole_left &= whole_right
        here = whole_left & (right >= 0)
        both = here & (left >= 0)
        if both.any():
            steps.append((left[both], right[both]))
        np.copyto(left, right, where=here & (left < 0))
        right[whole_left] = -1
        step *= 2
    return Additions(steps, at)


def sent(wanted: np.ndarray, computed: np.ndarray) -> Places:
    """Where the sums are that a rank sends, in the order of sending.

    wanted: the shards that tokens need, bool [tokens, shards]. computed: those of them that the rank computes.
    """
    return np.nonzero(additions(np.where(computed, 0, -1), computed | ~wanted).at >= 0)


class Own(NamedTuple):
    """How a rank adds what it computes. computed, sent: where its sums are, before and after. order: the rows that are sent."""

    computed: Places
    additions: Additions
    sent: Places
    order: np.ndarray

    @classmethod
    def of(cls, wanted: np.ndarray, computed: np.ndarray) -> Own:
        """wanted, computed: as sent() has them."""
        rows = np.full(computed.shape, -1)
        rows[computed] = np.arange(np.count_nonzero(computed))
        found = additions(rows, computed | ~wanted)
        places = np.nonzero(found.at >= 0)
        return cls(np.nonzero(computed), found, places, found.at[places])

    def run(self, sums: np.ndarray) -> np.ndarray:
        """The sums that are sent, of those that were computed, float32 [rows, hidden], which are overwritten."""
        self.additions.run(sums)
        return sums if len(self.order) == len(sums) else sums[self.order]


class All(NamedTuple):
    """How the sums of all ranks are added. tokens: which have one at all, and the rows where it is then."""

    additions: Additions
    tokens: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, places: Sequence[Places], tokens: int, shards: int) -> All:
        """places: of each rank's sums, one rank's rows after the other's. tokens, shards: how many."""
        rows = np.full((tokens, shards), -1)
        rows[np.concatenate([t for t, _ in places]), np.concatenate([s for _, s in places])] = np.arange(
            sum(len(t) for t, _ in places)
        )
        found = additions(rows, np.ones(rows.shape, bool))
        has = np.flatnonzero(found.at[:, 0] >= 0)
        return cls(found, has, found.at[has, 0])

    def run(self, parts: Sequence[np.ndarray], tokens: int) -> np.ndarray:
        """The outputs, float32 [tokens, hidden]; zeros for a token without sums. parts: the sums of each rank."""
        sums = np.concatenate(parts)
        self.additions.run(sums)
        if len(self.tokens) == tokens:
            return sums[self.rows]
        y = np.zeros((tokens, sums.shape[1]), np.float32)
        y[self.tokens] = sums[self.rows]
        return y
