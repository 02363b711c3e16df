"""ktmoe's Linear and LinearGroup. Ways: a backend's name, or "auto"."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
from dispatches import FORMATS, Copies, inputs, outputs
from linear import Dense, LinearWorker, Stored, serve
from protocol import count

import ktmoe
from ktmoe.matrix import Matrix


def matrix(stored: Stored) -> Matrix:
    """The same bytes as ktmoe takes them."""
    made = FORMATS[stored.weights]
    arrays = {label: stored.arrays[label].view(dtype) for label, (dtype, _) in made.arrays(*stored.shape).items()}
    return Matrix(stored.name, made, stored.shape, **arrays, bias=stored.bias)


class KtmoeLinear(LinearWorker):
    def __init__(self, way: str, threads: int):
        self.way, self.threads = way, threads
        ktmoe.set_num_threads(threads)
        self.copies: Copies | None = None

    def load(self, call: Dense, copies: int) -> None:
        dispatches = [[matrix(stored) for stored in matrices] for matrices in call.dispatches]
        self.copies = Copies(dispatches, call.inputs, copies, self.way)
        first = self.copies.linears[0]
        table = ktmoe.backends.get(first.backend).lookup(first.spec, first.activations).table
        self.about = {
            "version": f"ktmoe {version('ktmoe')}",
            "weights": call.weights,
            "bytes": self.copies.nbytes,
            "kernels": table.name,
        }

    def unload(self) -> None:
        if self.copies:
            self.copies.close()
        self.copies = None

    def settings(self, rows: int) -> list[str]:
        return [count(self.threads)]

    def prepare(self, xs: list[np.ndarray]) -> None:
        self.xs = inputs(xs)

    def run(self, setting: str, copy: int) -> None:
        self.found = self.copies.run(self.xs, copy=copy)

    def output(self) -> list[np.ndarray]:
        return [_Numbers(y) for y in outputs(self.found)]


class _Numbers:
    """bfloat16 outputs, of which only a sample becomes float32."""

    def __init__(self, y: np.ndarray):
        self._y = y

    def __getitem__(self, at) -> np.ndarray:
        return self._y[at].astype(np.float32)


if __name__ == "__main__":
    serve(KtmoeLinear)
