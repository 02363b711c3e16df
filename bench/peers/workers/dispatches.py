"""Dense matrices by ktmoe: the dispatches of a call, in copies that take turns. Needs ktmoe, and no other worker's file."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from ktmoe.linear import Linear
from ktmoe.linear_group import INPUTS, LinearGroup
from ktmoe.matrix import Matrix
from ktmoe.weights.formats import BF16, fp8

#: The file that lists a call's matrices.
MATRICES = "matrices.json"
#: The formats, by the names that bench/linear/matrices.toml has for them. FP8 is E4M3 with scales of 128 x 128, those of
#: "FP8" in bfloat16, as Qwen3's are.
FORMATS = {"BF16": BF16, "FP8": fp8("bf16"), "FP8, UE8M0": fp8("ue8m0")}

__all__ = ["FORMATS", "INPUTS", "MATRICES", "Copies"]


class Copies:
    """copies: of the call, each with memory of its own. inputs: as LinearGroup takes it.

    A dispatch of several matrices is a LinearGroup. Attributes: nbytes: of one copy, packed. backend: as it was chosen.
    """

    def __init__(self, dispatches: Sequence[Sequence[Matrix]], inputs: str, copies: int, backend: str = "auto"):
        self.linears: list[Linear] = []
        self._inputs, self._copies = inputs, []
        try:
            for _ in range(copies):
                self._copies.append([self._dispatch(matrices, backend) for matrices in dispatches])
        except BaseException:
            self.close()
            raise
        self.nbytes = sum(linear.nbytes for linear in self.linears) // copies
        self.backend = self.linears[0].backend

    def _dispatch(self, matrices: Sequence[Matrix], backend: str) -> Linear | LinearGroup:
        made = []
        for matrix in matrices:
            made.append(Linear(matrix, backend))
            self.linears.append(made[-1])
        return LinearGroup(made, self._inputs) if len(made) > 1 else made[0]

    def __len__(self) -> int:
        return len(self._copies)

    def run(self, xs: Sequence[np.ndarray], dtype=None, *, copy: int) -> list:
        """A call of one copy: what each dispatch gives for its x."""
        return [dispatch.forward(x, dtype=dtype) for dispatch, x in zip(self._copies[copy], xs, strict=True)]

    def close(self) -> None:
        for linear in self.linears:
            linear.close()


def inputs(bits: Sequence[np.ndarray]) -> list[np.ndarray]:
    """x of each dispatch, as numbers."""
    return [x.view(ml_dtypes.bfloat16) for x in bits]


def outputs(found: Sequence) -> list[np.ndarray]:
    """[rows, n] of each matrix, in order, of what run() gave."""
    made: list[np.ndarray] = []
    for y in found:
        if isinstance(y, list):
            made += y
        else:
            made += [y] if y.ndim == 2 else [y[:, i] for i in range(y.shape[1])]
    return made
