"""Stacked: a PerExpert that also reads tensors which hold all experts of a layer; a Spelling says which these are.

Such a tensor is an array of a matrix behind one more axis, the experts: [E, ...]. Where gate and up have the same stem, it has
2I rows: those of gate before those of up, or, interleaved, g0, u0, g1, u1 and so on. Codes of 8 and 16 bits may be transposed:
[E, k, n], and their scales likewise. Shapes tell: gate_up [E, 2I, H] and down [E, H, I] are never [E, H, 2I] and [E, I, H].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ktmoe.errors import CheckpointError, FormatError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.loaders import checks, model_config, naming, quantization
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.pairs import GateUpReader
from ktmoe.loaders.per_expert import PerExpert
from ktmoe.loaders.scheme import FACTORS, Headers, float32, why
from ktmoe.loaders.tensor_file import TensorInfo
from ktmoe.matrix import Matrix
from ktmoe.weights.activation import GatedActivation
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.order import TRANSPOSED

#: The ending of biases, float [E, rows].
BIAS = "_bias"
#: Arguments of a Spelling of quantized tensors that hold all experts. Scales of their input are not used, as in scheme.
STACKED: dict[str, Any] = {
    "stacked": True,
    "foreign": {"bias": "biases are not supported"},
    "unused": ("_input_scale", "_activation_scale"),
}


class Stacked(PerExpert):
    """PerExpert for spellings of both kinds. Where all experts are in one tensor, their number is what its shape says."""

    def stacked_activation(self, checkpoint: Checkpoint) -> GatedActivation:
        """The activation, by config.json, for tensors that hold all experts. Raises FormatError, CheckpointError."""
        return model_config.silu(checkpoint)

    def codes_shape(self, info: TensorInfo) -> tuple[int, int, int]:
        """(experts, *shape of the codes that a Matrix takes), by the header of all experts' codes. Raises FormatError."""
        checks.dimensions(info, 3)
        experts, rows, columns = info.shape
        return experts, rows, columns

    def check_headers(self, checkpoint: Checkpoint, spelling: naming.Spelling, prefix: str) -> None:
        if spelling.stacked:
            self._tensors(checkpoint, spelling, prefix, spelling.endings)
        else:
            super().check_headers(checkpoint, spelling, prefix)

    def load_place(self, place: naming.Place) -> ExpertWeights:
        """Raises FormatError also for scales that gate and up would share."""
        if not place.spelling.stacked:
            return super().load_place(place)
        checkpoint = place.checkpoint
        quantization.check_transforms(checkpoint)
        self.check_config(checkpoint)
        tensors = self._tensors(checkpoint, place.spelling, f"{place.base}.", place.endings)
        place.check_count(tensors.num_experts)
        return ExpertWeights(
            tensors.num_experts,
            *tensors.shape("down"),
            tensors.reader(),
            tensors.format,
            self.stacked_activation(checkpoint),
            place.base,
            model_config.router_weight(checkpoint, place.base),
        )

    def _tensors(self, checkpoint: Checkpoint, spelling: naming.Spelling, prefix: str, endings: Collection[str]) -> _Tensors:
        """What the headers say, which are all checked here."""
        arrays = dict(spelling.arrays) | ({"bias": BIAS} if BIAS in endings else {})
        headers = {projection: Headers(checkpoint, prefix + stem, arrays) for projection, stem in spelling.stems.items()}
        rows = self.scheme.format(headers["gate"])
        for of_projection in headers.values():
            self.scheme.check_dtypes(of_projection, rows)
        shapes = {projection: self.codes_shape(each.info("codes")) for projection, each in headers.items()}
        formats = [rows]
        if rows.order.rows and rows.element.bits > 4:
            formats.append(replace(rows, order=TRANSPOSED))
        matrices = 2 if headers["gate"].name == headers["up"].name else 1
        weight_format = next((each for each in formats if _fits(each, shapes, matrices)), rows)
        tensors = _Tensors(
            headers, weight_format, spelling.interleaved, matrices, shapes["gate"][0], *_sizes(weight_format, shapes, matrices)
        )
        tensors.check(shapes)
        return tensors


def _sizes(weight_format: WeightFormat, shapes: Mapping[str, tuple[int, int, int]], matrices: int) -> tuple[int, int]:
    """(hidden, intermediate) by gate's codes."""
    n, k = weight_format.shape(shapes["gate"][1:])
    return k, n // matrices


def _fits(weight_format: WeightFormat, shapes: Mapping[str, tuple[int, int, int]], matrices: int) -> bool:
    """Whether down's codes are [H, I] if gate's say what H and I are."""
    return weight_format.shape(shapes["down"][1:]) == _sizes(weight_format, shapes, matrices)


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a layer. matrices: how many gate's tensor has of an expert: 2 where it is up's, too."""

    headers: Mapping[str, Headers]
    format: WeightFormat
    interleaved: bool
    matrices: int
    num_experts: int
    hidden: int
    intermediate: int

    def shape(self, projection: str) -> tuple[int, int]:
        """(n, k) of an expert's matrix."""
        return (self.hidden, self.intermediate) if projection == "down" else (self.intermediate, self.hidden)

    def check(self, shapes: Mapping[str, tuple[int, int, int]]) -> None:
        """Check all headers. shapes: of codes, with the experts. Raises CheckpointError if they do not fit, and FormatError."""
        name, sizes = self.headers["gate"].tensor("codes"), {}
        for projection, (num_experts, rows, columns) in shapes.items():
            sizes[projection] = num_experts, *self.format.shape((rows, columns))
        if sizes["gate"][1] % self.matrices:
            raise CheckpointError(
                f"{name}: expected an even number of rows, gate and up, found [E, n, k] = {list(sizes['gate'])}"
            )
        for projection in PROJECTIONS[1 if self.matrices == 1 else 2 :]:
            expected = self.num_experts, *self.shape(projection)
            if sizes[projection] != expected:
                raise CheckpointError(
                    f"{self.headers[projection].tensor('codes')}: expected [E, n, k] = {list(expected)}, "
                    f"as {name} is {list(sizes['gate'])}, found {list(sizes[projection])}"
                )
        unit = self.format.unit[0]
        if self.matrices == 2 and (self.intermediate % unit or (self.interleaved and unit > 1)):
            wanted = (
                "one scale a row, as rows of gate and up alternate" if self.interleaved else f"a multiple of {unit} rows each"
            )
            raise FormatError(
                f"{name}: gate and up: expected {wanted}, found {self.intermediate} rows each, scales of {unit} rows"
            )
        for projection in PROJECTIONS:
            self._check_others(projection)

    def _check_others(self, projection: str) -> None:
        """Check the headers of what is not codes. Raises FormatError."""
        headers, (n, k) = self.headers[projection], self._stored_shape(projection)
        for label, (_, shape) in self._arrays(n, k, headers).items():
            info = headers.info(label)
            if label == "bias":
                checks.dtype(info, *FACTORS)
            if label == "factor":  # which may have an axis of 1 more
                flat = tuple(size for size in info.shape if size > 1)
                of_all = self._common_factor and not flat
                if len(info.shape) > 3 or (
                    flat != tuple(size for size in (self.num_experts, *shape) if size > 1) and not of_all
                ):
                    checks.shape(info, (self.num_experts, *shape), "one factor per expert and row")
            elif label != "codes":
                reason = "one bias per expert and row" if label == "bias" else why(self.format, label, k)
                checks.shape(info, (self.num_experts, *shape), reason)

    def _stored_shape(self, projection: str) -> tuple[int, int]:
        """(n, k) of what a tensor has of an expert."""
        n, k = self.shape(projection)
        return (n, k) if projection == "down" else (n * self.matrices, k)

    def _arrays(self, n: int, k: int, headers: Headers) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """The arrays of a matrix: WeightFormat.arrays(), and the bias."""
        bias = {"bias": (np.dtype(np.float32), (n,))} if "bias" in headers.arrays else {}
        return self.format.arrays(n, k) | bias

    @property
    def _common_factor(self) -> bool:
        """Whether gate and up have one factor."""
        return self.format.factor is not None and not self.format.factor.per_row

    def reader(self) -> Callable[[int, str], Matrix]:
        """(expert, projection) -> Matrix. It reads an expert's bytes alone; once, if gate and up are asked for in turn."""
        together = self.matrices == 2 and (self.interleaved or self.format.order.transposed or self._common_factor)
        pairs = GateUpReader(self._both) if together else None

        def read(expert: int, projection: str) -> Matrix:
            if projection == "down" or self.matrices == 1:
                return self._matrix(expert, projection, self._read(expert, projection))
            if pairs:
                return pairs.take(expert, projection)
            return self._matrix(expert, projection, self._read(2 * expert + (projection == "up"), projection, 2))

        return read

    def _both(self, expert: int) -> dict[str, Matrix]:
        arrays = self._read(expert, "gate")
        return {p: self._matrix(expert, p, self._half(arrays, p == "up")) for p in ("gate", "up")}

    def _matrix(self, expert: int, projection: str, arrays: Mapping[str, np.ndarray]) -> Matrix:
        name = f"{self.headers[projection].name}[{expert}]"
        if projection != "down" and self.matrices == 2:
            name += f" {projection}"
        return Matrix(name, self.format, self.shape(projection), **arrays)

    def _read(self, index: int, projection: str, slices: int = 1) -> dict[str, np.ndarray]:
        """The arrays of the index-th slice of rows, if each expert's rows are so many slices."""
        headers, (n, k) = self.headers[projection], self._stored_shape(projection)
        arrays = {}
        for label, (dtype, shape) in self._arrays(n // slices, k, headers).items():
            of_all = label == "factor" and math.prod(headers.info(label).shape) == 1
            place = (0, 1) if of_all else (index, self.num_experts * slices)
            data = naming.read_slice(headers.checkpoint, headers.tensor(label), *place)
            if label in ("bias", "factor"):
                data = float32(data, headers.info(label))
            arrays[label] = data.view(dtype).reshape(shape)
        return arrays

    def _half(self, arrays: Mapping[str, np.ndarray], second: bool) -> dict[str, np.ndarray]:
        """Gate's arrays, or up's, from those of both."""
        halves = {}
        for label, array in arrays.items():
            if label == "factor" and self._common_factor:
                halves[label] = array
                continue
            columns = array.ndim == 2 and self.format.order.transposed
            half = array.shape[columns] // 2
            rows = slice(second, None, 2) if self.interleaved else slice(second * half, (second + 1) * half)
            halves[label] = np.ascontiguousarray(array[:, rows] if columns else array[rows])
        return halves
