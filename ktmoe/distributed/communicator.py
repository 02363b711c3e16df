"""Communicator: how processes that compute one model reach each other. torch.distributed and MPI have an adapter each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Communicator(Protocol):
    """One process of a group. rank: its number in [0, size). size: of the group."""

    rank: int
    size: int

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[int]) -> list[np.ndarray]:
        """Give every rank an array of its own, and return what each rank gave this one.

        outgoing: uint8 [any], C-contiguous, one for each rank. incoming: the number of bytes that come from each rank. What a
        rank gives itself is returned as it is. All ranks call it, as often and in the same order.
        Raises RankError where another rank is gone or does not answer.
        """

    def close(self) -> None:
        """Give up what the group has of the system."""


class Alone:
    """The communicator of one process by itself."""

    rank, size = 0, 1

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[int]) -> list[np.ndarray]:
        return list(outgoing)

    def close(self) -> None:
        """There is nothing to give up."""


def joined(arrays: Sequence[np.ndarray], rank: int) -> tuple[np.ndarray, list[int]]:
    """What goes to other ranks, one behind another, and the number of bytes for each rank; for this one none."""
    counts = [0 if other == rank else array.nbytes for other, array in enumerate(arrays)]
    others = [array for other, array in enumerate(arrays) if other != rank and array.nbytes]
    return (np.concatenate(others) if len(others) != 1 else others[0]) if others else np.empty(0, np.uint8), counts


def parted(received: np.ndarray, counts: Sequence[int], rank: int, own: np.ndarray) -> list[np.ndarray]:
    """What came from each rank, of an array with all of it; from this rank its own."""
    ends = np.cumsum(counts)
    return [
        own if other == rank else received[end - count : end]
        for other, (end, count) in enumerate(zip(ends, counts, strict=True))
    ]
