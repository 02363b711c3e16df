"""ktmoe itself. Ways: "BACKEND", or "BACKEND recompute"."""

from __future__ import annotations

from importlib.metadata import version

import ml_dtypes
import numpy as np
from protocol import PROJECTIONS, Model, count
from steps import ALPHA, Inputs, adapter
from training import Steps, TrainingWorker, serve
from weights import float32

import ktmoe
from ktmoe import measuring
from ktmoe.layer import MoELayer
from ktmoe.training import Lora, Training


class KtmoeTraining(TrainingWorker):
    def __init__(self, way: str, model: Model, threads: int, rank: int):
        backend, *recompute = way.split()
        ktmoe.set_num_threads(threads)
        experts = ktmoe.load_experts(model.folder, 0)
        layer = MoELayer(experts, backend, "bf16")
        self.training = Training(layer, recompute=bool(recompute))
        self.threads = threads
        pairs = {}
        for name in PROJECTIONS:
            each = [adapter(model, rank, name, expert) for expert in range(model.experts)]
            pairs[name] = tuple(np.stack(part) for part in zip(*each, strict=True))
        self.lora = Lora(pairs, ALPHA)
        self.gradients = {name: tuple(np.zeros_like(part) for part in pair) for name, pair in pairs.items()}
        table = ktmoe.backends.get(backend).lookup(experts, "bf16").table
        self._limits = measuring.LimitMeter(layer, table)
        self.about = {"version": f"ktmoe {version('ktmoe')}", "kernels": table.name, "packed bytes": layer.nbytes}

    def settings(self, tokens: int) -> list[str]:
        return [count(self.threads)]

    def prepare(self, inputs: Inputs) -> KtmoeSteps:
        return KtmoeSteps(self, inputs)

    def limits(self, seconds: float) -> dict:
        return {"peak": self._limits.peak(seconds)}


class KtmoeSteps(Steps):
    def __init__(self, worker: KtmoeTraining, inputs: Inputs):
        self.worker, self.inputs = worker, inputs
        self.x, self.grad_y = (bits.view(ml_dtypes.bfloat16) for bits in (inputs.x, inputs.grad_y))

    def stage(self, batch: int) -> None:
        self.ids, self.weights = self.inputs.ids[batch], self.inputs.weights[batch]
        self.saved = None

    def forward(self, setting: str) -> None:
        self.y, self.saved = self.worker.training.forward(self.x, self.ids, self.weights, self.worker.lora)

    def backward(self, setting: str) -> None:
        worker = self.worker
        self.found = worker.training.backward(self.saved, self.grad_y, worker.lora, into=worker.gradients)

    def outputs(self, expert: int) -> dict[str, np.ndarray]:
        found = {name: float32(bits.view(np.uint16)) for name, bits in (("y", self.y), ("grad_x", self.found.x))}
        for name, pair in self.worker.gradients.items():
            found[f"{name}_a"], found[f"{name}_b"] = (part[expert] for part in pair)
        return found | {"grad_weights": self.found.weights}


if __name__ == "__main__":
    serve(KtmoeTraining)
