"""Recorder: a communicator that says when it was called and what was sent, and can give the same messages again."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ktmoe.distributed import Communicator

#: Seconds of an exchange that is replayed. A rank that has waited, for another one or for a moment, goes on slower at first.
WAIT = 2e-4


class Recorder:
    """Around another communicator.

    Of the last call since live() or replay(): times: when each exchange began and ended, by the clock that all processes of a
    machine share. sent: bytes that went to each rank, a list for each exchange.
    """

    def __init__(self, communicator: Communicator):
        self.rank, self.size = communicator.rank, communicator.size
        self.times: list[float] = []
        self.sent: list[list[int]] = []
        self._communicator = communicator
        self._received: list[Sequence[np.ndarray]] = []
        self._replays = False

    def live(self) -> None:
        """From now on, messages go to the other ranks, and what they give is kept."""
        self.times, self.sent, self._received, self._replays = [], [], [], False

    def replay(self) -> None:
        """From now on, each exchange gives what it gave when it was live, and nobody else is asked."""
        self.times, self._replays = [], True

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[int]) -> list[np.ndarray]:
        began = time.monotonic()
        if self._replays:
            time.sleep(WAIT)
            received = list(self._received[len(self.times) // 2])
            received[self.rank] = outgoing[self.rank]
        else:
            received = self._communicator.exchange(outgoing, incoming)
            self._received.append(received)
            self.sent.append([array.nbytes for array in outgoing])
        self.times += [began, time.monotonic()]
        return received

    def fail(self) -> None:
        self._communicator.fail()

    def close(self) -> None:
        self._communicator.close()
