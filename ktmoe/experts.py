"""Matrix, ExpertSpec and ExpertWeights: what stands between loaders, which make them, and backends, which pack them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ktmoe.errors import FormatError, InputError
from ktmoe.messages import show
from ktmoe.weights.activation import SILU, GatedActivation
from ktmoe.weights.formats import MXFP4, WeightFormat

#: Longest dimension that experts may have. The packed bytes of one expert then fit into 64 bits, whatever the format is.
SIZE_LIMIT = 2**28

#: The three matrices of an expert: y = down(activation(gate(x), up(x))).
PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Matrix:
    """One weight matrix [n outputs, k inputs] in its checkpoint's own bytes.

    name: the tensor's name, for messages.
    codes: C-contiguous, of format.codes_dtype; uint8 [n, k/2] for family q4, bfloat16 (ml_dtypes) [n, k] for b16.
    scales: C-contiguous, of format.scale.dtype, [ceil(n/rows), ceil(k/columns)], bytes viewed and never cast; None for b16.
    bias: float32 [n], or None.
    Raises FormatError, which names the tensor, on a wrong dtype, shape or layout. The bytes are checked when packed.
    """

    name: str
    format: WeightFormat
    shape: tuple[int, int]
    codes: np.ndarray
    scales: np.ndarray | None = None
    bias: np.ndarray | None = None

    def __post_init__(self):
        n, k = self.shape
        step = self.format.codes_per_item
        if n < 1 or k < 1 or k % step:
            wanted = f"n >= 1 and a k that is a multiple of {step}" if step > 1 else "n >= 1 and k >= 1"
            raise FormatError(f"{self.name}: a {self.format.family} matrix needs {wanted}, found {self.shape}")
        _expect(f"{self.name} codes", self.codes, self.format.codes_dtype, self.format.codes_shape(n, k))
        scale = self.format.scale
        if scale is not None:
            _expect(f"{self.name} scales", self.scales, scale.dtype, scale.shape(n, k))
        elif self.scales is not None:
            raise FormatError(f"{self.name} scales: expected none for {self.format.family}, found {show(self.scales)}")
        if self.bias is not None:
            _expect(f"{self.name} bias", self.bias, np.float32, (n,))

    def refuse(self) -> None:
        """Raise FormatError for the first scale or weight that stands for no real number; it names the tensor and the place."""
        scale, bias = self.format.scale, self.bias
        if scale is not None and (at := np.argwhere(scale.invalid(self.scales))).size:
            row, column = at[0]
            meaning = (
                "byte 255, which is NaN in UE8M0; expected 0 to 254"
                if scale.kind == "ue8m0"
                else (f"{self.scales[row, column]}; expected a finite number")
            )
            raise FormatError(f"{self.name}: scale [{row}, {column}] is {meaning}")
        if self.format.family == "b16" and (at := np.argwhere(~np.isfinite(self.codes.astype(np.float32)))).size:
            row, column = at[0]
            raise FormatError(f"{self.name}: weight [{row}, {column}] is {self.codes[row, column]}; expected a finite number")
        if bias is not None and not np.isfinite(bias).all():
            raise FormatError(f"{self.name}: bias must be finite, found {bias[~np.isfinite(bias)][0]}")


@dataclass(frozen=True, eq=False)
class ExpertSpec:
    """What one layer's experts have to be: their number, sizes and formats. It holds no weight.

    num_experts, hidden, intermediate: gate and up are [intermediate, hidden], down is [hidden, intermediate].
    formats: the WeightFormat of each projection (the same for all experts). name: what messages call this layer.
    """

    num_experts: int
    hidden: int
    intermediate: int
    formats: Mapping[str, WeightFormat]
    name: str = "experts"

    def shape(self, projection: str) -> tuple[int, int]:
        """(n, k) of a projection's matrices."""
        return (self.hidden, self.intermediate) if projection == "down" else (self.intermediate, self.hidden)

    @property
    def nbytes(self) -> int:
        """Bytes that the checkpoint spends on these experts' codes and scales."""
        return self.num_experts * sum(self.formats[p].nbytes(*self.shape(p)) for p in PROJECTIONS)

    @property
    def shard_unit(self) -> int:
        """Columns of the intermediate dimension that stay together when it is cut into shards: a scale group of down, or 32."""
        scale = self.formats["down"].scale
        return max(32, scale.extent[1] if scale else 1)

    def part(self, count: int, argument: str) -> ExpertSpec:
        """What each of so many equal parts of the experts is, cut along the intermediate dimension for tensor parallelism.

        Raises InputError, which names the argument that gave the count, where that would cut a scale group of down, or an item
        of its codes' array.
        """
        down = self.formats["down"]
        unit = down.scale.extent[1] if down.scale else down.codes_per_item
        if count < 1 or self.intermediate % count or (count > 1 and self.intermediate // count % unit):
            raise InputError(
                f"{argument} must divide the intermediate size, {self.intermediate}, into multiples of {unit}, found {count}"
            )
        return ExpertSpec(self.num_experts, self.hidden, self.intermediate // count, self.formats, self.name)

    def check_expert(self, expert: int) -> None:
        """Raise InputError if there is no expert of that number."""
        if not 0 <= operator.index(expert) < self.num_experts:
            raise InputError(f"{self.name}: expert must be in [0, {self.num_experts}), found {expert}")

    def check(self, expert: int, projection: str, matrix: Matrix) -> None:
        """Raise InputError if this is no Matrix, FormatError if it has not the projection's shape and format.

        Its bytes are not looked at: Matrix.refuse() does that.
        """
        if not isinstance(matrix, Matrix):
            raise InputError(f"{self.name}: {projection} of expert {expert} must be a Matrix, found {type(matrix).__name__}")
        shape, weight_format = self.shape(projection), self.formats[projection]
        if matrix.shape != shape or matrix.format != weight_format:
            raise FormatError(
                f"{matrix.name}: {projection} must be {weight_format.description} {list(shape)}, "
                f"found {matrix.format.description} {list(matrix.shape)}"
            )


class ExpertWeights(ExpertSpec):
    """All routed experts of one layer, read one matrix at a time.

    num_experts, hidden, intermediate, formats, name: ExpertSpec's; a WeightFormat alone stands for all three projections.
    read: (expert, projection) -> Matrix, called when a matrix is asked for, possibly from several threads.
    activation: GatedActivation.
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
    ):
        if isinstance(formats, WeightFormat):
            formats = dict.fromkeys(PROJECTIONS, formats)
        num_experts = _size(f"{name}: num_experts", num_experts)
        hidden = _size(f"{name}: hidden", hidden)
        intermediate = _size(f"{name}: intermediate", intermediate)
        super().__init__(num_experts, hidden, intermediate, dict(formats), name)
        self.activation = activation
        self._read = read

    @property
    def spec(self) -> ExpertSpec:
        """What these are, without the way to read them: for whoever outlives their checkpoint."""
        return ExpertSpec(self.num_experts, self.hidden, self.intermediate, self.formats, self.name)

    @classmethod
    def from_arrays(
        cls,
        gate: np.ndarray | tuple[np.ndarray, np.ndarray],
        up: np.ndarray | tuple[np.ndarray, np.ndarray],
        down: np.ndarray | tuple[np.ndarray, np.ndarray],
        *,
        biases: Mapping[str, np.ndarray] | None = None,
        format: WeightFormat = MXFP4,
        activation: GatedActivation = SILU,
        name: str = "experts",
    ) -> ExpertWeights:
        """From arrays in memory that hold all experts, E along the first axis; dtypes and shapes as Matrix has them.

        gate, up: (codes [E, I, ...], scales [E, I, ...]); down: (codes [E, H, ...], scales [E, H, ...]). For MXFP4 that is
        (uint8 [E, I, H/2], uint8 [E, I, ceil(H/32)]) and (uint8 [E, H, I/2], uint8 [E, H, ceil(I/32)]).
        A format without scales takes the codes alone: bfloat16 [E, I, H] and [E, H, I] for b16.
        biases: optional float32 arrays by projection, [E, I] for gate and up, [E, H] for down.
        """
        labels = ("codes",) if format.scale is None else ("codes", "scales")
        given = {p: v if isinstance(v, tuple) else (v,) for p, v in zip(PROJECTIONS, (gate, up, down), strict=True)}
        for projection, arrays in given.items():
            if len(arrays) != len(labels):
                raise FormatError(f"{name}: {projection} must be ({', '.join(labels)}), found {len(arrays)} arrays")
        biases = dict(biases or {})
        if unknown := biases.keys() - given.keys():
            raise FormatError(f"{name}: biases must be by projection, one of {PROJECTIONS}, found {sorted(unknown)}")
        arrays = {f"{p} {label}": a for p, pair in given.items() for label, a in zip(labels, pair, strict=True)}
        arrays |= {f"{projection} bias": array for projection, array in biases.items()}
        for label, array in arrays.items():
            dimensions = ("experts", "rows") if label.endswith("bias") else ("experts", "rows", "columns")
            if not isinstance(array, np.ndarray) or array.ndim != len(dimensions):
                found = f"{array.ndim} dimensions" if isinstance(array, np.ndarray) else type(array).__name__
                raise FormatError(f"{name}: {label} must be an array [{', '.join(dimensions)}], found {found}")
        num_experts, intermediate, columns = given["gate"][0].shape
        hidden = columns * format.codes_per_item
        for label, array in arrays.items():
            if array.shape[0] != num_experts:
                raise FormatError(f"{name}: {label} must hold {num_experts} experts, found {array.shape[0]}")

        def read(expert: int, projection: str) -> Matrix:
            shape = (hidden, intermediate) if projection == "down" else (intermediate, hidden)
            codes, *scales = (array[expert] for array in given[projection])
            bias = biases[projection][expert] if projection in biases else None
            return Matrix(f"{name}.{expert}.{projection}", format, shape, codes, *(scales or [None]), bias)

        return cls(num_experts, hidden, intermediate, read, format, activation, name)

    def take(self, ids: Sequence[int]) -> ExpertWeights:
        """Slot i of these is expert ids[i] of this one; ids may repeat, for experts that are there more than once.

        ids: integers in [0, num_experts), at least one. Raises InputError.
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

        return ExpertWeights(len(chosen), self.hidden, self.intermediate, read, self.formats, self.activation, self.name)

    def with_activation(self, activation: GatedActivation) -> ExpertWeights:
        """The same matrices under another activation."""
        return ExpertWeights(self.num_experts, self.hidden, self.intermediate, self._read, self.formats, activation, self.name)

    def matrix(self, expert: int, projection: str) -> Matrix:
        """Read one matrix.

        Raises InputError for an expert or projection that does not exist, and what check() raises.
        """
        if projection not in PROJECTIONS:
            raise InputError(f"{self.name}: projection must be one of {PROJECTIONS}, found {show(projection)}")
        self.check_expert(expert)
        matrix = self._read(expert, projection)
        self.check(expert, projection, matrix)
        return matrix


def _size(name: str, value: int) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if not 1 <= size <= SIZE_LIMIT:
        raise InputError(f"{name} must be a whole number from 1 to {SIZE_LIMIT}, found {show(value)}")
    return size


def _expect(name: str, array: np.ndarray | None, dtype: np.dtype | type, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray):
        raise FormatError(f"{name}: expected a numpy array, found {type(array).__name__}")
    if array.dtype != dtype:
        raise FormatError(f"{name}: expected dtype {np.dtype(dtype).name}, found {array.dtype}")
    if array.shape != shape:
        raise FormatError(f"{name}: expected shape {list(shape)}, found {list(array.shape)}")
    if not array.flags.c_contiguous:
        raise FormatError(f"{name}: expected a C-contiguous array, found strides {array.strides}")
