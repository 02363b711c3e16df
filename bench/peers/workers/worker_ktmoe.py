"""ktmoe itself. Ways: "BACKEND ACTIVATIONS", such as "avx2 int16"."""

from __future__ import annotations

from importlib.metadata import version

import ml_dtypes
import numpy as np
from protocol import Batches, Calls, Model, Worker, count, serve
from weights import float32

import ktmoe
from ktmoe.layer import MoELayer


class KtmoeWorker(Worker):
    def __init__(self, way: str, model: Model, threads: int):
        backend, activations = way.split()
        ktmoe.set_num_threads(threads)
        experts = ktmoe.load_experts(model.folder, 0)
        self.layer = MoELayer(experts, backend, activations)
        self.threads = threads
        self.about = {
            "version": f"ktmoe {version('ktmoe')}",
            "kernels": ktmoe.backends.get(backend).lookup(experts, activations).table.name,
        }

    def settings(self, tokens: int) -> list[str]:
        return [count(self.threads)]

    def prepare(self, batches: Batches) -> KtmoeCalls:
        return KtmoeCalls(self.layer, batches)


class KtmoeCalls(Calls):
    def __init__(self, layer: MoELayer, batches: Batches):
        self.layer, self.batches = layer, batches
        self.x = batches.x.view(ml_dtypes.bfloat16)

    def stage(self, batch: int) -> None:
        self.ids, self.weights = self.batches.ids[batch], self.batches.weights[batch]

    def run(self, setting: str) -> None:
        self.y = self.layer.forward(self.x, self.ids, self.weights)

    def output(self) -> np.ndarray:
        return float32(self.y.view(np.uint16))


if __name__ == "__main__":
    serve(KtmoeWorker)
