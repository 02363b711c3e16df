"""What the parameters of vLLM's layers mean: those of routed experts become ExpertWeights, those of a dense layer a Matrix.

vLLM has a parameter of each kind for codes, scales, zero points and biases. Of routed experts it keeps gate and up in one
parameter, w13_*, and down in another, w2_*. Only numpy is needed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from ktmoe.errors import FormatError
from ktmoe.experts import ExpertWeights
from ktmoe.matrix import Matrix
from ktmoe.weights.activation import SILU, GatedActivation
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.scales import SCALE_KINDS

#: What the names of the parameters of routed experts begin with: gate and up, and down.
STEMS = ("w13", "w2")
#: Arrays whose items vLLM may keep in a wider dtype than the checkpoint has. The others are bytes, which are viewed.
_NUMBERS = ("scales", "factor", "bias")
_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@dataclass(frozen=True)
class Parameters:
    """How a layer's parameters are its matrices.

    format: the matrices'. endings: the parameters' names, by the array's name in Matrix; those of experts have w13_ and w2_
    before them. "bias" may be among them. kinds: those of SCALE_KINDS that the scales may be of, if the format's is not known
    before they are loaded. words: arrays whose codes are in items of 32 bits. unread: other parameters that vLLM's loaders may
    fill, and what they are: "points", as zero points of GPTQ, "inputs", one scale for each matrix, or "shape". interleaved:
    rows of gate and up alternate in w13, g0, u0, g1, u1; else all of gate's come first.
    """

    format: WeightFormat
    endings: Mapping[str, str]
    kinds: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False

    @property
    def units(self) -> tuple[int, int]:
        """(rows, columns) of a dense layer's matrix that stay together when vLLM cuts or merges its parameters."""
        rows, columns = self.format.unit
        if "codes" in self.words:
            columns = math.lcm(columns, 32 // self.format.element.bits)
        if "offsets" in self.words or "points" in self.unread.values():
            rows = math.lcm(rows, 8)
        return rows, columns

    def fitted(self, arrays: Mapping[str, np.ndarray], stems: Sequence[str] = ("",), name: str = "") -> Parameters:
        """The same, with the first of kinds that has all numbers of the scales.

        vLLM makes parameters of scales in one dtype, whatever the checkpoint's is. Raises FormatError if there is none.
        """
        if not self.kinds:
            return self
        found = [arrays[f"{stem}{self.endings['scales']}"] for stem in stems]
        for kind in self.kinds:
            if all(_fits(scales, kind) for scales in found):
                scale = replace(self.format.scale, kind=kind)
                return replace(self, format=replace(self.format, scale=scale), kinds=())
        kinds = " or all ".join(self.kinds)
        raise FormatError(f"{name}: {self.endings['scales']}: expected scales that are all {kinds} numbers, found others")

    def matrix(
        self, arrays: Mapping[str, np.ndarray], shape: tuple[int, int], rows: Sequence[int], name: str, bias: np.ndarray | None
    ) -> Matrix:
        """The matrix [n, k] of a dense layer, which shares the arrays' memory where it can.

        arrays: by the names in endings, as experts() takes them. rows: of the matrices that vLLM has merged into this one,
        one below the other: each has a factor of its own. bias: float32 [n], or None.
        """
        form, (n, k) = self.format, shape
        found = {label: arrays[name] for label, name in self.endings.items()}
        if form.factor and not form.factor.per_row and len(rows) > 1:
            form = replace(form, factor=replace(form.factor, per_row=True))
            found["factor"] = np.repeat(found["factor"].astype(np.float32), rows)
        if form.scale:
            self._check_scales(f"{name}: {self.endings['scales']}", found["scales"])
        expected = form.arrays(n, k)
        stored = {label: self._array(label, array, *expected[label]) for label, array in found.items()}
        return Matrix(name, form, (n, k), **stored, bias=bias)

    def without_inputs(self) -> Parameters:
        """The same, for checkpoints that have no scales of the layer's input."""
        return replace(self, unread={name: what for name, what in self.unread.items() if what != "inputs"})

    def names(self) -> Iterable[str]:
        """The names of all parameters of experts that are read."""
        return (f"{stem}_{ending}" for ending in self.endings.values() for stem in STEMS)

    def experts(
        self,
        arrays: Mapping[str, np.ndarray],
        hidden: int,
        intermediate: int,
        activation: GatedActivation = SILU,
        name: str = "experts",
        router_weight: str = "down_output",
    ) -> ExpertWeights:
        """ExpertWeights that read these arrays, and copy no more than a matrix at a time.

        arrays: by the names of names(), [experts, ...]. Codes, zero points, and scales of 8 bits are bytes, in items of any
        size. Other scales, factors and biases are float32, float16 or bfloat16. Zero points in order of rows are eight an
        int32, along n.
        Raises FormatError for scales that have no number in the format's kind, and where a parameter is missing.
        """
        if missing := [parameter for parameter in self.names() if parameter not in arrays]:
            raise FormatError(f"{name}: expected parameters {', '.join(missing)}, found {', '.join(sorted(arrays))}")
        for parameter in (f"{stem}_{self.endings['scales']}" for stem in STEMS if "scales" in self.endings):
            self._check_scales(f"{name}: {parameter}", arrays[parameter])
        count = len(arrays[f"w2_{self.endings['codes']}"])

        def read(expert: int, projection: str) -> Matrix:
            n, k = (hidden, intermediate) if projection == "down" else (intermediate, hidden)
            expected = self.format.arrays(n, k) | {"bias": (np.dtype(np.float32), (n,))}
            found = {}
            for label, ending in self.endings.items():
                stem = "w2" if projection == "down" else "w13"
                array = arrays[f"{stem}_{ending}"][expert]
                if projection != "down":
                    array = self._half(label, array, projection == "up")
                found[label] = self._array(label, array, *expected[label])
            return Matrix(f"{name}.{expert}.{projection}", self.format, (n, k), **found)

        return ExpertWeights(count, hidden, intermediate, read, self.format, activation, name, router_weight)

    def _half(self, label: str, both: np.ndarray, second: bool) -> np.ndarray:
        """Gate's half of an array of both, or up's."""
        columns = both.ndim == 2 and self.format.order.transposed and label != "factor"
        half = both.shape[columns] // 2
        rows = slice(second, None, 2) if self.interleaved else slice(second * half, (second + 1) * half)
        return both[:, rows] if columns else both[rows]

    def _array(self, label: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """An array as Matrix takes it. One of another size keeps its shape, which Matrix refuses."""
        array = np.ascontiguousarray(array)
        if label == "offsets" and array.dtype != dtype:  # eight an int32, along n
            array = (array.view("<u4")[:, None, :] >> 4 * np.arange(8, dtype=np.uint32)[:, None] & 15).astype(np.uint8)
            array = np.ascontiguousarray(array.reshape(-1, array.shape[2])[: shape[0]])
        array = array.astype(dtype) if label in _NUMBERS and array.dtype in _FLOATS else array.view(dtype)
        return array.reshape(shape) if array.size == np.prod(shape) else array

    def _check_scales(self, where: str, scales: np.ndarray) -> None:
        kind = self.format.scale.kind
        if scales.dtype in _FLOATS and not _fits(scales, kind):
            raise FormatError(f"{where}: expected scales that are {kind} numbers, found others")


def _fits(scales: np.ndarray, kind: str) -> bool:
    """Whether every number is one of this kind. NaN is left to whoever packs, which names its place."""
    dtype = SCALE_KINDS[kind].dtype
    with np.errstate(over="ignore"):  # what overflows does not fit
        return all(
            np.array_equal(of_expert.astype(dtype).astype(of_expert.dtype), of_expert, equal_nan=True) for of_expert in scales
        )
