"""The machine's limits, as ktmoe measures them: on pages of a layer of its own, which no participant reads."""

from __future__ import annotations

from protocol import Model, Worker, serve

import ktmoe
from ktmoe import measuring
from ktmoe.layer import MoELayer

PART_SECONDS = 0.01


class LimitsWorker(Worker):
    def __init__(self, way: str, model: Model, threads: int):
        ktmoe.set_num_threads(threads)
        experts = ktmoe.load_experts(model.folder, 0)
        tables = measuring.backends_for(experts)
        self.layer = MoELayer(experts, next(iter(tables)))
        first, *others = tables.values()
        self._read = measuring.settled(self.layer, first)
        self._limits = {first.name: self._read, **{table.name: measuring.LimitMeter(self.layer, table) for table in others}}
        self.about = {"bytes an expert": self.layer.nbytes // model.experts}

    def limits(self, seconds: float) -> dict:
        peaks = {name: limits.peak(seconds) for name, limits in self._limits.items()}
        self._read_all()
        return {"read": self._read.read(seconds), "peaks": peaks}

    def _read_all(self) -> None:
        """Once: on a virtual machine, pages that nobody has used for seconds were read at 4 to 15 GB/s instead of 30."""
        left = self.layer.nbytes
        while left > 0:
            left -= self._read.read(PART_SECONDS) * PART_SECONDS


if __name__ == "__main__":
    serve(LimitsWorker)
