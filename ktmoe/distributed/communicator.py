"""Communicator: how processes that compute one model reach each other. torch.distributed and MPI have an adapter each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Communicator(Protocol):
    """One process of a group. rank: its number in [0, size). size: of the group.

    Examples:
        >>> def total(communicator: Communicator, number: int) -> int:
        ...     message = np.frombuffer(np.int64(number).tobytes(), np.uint8)
        ...     received = communicator.exchange([message] * communicator.size, [8] * communicator.size)
        ...     return sum(int(each.view(np.int64)[0]) for each in received)
        >>> total(Alone(), 5)
        5
    """

    rank: int
    size: int

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[int]) -> list[np.ndarray]:
        """Give every rank an array of its own, and return what each rank gave this one.

        outgoing: uint8 [any], C-contiguous, one for each rank. incoming: the number of bytes that come from each rank. What a
        rank gives itself is returned as it is. All ranks call it, as often and in the same order.
        Raises RankError where another rank is gone or does not answer.

        Examples:
            >>> Alone().exchange([np.array([1, 2], np.uint8)], [2])
            [array([1, 2], dtype=uint8)]
        """

    def fail(self) -> None:
        """Let every further exchange raise RankError, and where that can be, those that other ranks wait in, too.

        Examples:
            >>> Alone().fail()
        """

    def close(self) -> None:
        """Give up what the group has of the system.

        Examples:
            >>> Alone().close()
        """


class Alone:
    """The communicator of one process by itself.

    Examples:
        >>> Alone().rank, Alone().size
        (0, 1)
    """

    rank, size = 0, 1

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[int]) -> list[np.ndarray]:
        """What this rank gives itself."""
        return list(outgoing)

    def fail(self) -> None:
        """No other rank waits."""

    def close(self) -> None:
        """There is nothing to give up."""
