"""The machine's limits, as ktmoe measures them: on pages of a matrix of its own, which no participant reads.

Ways: how many bytes it has, which should be more than caches hold.
"""

from __future__ import annotations

from linear import LinearWorker, serve
from meters import Meters

import ktmoe

PART_SECONDS = 0.01


class LimitsOfLinear(LinearWorker):
    def __init__(self, way: str, threads: int):
        ktmoe.set_num_threads(threads)
        self._meters = Meters(int(way))

    def limits(self, seconds: float) -> dict:
        left = self._meters.nbytes
        while left > 0:  # all pages once, see worker_limits.py
            left -= self._meters.read(PART_SECONDS) * PART_SECONDS
        peaks = {name: self._meters.peak(name, seconds) for name in self._meters.kernels}
        return {"read": self._meters.read(seconds), "peaks": peaks}


if __name__ == "__main__":
    serve(LimitsOfLinear)
