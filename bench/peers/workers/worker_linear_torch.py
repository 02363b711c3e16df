"""torch.nn.functional.linear in bfloat16. Weights of FP8 are dequantised, as transformers does on a CPU.

Matrices with an x of their own are multiplied one after the other, or by one bmm, as transformers does, whichever is faster.
"""

from __future__ import annotations

import numpy as np
import torch
from linear import Dense, LinearWorker, serve
from protocol import count, thread_counts


def tensor(bits: np.ndarray) -> torch.Tensor:
    """bfloat16, on the same memory."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


class TorchLinear(LinearWorker):
    def __init__(self, way: str, threads: int):
        self.threads = threads
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.unload()

    def load(self, call: Dense, copies: int) -> None:
        self.own = call.inputs == "own"
        made = [_together([self._matrix(stored) for stored in matrices]) for matrices in call.dispatches]
        self.copies = [made, *([(weights.clone(), biases) for weights, biases in made] for _ in range(1, copies))]
        self.sizes = [[stored.shape[0] for stored in matrices] for matrices in call.dispatches]
        nbytes = sum(weights.nbytes for weights, _ in self.copies[0])
        self.about = {"version": f"torch {torch.__version__}", "weights": "BF16", "bytes": nbytes}

    def unload(self) -> None:
        self.copies, self.found = [], []

    def _matrix(self, stored) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = None if stored.bias is None else torch.from_numpy(np.array(stored.bias)).bfloat16()
        return tensor(np.array(stored.bfloat16())), bias

    def settings(self, rows: int) -> list[str]:
        names = ["linear", "bmm"] if self.own else ["linear"]
        return [f"{name}, {count(threads)}" for name in names for threads in thread_counts(self.threads, rows)]

    def prepare(self, xs: list[np.ndarray]) -> None:
        self.xs = [tensor(x) for x in xs]

    def run(self, setting: str, copy: int) -> None:
        name, threads = setting.split(", ")
        torch.set_num_threads(int(threads.split()[0]))
        linear = torch.nn.functional.linear
        self.found = []
        for x, (weights, biases), sizes in zip(self.xs, self.copies[copy], self.sizes, strict=True):
            if name == "bmm":
                stacked = weights.view(len(sizes), sizes[0], -1)
                self.found += torch.bmm(x.transpose(0, 1), stacked.transpose(1, 2)).unbind()
                continue
            for number, (matrix, bias) in enumerate(zip(weights.split(sizes), biases, strict=True)):
                self.found.append(linear(x[:, number] if self.own else x, matrix, bias))

    def output(self) -> list[np.ndarray]:
        return [_Numbers(y) for y in self.found]


class _Numbers:
    """bfloat16 outputs, of which only a sample becomes float32."""

    def __init__(self, y: torch.Tensor):
        self._y = y

    def __getitem__(self, at) -> np.ndarray:
        rows, columns = (torch.from_numpy(np.asarray(each)) for each in at)
        return self._y[rows, columns].float().numpy()


def _together(matrices: list[tuple[torch.Tensor, torch.Tensor | None]]) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The matrices of a dispatch below each other, and their biases."""
    return torch.cat([weights for weights, _ in matrices]), [bias for _, bias in matrices]


if __name__ == "__main__":
    serve(TorchLinear)
