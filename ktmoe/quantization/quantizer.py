"""Quantizer: applies a rule to matrices; quantize(): to experts, a matrix at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real

import numpy as np

from ktmoe._native import core
from ktmoe.errors import FormatError, InputError
from ktmoe.experts import ExpertWeights, checked_experts
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.quantization import codes, source, steps
from ktmoe.quantization.rules import RULES, Rule
from ktmoe.quantization.steps import Groups
from ktmoe.quantization.targets import KINDS, TARGETS, Group, Target
from ktmoe.weights.formats import WeightFormat

#: Groups whose scales are made at a time.
AT_ONCE = 2**17


@dataclass(frozen=True)
class Error:
    """weights: the sum of w^2. error: the sum of (w - w')^2, w' being what stands for w. float64 sums; they may be added up.

    Examples:
        >>> Error(weights=4.0, error=0.04).relative
        0.1
    """

    weights: float = 0.0
    error: float = 0.0

    def __add__(self, other: Error) -> Error:
        return Error(self.weights + other.weights, self.error + other.error)

    @property
    def relative(self) -> float:
        """Root mean square of the error beside that of the weights; 0 if one of them is 0."""
        return (self.error / self.weights) ** 0.5 if self.weights else 0.0


class Quantizer:
    """Rounds matrices.

    to: one of TARGETS. rule: one of its rules by name; None: its first, or the first with zero points if not symmetric.
    group: what shares a scale: a number of columns, (rows, columns), "row" or "matrix"; None: the target's own.
    scales: the kind of scales, one of "fp32", "bf16", "fp16"; None: the target's own. symmetric: without zero points.
    Raises InputError for a format, rule, group or kind that does not exist, and for rules and groups that do not go together.

    Examples:
        >>> rounded, error = Quantizer("int4", group=64).matrix(matrix)
        >>> rounded.format.description, 0 < error.relative < 0.2
        ('INT4 with bf16 scales per 1x64', True)
    """

    def __init__(
        self,
        to: str,
        *,
        rule: str | None = None,
        group: Group | None = None,
        scales: str | None = None,
        symmetric: bool | None = None,
    ):
        if to not in TARGETS:
            raise InputError(f"to must be one of {', '.join(TARGETS)}, found {show(to)}")
        target = TARGETS[to]
        self.rule = _rule(to, rule, symmetric)
        self.format: WeightFormat = _format(target, self.rule, group, scales)
        self.to = to

    def matrix(self, matrix: Matrix, *, largest: float | None = None) -> tuple[Matrix, Error]:
        """A matrix, rounded, and what that changed.

        largest: the largest magnitude of all matrices that are to have the same factor; None: of this one. Only formats with a
        factor of the matrix look at it.
        Raises FormatError for a weight that is not finite, and for sizes or scales that the format does not have;
        InputError for what is no Matrix, and no magnitude.

        Examples:
            >>> rounded, error = Quantizer("mxfp8").matrix(matrix)
            >>> rounded.format == ktmoe.MXFP8, 0 < error.relative < 0.1
            (True, True)
        """
        return self._rounded(_checked(matrix), _magnitude(largest), True)

    def _rounded(self, matrix: Matrix, largest: float | None, summed: bool) -> tuple[Matrix, Error]:
        """summed: whether anybody asks for the error."""
        (n, k), (rows, columns) = matrix.shape, self.format.code_unit
        if n % rows or k % columns:
            raise FormatError(f"{matrix.name}: expected a multiple of {columns} columns to round, found {[n, k]}")
        extent = steps.extent(self.format.scale, bool(self.format.factor and self.format.factor.per_row), (n, k))
        weights = source.read(matrix)
        low, high = _extremes(weights, matrix, extent)
        whole = np.float32(max(abs(low.min()), abs(high.max())) if largest is None else largest)
        kind = self.format.scale.kind if self.format.scale else "fp32"
        arrays = {label: np.empty(shape, dtype) for label, (dtype, shape) in self.format.arrays(n, k).items()}
        arrays["codes"] = arrays["codes"].view(np.uint8)
        error = Error()
        for bands in _bands(low.shape):
            made = self.rule.steps(Groups(low[bands], high[bands], whole, kind, matrix.name))
            first, end = bands.start * extent[0], min(bands.stop * extent[0], n)
            rounding = codes.rounding(self.rule, made, self.format.element, extent)
            found, total = core.weights_rounded(weights, rounding, first, end - first, arrays["codes"], summed)
            error += Error(total, found)
            self._store(made, bands, arrays)
        return Matrix(matrix.name, self.format, (n, k), bias=matrix.bias, **arrays), error

    def _store(self, made: steps.Steps, bands: slice, arrays: dict[str, np.ndarray]) -> None:
        """Store what groups have besides codes."""
        if self.format.scale:
            arrays["scales"][bands] = made.scales if made.stored is None else made.stored
        elif self.format.factor:
            arrays["factor"][bands] = made.scales.reshape(-1)
        if made.points is not None:
            arrays["offsets"][bands] = made.points + 8
        if made.factor is not None:
            arrays["factor"][0] = made.factor

    def largest(self, matrix: Matrix) -> float:
        """The largest magnitude of a matrix, for matrix(). Raises as matrix() does.

        Examples:
            >>> quantizer = Quantizer("nvfp4")
            >>> rounded, error = quantizer.matrix(matrix, largest=quantizer.largest(matrix))
        """
        found = core.weights_extremes(source.read(_checked(matrix)), *matrix.shape)
        if found is None:
            source.refuse(matrix)
        low, high = found
        return float(max(abs(low.min()), abs(high.max())))

    def experts(self, experts: ExpertWeights) -> ExpertWeights:
        """The same experts, each matrix rounded when it is asked for. Raises InputError if they are no ExpertWeights.

        Examples:
            >>> qwen3 = ktmoe.load_experts("Qwen3-30B-A3B", 0)
            >>> Quantizer("int8").experts(qwen3).formats["gate"].description
            'INT8 with an fp32 factor per row'
        """
        checked_experts(experts)

        def read(expert: int, projection: str) -> Matrix:
            return self._rounded(experts.matrix(expert, projection), None, False)[0]

        sizes = experts.num_experts, experts.hidden, experts.intermediate
        return ExpertWeights(*sizes, read, self.format, experts.activation, experts.name, experts.router_weight)


def quantize(
    experts: ExpertWeights,
    to: str,
    *,
    rule: str | None = None,
    group: Group | None = None,
    scales: str | None = None,
    symmetric: bool | None = None,
) -> ExpertWeights:
    """The same experts with weights that are rounded to another format. Activation, biases and name stay.

    Nothing is read yet: a matrix is read and rounded each time it is asked for. experts: of any format. The other arguments are
    Quantizer's. Raises InputError as Quantizer does; ExpertWeights.matrix() then raises FormatError as Quantizer.matrix() does.
    docs/quantizing.md has the rules.

    Examples:
        >>> qwen3 = ktmoe.load_experts("Qwen3-30B-A3B", 0)
        >>> ktmoe.quantize(qwen3, "mxfp4").formats["gate"] == ktmoe.MXFP4
        True
    """
    return Quantizer(to, rule=rule, group=group, scales=scales, symmetric=symmetric).experts(experts)


def _checked(matrix: Matrix) -> Matrix:
    if not isinstance(matrix, Matrix):
        raise InputError(f"matrix must be a Matrix, found {show(matrix)}; ExpertWeights.matrix(expert, projection) gives one")
    return matrix


def _magnitude(largest: float | None) -> float | None:
    """The magnitude as it is. Raises InputError for what would make factors that are no numbers."""
    if largest is not None and not (isinstance(largest, Real) and 0 <= float(largest) <= float(np.finfo(np.float32).max)):
        raise InputError(f"largest must be None or a finite float32 magnitude, found {show(largest)}")
    return largest


def _bands(groups: tuple[int, int]) -> Iterator[slice]:
    """Groups along n, some at a time: their numbers take little memory. Threads wait for each other between many bands."""
    some = max(1, AT_ONCE // groups[1])
    for first in range(0, groups[0], some):
        yield slice(first, min(first + some, groups[0]))


def _extremes(weights: source.SourceMatrix, matrix: Matrix, extent: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    found = core.weights_extremes(weights, *extent)
    if found is None:
        source.refuse(matrix)
    return found


def _rule(to: str, name: str | None, symmetric: bool | None) -> Rule:
    of_target = [rule for (target, _), rule in RULES.items() if target == to]
    fitting = [rule for rule in of_target if symmetric is None or rule.points != symmetric]
    if not fitting:
        raise InputError(f"{to}: no rule has zero points")
    if name is None:
        return fitting[0]
    for rule in fitting:
        if rule.name == name:
            return rule
    raise InputError(f"{to}: rule must be one of {', '.join(rule.name for rule in fitting)}, found {show(name)}")


def _format(target: Target, rule: Rule, group: Group | None, kind: str | None) -> WeightFormat:
    for label, given, only in (("group", group, rule.group), ("scales", kind, rule.kind)):
        if None not in (given, only) and given != only:
            raise InputError(f"rule {rule.name!r}: {label} must be {only!r}, found {show(given)}")
    if kind is not None and target.kind is None:
        raise InputError(f"{rule.target}: its scales are of one kind, found {show(kind)}")
    if kind is not None and kind not in KINDS:
        raise InputError(f"{rule.target}: scales must be one of {', '.join(KINDS)}, found {show(kind)}")
    group = group if group is not None else rule.group if rule.group is not None else target.group
    kind = kind or rule.kind or target.kind
    # a target whose scales are of one kind does not look at it
    return target.format(group, kind or "", rule.points, rule.steps is steps.in_matrix_divided)
