"""ExpertSpec and ExpertWeights: what stands between loaders, which make them, and backends, which pack them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ktmoe.errors import FormatError, InputError
from ktmoe.expert_arrays import checked_arrays
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.weight_spec import WeightSpec
from ktmoe.weights.activation import SILU, GatedActivation
from ktmoe.weights.formats import MXFP4, WeightFormat
from ktmoe.weights.order import ROWS

#: Longest dimension that experts may have. The packed bytes of one expert then fit into 64 bits, whatever the format is.
SIZE_LIMIT = 2**28

#: The three matrices of an expert: y = down(activation(gate(x), up(x))).
PROJECTIONS = ("gate", "up", "down")

#: Where a router weight is multiplied in: onto the down projection's output, onto its input, or onto the expert's input.
ROUTER_WEIGHTS = ("down_output", "down_input", "expert_input")


@dataclass(frozen=True, eq=False, repr=False)
class ExpertSpec(WeightSpec):
    """What one layer's experts have to be: their number, sizes and formats. It holds no weight.

    num_experts, hidden, intermediate: gate and up are [intermediate, hidden], down is [hidden, intermediate].
    formats: the WeightFormat of each projection (the same for all experts). name: what messages call this layer.
    """

    projections: ClassVar[tuple[str, ...]] = PROJECTIONS

    def shape(self, projection: str) -> tuple[int, int]:
        """(n, k) of a projection's matrices.

        Examples:
            >>> experts.shape("down") == (experts.hidden, experts.intermediate)
            True
        """
        return (self.hidden, self.intermediate) if projection == "down" else (self.intermediate, self.hidden)

    @property
    def description(self) -> str:
        """'4 experts, hidden=96, intermediate=64, BF16', with a format for each projection where they differ."""
        of = {projection: self.formats[projection].description for projection in PROJECTIONS}
        formats = of["gate"] if len(set(of.values())) == 1 else ", ".join(f"{p} {text}" for p, text in of.items())
        return f"{self.num_experts} experts, hidden={self.hidden}, intermediate={self.intermediate}, {formats}"

    @property
    def amount(self) -> str:
        """'4 experts'."""
        return f"{self.num_experts} expert{'s' * (self.num_experts != 1)}"

    def one(self, expert: int) -> str:
        """'expert 3'.

        Examples:
            >>> experts.one(3)
            'expert 3'
        """
        return f"expert {expert}"

    @property
    def shard_unit(self) -> int:
        """Columns of the intermediate dimension that stay together when it is cut into shards: whole blocks of 32, and no cut
        through what shares a scale, or an item of an array, in any projection."""
        return math.lcm(32, self._unit)

    @property
    def _unit(self) -> int:
        """The items of the intermediate dimension that no cut may part: rows of gate and up, columns of down."""
        gate, up, down = (self.formats[projection].unit for projection in PROJECTIONS)
        return math.lcm(gate[0], up[0], down[1])

    def part(self, count: int, argument: str) -> ExpertSpec:
        """What each of so many equal parts of the experts is, cut along the intermediate dimension for tensor parallelism.

        Raises InputError, which names the argument that gave the count, where that would cut what shares a scale, or an item of
        an array.

        Examples:
            >>> experts.part(2, "parts").intermediate == experts.intermediate // 2
            True
        """
        unit = self._unit
        if count < 1 or self.intermediate % count or (count > 1 and self.intermediate // count % unit):
            raise InputError(
                f"{argument} must divide the intermediate size, {self.intermediate}, into multiples of {unit}, found {count}"
            )
        return ExpertSpec(self.num_experts, self.hidden, self.intermediate // count, self.formats, self.name)


class ExpertWeights(ExpertSpec):
    """All routed experts of one layer, read one matrix at a time.

    num_experts, hidden, intermediate, formats, name: ExpertSpec's; a WeightFormat alone stands for all three projections.
    read: (expert, projection) -> Matrix, called when a matrix is asked for, possibly from several threads.
    activation: GatedActivation. router_weight: what the model multiplies a router weight onto, one of ROUTER_WEIGHTS.

    Examples:
        >>> def read(expert, projection):
        ...     return ktmoe.Matrix(f"{expert}.{projection}", ktmoe.BF16, (64, 64), np.zeros((64, 64), ml_dtypes.bfloat16))
        >>> ktmoe.ExpertWeights(8, 64, 64, read, ktmoe.BF16)
        ExpertWeights('experts', 8 experts, hidden=64, intermediate=64, BF16)
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        read: Callable[[int, str], Matrix],
        formats: Mapping[str, WeightFormat] | WeightFormat = MXFP4,
        activation: GatedActivation = SILU,
        name: str = "experts",
        router_weight: str = "down_output",
    ):
        if isinstance(formats, WeightFormat):
            formats = dict.fromkeys(PROJECTIONS, formats)
        num_experts = _size(f"{name}: num_experts", num_experts)
        hidden = _size(f"{name}: hidden", hidden)
        intermediate = _size(f"{name}: intermediate", intermediate)
        super().__init__(num_experts, hidden, intermediate, dict(formats), name)
        self.activation = activation
        self.router_weight = checked_router_weight(router_weight)
        self._read = read

    @property
    def spec(self) -> ExpertSpec:
        """What these experts are, without the way to read them: for whoever outlives their checkpoint."""
        return ExpertSpec(self.num_experts, self.hidden, self.intermediate, self.formats, self.name)

    @classmethod
    def from_arrays(
        cls,
        gate: np.ndarray | tuple[np.ndarray, ...],
        up: np.ndarray | tuple[np.ndarray, ...],
        down: np.ndarray | tuple[np.ndarray, ...],
        *,
        biases: Mapping[str, np.ndarray] | None = None,
        format: WeightFormat = MXFP4,
        activation: GatedActivation = SILU,
        name: str = "experts",
        router_weight: str = "down_output",
    ) -> ExpertWeights:
        """Make experts of arrays that hold all of them, E along the first axis; dtypes and shapes as Matrix has them.

        gate, up, down: a tuple of the format's arrays, in the order of format.arrays(). For MXFP4 these are (codes, scales):
        (uint8 [E, I, H/2], uint8 [E, I, ceil(H/32)]) for gate and up, (uint8 [E, H, I/2], uint8 [E, H, ceil(I/32)]) for down.
        A format that has only codes takes them alone: bfloat16 [E, I, H] and [E, H, I] for BF16.
        biases: optional float32 arrays by projection, [E, I] for gate and up, [E, H] for down.

        Examples:
            >>> codes, scales = np.zeros((8, 64, 32), np.uint8), np.full((8, 64, 2), 127, np.uint8)
            >>> ktmoe.ExpertWeights.from_arrays((codes, scales), (codes, scales), (codes, scales))
            ExpertWeights('experts', 8 experts, hidden=64, intermediate=64, E2M1 with ue8m0 scales per 1x32)
        """
        arrays = {"gate": gate, "up": up, "down": down}
        (num_experts, hidden, intermediate), read = checked_arrays(name, format, arrays, biases)
        return cls(num_experts, hidden, intermediate, read, format, activation, name, router_weight)

    def take(self, ids: Sequence[int]) -> ExpertWeights:
        """Slot i of these is expert ids[i] of this one; ids may repeat, for experts that are there more than once.

        ids: integers in [0, num_experts), at least one. Raises InputError.

        Examples:
            >>> experts.take([0, 5, 5]).num_experts
            3
        """
        try:
            chosen = [operator.index(expert) for expert in ids]
        except TypeError:
            raise InputError(f"{self.name}: expected a sequence of expert ids, found {show(ids)}") from None
        for slot, expert in enumerate(chosen):
            if not 0 <= expert < self.num_experts:
                raise InputError(f"{self.name}: slot {slot} must be an expert in [0, {self.num_experts}), found {expert}")

        def read(slot: int, projection: str) -> Matrix:
            return self.matrix(chosen[slot], projection)

        return self._with(len(chosen), read, self.activation)

    def with_shared(self, shared: ExpertWeights) -> ExpertWeights:
        """These experts and shared ones behind them: number num_experts + i is shared expert i.

        shared: of the same sizes, formats and activation. Where formats differ in their source order alone, shared matrices are
        put into that of these. Their router_weight is not asked for. Raises InputError, or FormatError for another format,
        which say what differs.

        Examples:
            >>> shared = experts.take([0])
            >>> experts.with_shared(shared).num_experts - experts.num_experts
            1
        """
        if not isinstance(shared, ExpertWeights):
            raise InputError(f"{self.name}: shared must be ExpertWeights, found {show(shared)}")
        beside = "a MoELayer of the shared experts alone computes them beside this one"
        for name in ("hidden", "intermediate", "activation"):
            expected, found = getattr(self, name), getattr(shared, name)
            if expected != found:
                raise InputError(
                    f"{shared.name}: shared experts need the routed ones' {name}, {expected}, found {found}; {beside}"
                )
        for projection in PROJECTIONS:
            expected, found = self.formats[projection], shared.formats[projection]
            if replace(expected, order=ROWS) != replace(found, order=ROWS):
                raise FormatError(
                    f"{shared.name}: shared experts need the routed ones' format of {projection}, {expected.description}, "
                    f"found {found.description}; {beside}"
                )

        def read(expert: int, projection: str) -> Matrix:
            if expert < self.num_experts:
                return self.matrix(expert, projection)
            return shared.matrix(expert - self.num_experts, projection).in_order(self.formats[projection].order)

        return self._with(self.num_experts + shared.num_experts, read, self.activation)

    def with_activation(self, activation: GatedActivation) -> ExpertWeights:
        """The same matrices under another activation.

        Examples:
            >>> experts.with_activation(ktmoe.GatedActivation(limit=7.0)).activation
            GatedActivation(alpha=1.0, limit=7.0, up_offset=0.0)
        """
        return self._with(self.num_experts, self._read, activation)

    def _with(self, num_experts: int, read: Callable[[int, str], Matrix], activation: GatedActivation) -> ExpertWeights:
        return ExpertWeights(
            num_experts, self.hidden, self.intermediate, read, self.formats, activation, self.name, self.router_weight
        )

    def matrix(self, expert: int, projection: str) -> Matrix:
        """Read one matrix.

        Raises InputError for an expert or projection that does not exist, and what check() raises.

        Examples:
            >>> down = experts.matrix(0, "down")
            >>> down.name, down.shape == (experts.hidden, experts.intermediate)
            ('layers.3.ffn.experts.0.w2', True)
        """
        if projection not in PROJECTIONS:
            raise InputError(f"{self.name}: projection must be one of {PROJECTIONS}, found {show(projection)}")
        self.check_expert(expert)
        matrix = self._read(expert, projection)
        self.check(expert, projection, matrix)
        return matrix


def checked_experts(experts: ExpertWeights) -> ExpertWeights:
    """The experts as they are. Raises InputError, which says how to get ExpertWeights, for anything else."""
    if not isinstance(experts, ExpertWeights):
        raise InputError(
            f"experts must be ExpertWeights, found {show(experts)}; ktmoe.load_experts(path, layer) gives those of a checkpoint"
        )
    return experts


def checked_router_weight(router_weight: str) -> str:
    """The router_weight as it is. Raises InputError if it is none of ROUTER_WEIGHTS."""
    if router_weight not in ROUTER_WEIGHTS:
        raise InputError(f"router_weight must be one of {ROUTER_WEIGHTS}, found {show(router_weight)}")
    return router_weight


def _size(name: str, value: int) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if not 1 <= size <= SIZE_LIMIT:
        raise InputError(f"{name} must be a whole number from 1 to {SIZE_LIMIT}, found {show(value)}")
    return size
