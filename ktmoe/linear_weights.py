"""LinearSpec and LinearWeights: a dense matrix as backends pack it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from ktmoe.errors import InputError
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.weight_spec import WeightSpec

#: Outputs that a packed panel has; shards have whole ones.
_PANEL = 64


class LinearSpec(WeightSpec):
    """What a dense matrix has to be. It is packed as the only matrix of one expert: hidden is k, intermediate is n."""

    projections: ClassVar = ("weight",)

    def shape(self, projection: str = "weight") -> tuple[int, int]:
        """(n, k)."""
        return self.intermediate, self.hidden

    @property
    def description(self) -> str:
        """'BF16 [512, 2880]'."""
        return f"{self.formats['weight'].description} {list(self.shape())}"

    @property
    def shard_unit(self) -> int:
        """Rows that stay together when they are cut into shards: whole panels, and no cut through what shares a scale, or an
        item of an array."""
        return math.lcm(_PANEL, self.formats["weight"].unit[0])


class LinearWeights(LinearSpec):
    """A Matrix, as Backend.pack_linear takes it."""

    def __init__(self, matrix: Matrix):
        if not isinstance(matrix, Matrix):
            raise InputError(
                f"matrix must be a ktmoe.Matrix, found {show(matrix)}; ktmoe.load_matrix(path, name) gives one of a checkpoint"
            )
        n, k = matrix.shape
        super().__init__(1, k, n, {"weight": matrix.format}, matrix.name)
        object.__setattr__(self, "_matrix", matrix)

    @property
    def spec(self) -> LinearSpec:
        """What the matrix is, without its bytes."""
        return LinearSpec(1, self.hidden, self.intermediate, self.formats, self.name)

    def matrix(self, expert: int, projection: str) -> Matrix:
        """The Matrix."""
        return self._matrix

    def take(self, ids: Sequence[int]) -> LinearWeights:
        """These weights: there is one matrix."""
        return self
