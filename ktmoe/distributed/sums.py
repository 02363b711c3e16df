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


#: (to, of): rows `of` are added to rows `to`, one step after the other.
Steps = list[tuple[np.ndarray, np.ndarray]]


def run(steps: Steps, sums: np.ndarray) -> None:
    """Add rows of sums, float32 [rows, hidden], in place."""
    with np.errstate(all="ignore"):  # infinities are the model's, and a rank that raised here would leave the others alone
        for to, of in steps:
            sums[to] += sums[of]


def additions(at: np.ndarray, whole: np.ndarray) -> tuple[Steps, np.ndarray]:
    """What is to be added as far as the nodes of the tree are whole; and at, as it is then: a node's sum is at its first shard.

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
    return steps, at


def sent(wanted: np.ndarray, computed: np.ndarray) -> Places:
    """Where the sums are that a rank sends, in the order of sending.

    wanted: the shards that tokens need, bool [tokens, shards]. computed: those of them that the rank computes.
    """
    _, at = additions(np.where(computed, 0, -1), computed | ~wanted)
    tokens, shards = np.nonzero(at >= 0)
    return tokens, shards


class Own(NamedTuple):
    """How a rank adds what it computes. computed, sent: where its sums are, before and after. order: the rows that are sent."""

    computed: Places
    steps: Steps
    sent: Places
    order: np.ndarray

    @classmethod
    def of(cls, wanted: np.ndarray, computed: np.ndarray) -> Own:
        """wanted, computed: as sent() has them."""
        rows = np.full(computed.shape, -1)
        rows[computed] = np.arange(np.count_nonzero(computed))
        steps, at = additions(rows, computed | ~wanted)
        (tokens, shards), (of_tokens, of_shards) = np.nonzero(at >= 0), np.nonzero(computed)
        return cls((of_tokens, of_shards), steps, (tokens, shards), at[tokens, shards])

    def run(self, sums: np.ndarray) -> np.ndarray:
        """The sums that are sent, of those that were computed, float32 [rows, hidden], which are overwritten."""
        run(self.steps, sums)
        return sums if len(self.order) == len(sums) else sums[self.order]


class All(NamedTuple):
    """How the sums of all ranks are added. tokens: which have one at all, and the rows where it is then."""

    steps: Steps
    tokens: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, places: Sequence[Places], tokens: int, shards: int) -> All:
        """places: of each rank's sums, one rank's rows after the other's. tokens, shards: how many."""
        rows = np.full((tokens, shards), -1)
        of_tokens, of_shards = (np.concatenate(each) for each in zip(*places, strict=True))
        rows[of_tokens, of_shards] = np.arange(len(of_tokens))
        steps, at = additions(rows, np.ones(rows.shape, bool))
        has = np.flatnonzero(at[:, 0] >= 0)
        return cls(steps, has, at[has, 0])

    def run(self, parts: Sequence[np.ndarray], tokens: int) -> np.ndarray:
        """The outputs, float32 [tokens, hidden]; zeros for a token without sums. parts: the sums of each rank."""
        sums = np.concatenate(parts)
        run(self.steps, sums)
        if len(self.tokens) == tokens:
            return sums[self.rows]
        y = np.zeros((tokens, sums.shape[1]), np.float32)
        y[self.tokens] = sums[self.rows]
        return y
