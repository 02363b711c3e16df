"""torch in bfloat16, with autograd. Frozen weights are dequantised, adapters are bfloat16 parameters.

Settings: "eager", transformers' loop over experts with PEFT's formula of an adapter in each product, and "grouped_mm", one
product for all experts on sorted rows, as transformers' implementation of that name has it.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import torch
from protocol import PROJECTIONS, Model
from steps import ALPHA, Inputs, adapter
from training import Steps, TrainingWorker, serve
from weights import bfloat16_weights
from worker_torch import tensor


class TorchTraining(TrainingWorker):
    def __init__(self, way: str, model: Model, threads: int, rank: int):
        torch.set_num_threads(threads)
        self.model, self.scale = model, ALPHA / rank
        sizes = model.hidden, model.intermediate
        self.gate_up = torch.empty(model.experts, 2 * sizes[1], sizes[0], dtype=torch.bfloat16)
        self.down = torch.empty(model.experts, *sizes, dtype=torch.bfloat16)
        for expert in range(model.experts):
            gate, up, down = (tensor(bfloat16_weights(model.weights, *model.matrix(expert, name))) for name in PROJECTIONS)
            torch.cat([gate, up], out=self.gate_up[expert])
            self.down[expert].copy_(down)
        pairs = {name: [adapter(model, rank, name, expert) for expert in range(model.experts)] for name in PROJECTIONS}
        self.stacked = {
            name: tuple(torch.from_numpy(np.stack(each)).bfloat16().requires_grad_() for each in zip(*of_name, strict=True))
            for name, of_name in pairs.items()
        }
        self.separate = {
            name: [
                tuple(matrix[expert].detach().clone().requires_grad_() for matrix in pair) for expert in range(model.experts)
            ]
            for name, pair in self.stacked.items()
        }
        self.about = {"version": f"torch {torch.__version__}, transformers {version('transformers')}", "weights": way}

    def settings(self, tokens: int) -> list[str]:
        return ["eager", "grouped_mm"]

    def prepare(self, inputs: Inputs) -> TorchSteps:
        return TorchSteps(self, inputs)

    def eager(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        linear = torch.nn.functional.linear
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            rows = x[token]
            gate, up = linear(rows, self.gate_up[expert]).chunk(2, dim=-1)
            gate = gate + self._added(rows, *self.separate["gate"][expert])
            up = up + self._added(rows, *self.separate["up"][expert])
            h = torch.nn.functional.silu(gate) * up
            found = linear(h, self.down[expert]) + self._added(h, *self.separate["down"][expert])
            y = y.index_add(0, token, found * weights[token, slot, None])
        return y

    def _added(self, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        linear = torch.nn.functional.linear
        return linear(linear(rows, a), b) * self.scale

    def grouped_mm(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = ids.flatten().argsort(stable=True)
        token = order // ids.shape[1]
        offsets = torch.bincount(ids.flatten(), minlength=self.model.experts).cumsum(0).int()

        def product(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.grouped_mm(rows, matrices.transpose(-2, -1), offs=offsets)

        def added(rows: torch.Tensor, name: str) -> torch.Tensor:
            a, b = self.stacked[name]
            return product(product(rows, a), b) * self.scale

        rows = x[token]
        gate, up = product(rows, self.gate_up).chunk(2, dim=-1)
        h = torch.nn.functional.silu(gate + added(rows, "gate")) * (up + added(rows, "up"))
        found = (product(h, self.down) + added(h, "down")) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, found)


class TorchSteps(Steps):
    def __init__(self, worker: TorchTraining, inputs: Inputs):
        self.worker, self.inputs = worker, inputs
        self.x = tensor(inputs.x).requires_grad_()
        self.grad_y = tensor(inputs.grad_y)

    def stage(self, batch: int) -> None:
        self.y = None
        self.ids = torch.from_numpy(self.inputs.ids[batch])
        self.weights = torch.from_numpy(self.inputs.weights[batch]).requires_grad_()
        self.x.grad = None
        for of_name in self.worker.separate.values():
            for matrix in (matrix for pair in of_name for matrix in pair):
                matrix.grad = None
        for pair in self.worker.stacked.values():
            for matrix in pair:
                matrix.grad = None

    def forward(self, setting: str) -> None:
        self.setting = setting
        implementation = {"eager": self.worker.eager, "grouped_mm": self.worker.grouped_mm}[setting]
        self.y = implementation(self.x, self.ids, self.weights.bfloat16())

    def backward(self, setting: str) -> None:
        self.y.backward(self.grad_y)

    def outputs(self, expert: int) -> dict[str, np.ndarray]:
        found = {"y": self.y.detach(), "grad_x": self.x.grad, "grad_weights": self.weights.grad}
        for name in PROJECTIONS:
            if self.setting == "eager":
                pair = [matrix.grad for matrix in self.worker.separate[name][expert]]
            else:
                pair = [matrix.grad[expert] for matrix in self.worker.stacked[name]]
            found[f"{name}_a"], found[f"{name}_b"] = pair
        return {name: array.float().numpy() for name, array in found.items()}


if __name__ == "__main__":
    serve(TorchTraining)
