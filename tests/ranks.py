"""Ranks of a distributed layer as threads of one process, for tests of everything but the communicators that others wrote."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from ktmoe.errors import RankError

#: Seconds until a rank that waits for the others gives up.
PATIENCE = 60


class Threads:
    """The communicators of `size` ranks. sent: bytes that went from each rank to each in all, int64 [size, size]."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size)
        self.boxes: list[Sequence[np.ndarray]] = [()] * size
        self.sent = np.zeros((size, size), np.int64)
        self.calls = 0
        self.failed: set[int] = set()  # ranks that gave up between two messages

    def run(self, work: Callable) -> list:
        """work(communicator) on each rank: what it returned or raised."""
        results: list = [None] * self.size

        def rank_of(rank: int) -> None:
            try:
                results[rank] = work(_Rank(self, rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class _Rank:
    def __init__(self, group: Threads, rank: int):
        self.rank, self.size, self._group = rank, group.size, group

    def exchange(self, outgoing, incoming):
        group = self._group
        assert len(outgoing) == len(incoming) == self.size
        assert all(array.dtype == np.uint8 and array.ndim == 1 and array.flags.c_contiguous for array in outgoing)
        group.boxes[self.rank] = [array.copy() for array in outgoing]
        group.sent[self.rank] += [array.nbytes for array in outgoing]
        self._wait()
        received = [group.boxes[rank][self.rank] for rank in range(self.size)]
        if self.rank == 0:
            group.calls += 1
        self._wait()
        assert [array.nbytes for array in received] == list(incoming)
        return received

    def _wait(self):
        try:
            self._group.barrier.wait(PATIENCE)
        except threading.BrokenBarrierError:
            raise RankError("a rank did not come") from None

    def fail(self):
        self._group.failed.add(self.rank)

    def close(self):
        pass


def raised(results: Sequence) -> list[str]:
    """'InputError: ...' for each rank that raised, else ''."""
    return [f"{type(r).__name__}: {r}" if isinstance(r, Exception) else "" for r in results]
