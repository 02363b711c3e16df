"""ExpertWeights and Matrix: the uniform per-expert layout between loaders (which make it) and backends (which pack it)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ktmoe.activation import SILU, GatedActivation
from ktmoe.errors import FormatError, InputError
from ktmoe.formats import MXFP4, WeightFormat

#: The three matrices of an expert: y = down(activation(gate(x), up(x))).
PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Matrix:
    """One weight matrix [n outputs, k inputs] in its checkpoint's own bytes.

    name: the tensor's name, for messages.
    codes: uint8 [n, k/2] for family q4, C-contiguous, two codes a byte, low nibble = even k.
    scales: uint8 [ceil(n/rows), ceil(k/columns)] for scale kind ue8m0, C-contiguous, bytes viewed and never cast.
    bias: float32 [n], or None.
    Raises FormatError, which names the tensor, on a wrong dtype, shape or layout. The bytes are checked when packed.
    """

    name: str
    format: WeightFormat
    shape: tuple[int, int]
    codes: np.ndarray
    scales: np.ndarray
    bias: np.ndarray | None = None

    def __post_init__(self):
        n, k = self.shape
        if n < 1 or k < 2 or k % 2:
            raise FormatError(f"{self.name}: a {self.format.family} matrix needs n >= 1 and an even k >= 2, found {self.shape}")
        _expect(f"{self.name} codes", self.codes, np.uint8, self.format.codes_shape(n, k))
        _expect(f"{self.name} scales", self.scales, np.uint8, self.format.scale.shape(n, k))
        if self.bias is not None:
            _expect(f"{self.name} bias", self.bias, np.float32, (n,))


class ExpertWeights:
    """All routed experts of one layer, read one matrix at a time.

    num_experts, hidden, intermediate: gate and up are [intermediate, hidden], down is [hidden, intermediate].
    read: (expert, projection) -> Matrix, called when a matrix is asked for, possibly from several threads.
    formats: the WeightFormat of each projection (the same for all experts).
    activation: GatedActivation. name: what messages call this layer.
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
        for label, value in (("num_experts", num_experts), ("hidden", hidden), ("intermediate", intermediate)):
            if value < 1:
                raise InputError(f"{name}: {label} must be at least 1, found {value}")
        if isinstance(formats, WeightFormat):
            formats = dict.fromkeys(PROJECTIONS, formats)
        self.num_experts = num_experts
        self.hidden = hidden
        self.intermediate = intermediate
        self.formats = dict(formats)
        self.activation = activation
        self.name = name
        self._read = read

    @classmethod
    def from_arrays(
        cls,
        gate: tuple[np.ndarray, np.ndarray],
        up: tuple[np.ndarray, np.ndarray],
        down: tuple[np.ndarray, np.ndarray],
        *,
        biases: Mapping[str, np.ndarray] | None = None,
        format: WeightFormat = MXFP4,
        activation: GatedActivation = SILU,
        name: str = "experts",
    ) -> ExpertWeights:
        """From arrays in memory that hold all experts.

        gate, up: (codes uint8 [E, I, H/2], scales uint8 [E, I, ceil(H/32)]);
        down: (codes uint8 [E, H, I/2], scales uint8 [E, H, ceil(I/32)]).
        biases: optional float32 arrays by projection, [E, I] for gate and up, [E, H] for down.
        """
        pairs = dict(zip(PROJECTIONS, (gate, up, down), strict=True))
        biases = dict(biases or {})
        if unknown := biases.keys() - pairs.keys():
            raise FormatError(f"{name}: biases must be by projection, one of {PROJECTIONS}, found {sorted(unknown)}")
        arrays = {f"{p} {label}": a for p, pair in pairs.items() for label, a in zip(("codes", "scales"), pair, strict=True)}
        arrays |= {f"{projection} bias": array for projection, array in biases.items()}
        for label, array in arrays.items():
            dimensions = ("experts", "rows") if label.endswith("bias") else ("experts", "rows", "bytes")
            if not isinstance(array, np.ndarray) or array.ndim != len(dimensions):
                found = f"{array.ndim} dimensions" if isinstance(array, np.ndarray) else type(array).__name__
                raise FormatError(f"{name}: {label} must be an array [{', '.join(dimensions)}], found {found}")
        num_experts, intermediate, half_hidden = gate[0].shape
        hidden = 2 * half_hidden
        for label, array in arrays.items():
            if array.shape[0] != num_experts:
                raise FormatError(f"{name}: {label} must hold {num_experts} experts, found {array.shape[0]}")

        def read(expert: int, projection: str) -> Matrix:
            codes, scales = pairs[projection]
            shape = (hidden, intermediate) if projection == "down" else (intermediate, hidden)
            bias = biases.get(projection)
            return Matrix(
                f"{name}.{expert}.{projection}",
                format,
                shape,
                codes[expert],
                scales[expert],
                None if bias is None else bias[expert],
            )

        return cls(num_experts, hidden, intermediate, read, format, activation, name)

    def shape(self, projection: str) -> tuple[int, int]:
        """(n, k) of a projection's matrices."""
        return (self.hidden, self.intermediate) if projection == "down" else (self.intermediate, self.hidden)

    def matrix(self, expert: int, projection: str) -> Matrix:
        """Read one matrix.

        Raises InputError for an expert or projection that does not exist, FormatError if it is not what it should be.
        """
        if projection not in PROJECTIONS:
            raise InputError(f"{self.name}: projection must be one of {PROJECTIONS}, found {projection!r}")
        if not 0 <= expert < self.num_experts:
            raise InputError(f"{self.name}: expert must be in [0, {self.num_experts}), found {expert}")
        matrix = self._read(expert, projection)
        if matrix.shape != self.shape(projection):
            raise FormatError(f"{matrix.name}: {projection} must be {list(self.shape(projection))}, found {list(matrix.shape)}")
        if matrix.format != self.formats[projection]:
            raise FormatError(
                f"{matrix.name}: {projection} must be {self.formats[projection].description}, found {matrix.format.description}"
            )
        return matrix

    @property
    def nbytes(self) -> int:
        """Bytes that the checkpoint spends on these experts' codes and scales."""
        return self.num_experts * sum(self.formats[p].nbytes(*self.shape(p)) for p in PROJECTIONS)


def _expect(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray):
        raise FormatError(f"{name}: expected a numpy array, found {type(array).__name__}")
    if array.dtype != dtype:
        raise FormatError(f"{name}: expected dtype {np.dtype(dtype).name}, found {array.dtype}")
    if array.shape != shape:
        raise FormatError(f"{name}: expected shape {list(shape)}, found {list(array.shape)}")
    if not array.flags.c_contiguous:
        raise FormatError(f"{name}: expected a C-contiguous array, found strides {array.strides}")
