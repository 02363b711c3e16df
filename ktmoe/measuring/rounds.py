"""Measures a layer's calls and the machine's limits, interleaved round by round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ktmoe.layer import MoELayer
from ktmoe.measuring.batches import MeasuredBatch, slot_flops
from ktmoe.measuring.meter import LEAST_SECONDS, LimitMeter

#: A round measures each limit for a share of a call, so that both meet alike whatever else the machine is doing.
SHARE_OF_CALL = 0.1
MOST_SECONDS = 0.2  # for each limit


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; shares are medians of each round's own ratio. Rates are per second.

    limit_shares: of each round, the share of the nearer limit, which is the larger one.
    streams: that each thread read at once for the read limit.
    """

    tokens: int
    seconds: float
    bytes_rate: float
    flops_rate: float
    read_limit: float
    peak_limit: float
    read_share: float
    peak_share: float
    limit_shares: tuple[float, ...]
    streams: int


class Rounds:
    """One measurement: prepare() before each call, finish() with the seconds of the last calls.

    batches: endless. A batch is counted as the packed bytes of the distinct experts that it uses, once each, and
    2 FLOPs for each of an expert's 3 * hidden * intermediate weights and each (token, expert) pair.
    least: seconds for which a round measures each limit, at least.
    """

    def __init__(self, layer: MoELayer, limits: LimitMeter, batches: Iterator[MeasuredBatch], *, least: float = LEAST_SECONDS):
        self._limits, self._batches, self._least = limits, batches, least
        self._expert_bytes = layer.nbytes / layer.num_experts
        self._slot_flops = slot_flops(layer)
        self._rounds: list[tuple[MeasuredBatch, float, float]] = []
        self._prepared = time.perf_counter()

    def prepare(self) -> MeasuredBatch:
        """Measure the limits, which also takes the last batch's weights out of the caches; the next call's batch."""
        batch = next(self._batches)
        call = time.perf_counter() - self._prepared
        seconds = min(max(self._least, SHARE_OF_CALL * call), MOST_SECONDS)
        self._rounds.append((batch, self._limits.peak(seconds), self._limits.read(seconds)))
        self._prepared = time.perf_counter()
        return batch

    def finish(self, seconds: list[float]) -> Result:
        """seconds: of the last len(seconds) prepared calls; earlier ones were for warming up."""
        rows, tokens = [], 0
        for (batch, peak, read), took in zip(self._rounds[-len(seconds) :], seconds, strict=True):
            tokens = len(batch.x)
            nbytes, flops = len(batch.experts) * self._expert_bytes / took, batch.slots * self._slot_flops / took
            rows.append((took, nbytes, flops, read, peak, nbytes / read, flops / peak))
        limit_shares = tuple(max(row[-2:]) for row in rows)
        took, nbytes, flops, read, peak, of_read, of_peak = (statistics.median(column) for column in zip(*rows, strict=True))
        return Result(tokens, took, nbytes, flops, read, peak, of_read, of_peak, limit_shares, self._limits.streams)


def run(
    layer: MoELayer,
    limits: LimitMeter,
    batches: Iterator[MeasuredBatch],
    *,
    seconds: float = 2.0,
    least: int = 3,
    most: int = 50,
    progress: Callable[[float], object] | None = None,
) -> Result:
    """Measure forward calls of a layer: rounds for about so many seconds, but at least and at most so many.

    progress: called with the share that is done, after each round.
    """
    measurement = Rounds(layer, limits, batches)
    took: list[float] = []
    start = time.perf_counter()
    while len(took) <= least or (len(took) <= most and time.perf_counter() - start < seconds):
        batch = measurement.prepare()
        called = time.perf_counter()
        layer.forward(batch.x, batch.ids, batch.weights)
        took.append(time.perf_counter() - called)
        if progress:
            done = (time.perf_counter() - start) / seconds if seconds else len(took) / (least + 1)
            progress(min(1.0, max(done, len(took) / (most + 1))))
    return measurement.finish(took[1:])  # the first was for warming up
