"""Rounds of `make bench`: each measures the limits, which also empties the caches, and then a few calls in a row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

from bench.linear.calls import Call
from bench.peers.workers.dispatches import Copies
from bench.peers.workers.meters import Meters
from ktmoe import measuring

#: A round calls as often as fits into so long, at least once, and measures each limit for so long or for a share of a call.
ROUND_SECONDS = 0.003
MOST_CALLS = 64
#: How long a call is tried but once.
LONG_SECONDS = 0.5


class LinearRounds:
    """Calls of all copies in turn. The first of a round wakes the threads and is not timed."""

    def __init__(self, call: Call, copies: Copies, meters: Meters, kernels: str, xs: Sequence[np.ndarray]):
        self._call, self._copies, self._meters, self._kernels, self._xs = call, copies, meters, kernels, xs
        self._rows, self._limits = len(xs[0]), []
        self.last = 0
        self.seconds = self._timed()
        if self.seconds < LONG_SECONDS:
            self.seconds = min(self.seconds, self._timed(), self._timed())
        self.calls = max(1, min(MOST_CALLS, int(ROUND_SECONDS / self.seconds)))

    def _timed(self) -> float:
        start = time.perf_counter()
        self._next()
        return time.perf_counter() - start

    def _next(self) -> None:
        self.last = (self.last + 1) % len(self._copies)
        self.y = self._copies.run(self._xs, copy=self.last)

    def prepare(self) -> None:
        least = max(ROUND_SECONDS, measuring.SHARE_OF_CALL * self.seconds)
        seconds = min(max(least, measuring.LEAST_SECONDS), measuring.MOST_SECONDS)
        peak = self._meters.peak(self._kernels, seconds)
        self._limits.append((self._meters.read(seconds), peak))
        self._copies.run(self._xs, copy=self.last)

    def run(self) -> None:
        for _ in range(self.calls):
            self._next()

    def finish(self, seconds: Sequence[float]) -> measuring.Result:
        """seconds: of run(), in the last rounds. Bytes are the packed ones of a copy."""
        rows = []
        for (read, peak), took in zip(self._limits[-len(seconds) :], seconds, strict=True):
            of_one = took / self.calls
            nbytes, flops = self._copies.nbytes / of_one, self._rows * self._call.row_flops / of_one
            rows.append((of_one, nbytes, flops, read, peak, nbytes / read, flops / peak))
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        return measuring.Result(self._rows, *medians, tuple(max(row[-2:]) for row in rows), self._meters.streams)
