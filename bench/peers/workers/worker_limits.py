"""The machine's limits, as ktmoe measures them: on pages of a layer of its own, which no participant reads."""

from __future__ import annotations

from protocol import Model, Worker, serve

import ktmoe
from ktmoe import measure
from ktmoe.layer import MoELayer


class LimitsWorker(Worker):
    def __init__(self, way: str, model: Model, threads: int):
        ktmoe.set_num_threads(threads)
        experts = ktmoe.load_experts(model.folder, 0)
        tables = measure.backends_for(experts)
        self.layer = MoELayer(experts, next(iter(tables)))
        read, *others = tables.values()
        self._limits = {read.name: measure.settled(self.layer, read)}
        self._limits |= {table.name: measure.Limits(self.layer, table) for table in others}
        self.about = {"bytes an expert": self.layer.nbytes // model.experts}

    def limits(self, seconds: float) -> dict:
        peaks = {name: limits.peak(seconds) for name, limits in self._limits.items()}
        return {"read": next(iter(self._limits.values())).read(seconds), "peaks": peaks}


if __name__ == "__main__":
    serve(LimitsWorker)
