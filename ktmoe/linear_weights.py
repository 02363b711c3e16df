"""LinearSpec and LinearWeights: a dense matrix as backends pack it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from ktmoe._native import core
from ktmoe.errors import InputError
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.weight_spec import WeightSpec
from ktmoe.weights.formats import WeightFormat


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
    def amount(self) -> str:
        """The description."""
        return self.description

    def one(self, expert: int) -> str:
        """'the matrix'."""
        return "the matrix"

    @property
    def shard_unit(self) -> int:
        """Rows that stay together when they are cut into shards: whole panels, and no cut through what shares a scale, or an
        item of an array."""
        return math.lcm(core.PANEL, self.formats["weight"].unit[0])


class LinearWeights(LinearSpec):
    """A Matrix, as Backend.pack_linear takes it."""

    _read: Callable[[], Matrix]
    _staged: int

    def __init__(self, matrix: Matrix):
        if not isinstance(matrix, Matrix):
            raise InputError(
                f"matrix must be a ktmoe.Matrix, found {show(matrix)}; ktmoe.load_matrix(path, name) gives one of a checkpoint"
            )
        self._set(matrix.name, matrix.format, matrix.shape, lambda: matrix, staged=0)

    @classmethod
    def of_headers(
        cls, name: str, weight_format: WeightFormat, shape: tuple[int, int], read: Callable[[], Matrix]
    ) -> LinearWeights:
        """A matrix that is read when it is asked for, possibly from another thread: what find_matrix() says of it."""
        weights = cls.__new__(cls)
        weights._set(name, weight_format, shape, read, staged=weight_format.nbytes(*shape))
        return weights

    @property
    def staged_nbytes(self) -> int:
        """Bytes that packing takes beside the packed ones: those of the matrix, unless its caller has it in memory."""
        return self._staged

    def _set(
        self, name: str, weight_format: WeightFormat, shape: tuple[int, int], read: Callable[[], Matrix], staged: int
    ) -> None:
        n, k = shape
        super().__init__(1, k, n, {"weight": weight_format}, name)
        object.__setattr__(self, "_read", read)
        object.__setattr__(self, "_staged", staged)

    @property
    def spec(self) -> LinearSpec:
        """What the matrix is, without its bytes."""
        return LinearSpec(1, self.hidden, self.intermediate, self.formats, self.name)

    def matrix(self, expert: int, projection: str) -> Matrix:
        """Read the Matrix. Raises what check() raises."""
        matrix = self._read()
        self.check(expert, projection, matrix)
        return matrix

    def take(self, ids: Sequence[int]) -> LinearWeights:
        """These weights: there is one matrix."""
        return self
