"""The machine's read bandwidth and multiply peak, as one backend meets them: measured in the round of the call they limit."""

from __future__ import annotations

import statistics
from typing import Any

from ktmoe._native import core
from ktmoe.layer import MoELayer

#: The least seconds for which a limit is measured: long against waking the pool.
LEAST_SECONDS = 0.01
READ_BYTES = 128 << 20
_PAGE = 4096
#: What a thread reads at once: on Intel's cores, more than one stream is faster.
STREAMS = (1, 2, 4, 8)
#: Reading has settled when three looks in a row agree. A look is for so long with each number of streams.
_LOOK_SECONDS, _MOST_LOOKS, _ALIKE = 0.03, 20, 1.02


class LimitMeter:
    """The machine's limits as one backend meets them: with its instructions, on its threads and on its packed pages.

    layer: of a native backend. table: the kernel table that serves it. streams: see STREAMS.
    """

    def __init__(self, layer: MoELayer, table: core.KernelTable, streams: int = 1):
        self._packed: Any = layer.packed  # which has read_seconds(), as the backend is a native one
        self._table, self.streams = table, streams
        self._at = 0
        iterations, seconds = 1 << 10, 0.0
        while seconds < LEAST_SECONDS / 4:
            iterations *= 2
            _, seconds = table.peak(iterations)
        self._iterations_per_second = iterations / seconds

    def read(self, seconds: float) -> float:
        """Bytes per second that all threads read of the packed weights, for about so long; it goes on where it stopped."""
        nbytes = min(READ_BYTES, self._packed.nbytes)
        total, took = 0, 0.0
        while took < seconds:
            if self._at + nbytes > self._packed.nbytes:
                self._at = 0
            took += self._packed.read_seconds(self._table, self._at, nbytes, self.streams)
            total += nbytes
            self._at += -(-nbytes // _PAGE) * _PAGE
        return total / took

    def peak(self, seconds: float) -> float:
        """FLOPs per second of multiplies from registers, on all threads, for about so long."""
        flops, took = self._table.peak(max(1, round(self._iterations_per_second * seconds)))
        return flops / took


def settled(layer: MoELayer, table: core.KernelTable) -> LimitMeter:
    """The limits, once reading is as fast as just before: for a second or so after packing it was found to be slower.

    Each thread reads as many streams as were the fastest by then.
    """
    ways = [LimitMeter(layer, table, streams) for streams in STREAMS]
    looks: list[list[float]] = []
    while len(looks) < _MOST_LOOKS:
        looks.append([way.read(_LOOK_SECONDS) for way in ways])
        best = [max(look) for look in looks[-3:]]
        if len(best) > 2 and max(best) < _ALIKE * min(best):
            break
    rates = [statistics.median(rates) for rates in zip(*looks[-3:], strict=True)]
    return ways[rates.index(max(rates))]
