"""WeightSpec: what packed weights have to be. Backends and caches see experts and dense matrices through it alike."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ktmoe.errors import FormatError, InputError
from ktmoe.matrix import Matrix
from ktmoe.weights.formats import WeightFormat


@dataclass(frozen=True, eq=False)
class WeightSpec(ABC):
    """The number, the sizes and the formats of weights that are packed together. It holds no weight.

    Weights are experts of equal shapes and formats. Each has the matrices that `projections` names; a dense matrix is the
    only one of one expert. hidden: inputs of the first matrix. intermediate: its outputs, which shards divide.
    formats: the WeightFormat of each projection (the same for all experts). name: what messages call these weights.
    """

    #: The matrices of an expert.
    projections: ClassVar[tuple[str, ...]]

    num_experts: int
    hidden: int
    intermediate: int
    formats: Mapping[str, WeightFormat]
    name: str = "experts"

    @abstractmethod
    def shape(self, projection: str) -> tuple[int, int]:
        """(n, k) of a projection's matrices."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What these weights are, for messages."""

    @property
    @abstractmethod
    def amount(self) -> str:
        """How much these weights are, in a few words, for messages."""

    @abstractmethod
    def one(self, expert: int) -> str:
        """What messages call one of the experts, or the matrix."""

    @property
    @abstractmethod
    def shard_unit(self) -> int:
        """Items of the intermediate dimension that stay together when it is cut into shards."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.description})"

    @property
    def nbytes(self) -> int:
        """Bytes that the checkpoint spends on the arrays of these weights, without biases."""
        return self.num_experts * sum(self.formats[p].nbytes(*self.shape(p)) for p in self.projections)

    def check_expert(self, expert: int) -> None:
        """Raise InputError if there is no expert of that number.

        Examples:
            >>> experts.check_expert(0)
        """
        if not 0 <= operator.index(expert) < self.num_experts:
            raise InputError(f"{self.name}: expert must be in [0, {self.num_experts}), found {expert}")

    def check(self, expert: int, projection: str, matrix: Matrix) -> None:
        """Raise InputError if this is no Matrix, FormatError if it has not the projection's shape and format.

        Its bytes are not looked at: Matrix.refuse() does that.

        Examples:
            >>> experts.check(0, "gate", experts.matrix(0, "gate"))
        """
        if not isinstance(matrix, Matrix):
            raise InputError(f"{self.name}: {projection} of {self.one(expert)} must be a Matrix, found {type(matrix).__name__}")
        shape, weight_format = self.shape(projection), self.formats[projection]
        if matrix.shape != shape or matrix.format != weight_format:
            raise FormatError(
                f"{matrix.name}: {projection} must be {weight_format.description} {list(shape)}, "
                f"found {matrix.format.description} {list(matrix.shape)}"
            )
