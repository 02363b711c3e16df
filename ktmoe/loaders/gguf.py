"""GGUF: experts as llama.cpp's files have them, in the types that ktmoe.weights.ggml knows.

Tensors are, of layer L:

    blk.{L}.ffn_{gate,up,down}_exps.weight   all experts: [E, I, H], [E, I, H] and [E, H, I] as numpy has shapes
    blk.{L}.ffn_gate_up_exps.weight          [E, 2I, H] in the place of gate and up: gate's rows come first
    blk.{L}.ffn_..._exps.bias                [E, rows], of all three where the architecture has biases (gpt-oss), else of none
    blk.{L}.ffn_..._exps.scale               [E], one factor for each expert, which comes before the bias (NVFP4)
    blk.{L}.ffn_{gate,up,down}.{E}.weight    [rows, columns] of one expert (Mixtral in files of 2023 and 2024)

Biases and scales are F32, F16 or BF16; `.input_scale` is not used. Each projection has a type of its own: Q4_K_M has some down
projections in Q6_K. What experts compute and whether they have biases follows from general.architecture, see architectures.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from ktmoe.errors import CheckpointError, FormatError, KtmoeError, MissingTensorError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.loaders import architectures, checks, model_config, naming, registry
from ktmoe.loaders.base import Loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.gguf_model import ARCHITECTURE, is_gguf
from ktmoe.loaders.scheme import FACTORS, Endings, Headers, Scheme, float32
from ktmoe.loaders.tensor_file import TensorInfo
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.ggml import GGML
from ktmoe.weights.scales import Factor

#: Stems of tensors that hold all experts, by projection: gate and up apart, and in one.
_APART = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
_FUSED = {"gate": "ffn_gate_up_exps", "up": "ffn_gate_up_exps", "down": "ffn_down_exps"}
#: Stems of tensors that hold one expert, in old files.
_OLD = {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
_OLD_NAME = re.compile(r"ffn_(?:gate|up|down)\.([0-9]+)\.weight")


class GgufTensors(Scheme):
    """Any type of GGML, with a factor where the matrix has a `.scale`."""

    stored = (Endings({"codes": ".weight", "factor": ".scale"}), Endings({"codes": ".weight"}))

    def reads(self, headers: Headers) -> bool:
        return is_gguf(headers.checkpoint.config)

    def format(self, headers: Headers) -> WeightFormat:
        return _format(headers.info("codes"), "factor" in headers.arrays)

    def check_dtypes(self, headers: Headers, weight_format: WeightFormat) -> None:
        if "factor" in headers.arrays:
            checks.dtype(headers.info("factor"), *FACTORS)

    def shape(self, headers: Headers, weight_format: WeightFormat) -> tuple[int, int]:
        info = _padded(headers.info("codes"), 2)
        checks.dimensions(info, 2)
        if "factor" in headers.arrays:
            checks.shape(_padded(headers.info("factor"), 1), (1,), "one factor per matrix")
        n, k = info.shape
        return n, k

    def tensors(self, headers: Headers, weight_format: WeightFormat, shape: tuple[int, int]) -> dict[str, np.ndarray]:
        factor = {"factor": np.ones(1, np.float32)} if weight_format.factor and "factor" not in headers.arrays else {}
        return super().tensors(headers, weight_format, shape) | factor


def matrix_of_rows(checkpoint: Checkpoint, name: str) -> Matrix:
    """A tensor of any number of dimensions as a matrix of all its rows. Raises FormatError for a type that is not computed."""
    info = checkpoint.info(name)
    weight_format = _format(info, False)
    shape = (math.prod(info.shape[:-1]), info.shape[-1] if info.shape else 1)
    dtype, stored = weight_format.arrays(*shape)["codes"]
    codes = checkpoint.read(name, release=True).view(dtype).reshape(stored)
    return Matrix(name.removesuffix(".weight"), weight_format, shape, codes)


class Gguf(Loader):
    """Reads the routed experts of a GGUF file."""

    scheme = GgufTensors()

    def detect(self, checkpoint: Checkpoint) -> float:
        """0.9 if some layer with such names can be read, 0 without such names. Else raises what load() raises of the first."""
        refused: KtmoeError | None = None
        for layer in naming.blocks(checkpoint):
            try:
                architectures.activation(checkpoint, layer)
                _LayerHeaders.find(checkpoint, layer)
            except (CheckpointError, FormatError) as error:
                refused = refused or error
            else:
                return 0.9
        if refused is not None:
            raise refused
        return 0.0

    def layers(self, checkpoint: Checkpoint) -> list[int | str]:
        return [*naming.blocks(checkpoint)]

    def load(self, checkpoint: Checkpoint, layer: int | str) -> ExpertWeights:
        """One layer's experts, which keep the checkpoint open and read a matrix when it is asked for.

        layer: int, or its digits. All headers are checked here. Raises MissingTensorError for a layer or a tensor that does not
        exist; FormatError, which names the tensor, for a type that cannot be computed, and for an architecture whose experts
        compute something else; CheckpointError for shapes that do not fit, and where metadata contradicts them.
        """
        key = naming.layer_key(layer)
        if not isinstance(key, int) or not naming.block(checkpoint, key):
            listed = naming.listed(naming.blocks(checkpoint)) or "no layer with tensors of GGUF's names"
            raise MissingTensorError(
                f"{checkpoint.path}: layer {show(layer)}: expected a layer that has routed experts, found {listed}"
            )
        of_layer = _LayerHeaders.find(checkpoint, key)
        return ExpertWeights(
            of_layer.num_experts,
            of_layer.hidden,
            of_layer.intermediate,
            of_layer.read,
            {projection: matrices.format for projection, matrices in of_layer.matrices.items()},
            architectures.activation(checkpoint, key),
            f"blk.{key}",
            architectures.of(checkpoint).router_weight,
        )


@dataclass(frozen=True)
class _Matrices:
    """The matrices of a projection, of all experts.

    name: of the weights' tensor, with {} for the expert's number where it has one of its own. bias, scale: of their tensors.
    index, count: which of how many equal runs of each expert's rows are the projection's.
    """

    name: str
    format: WeightFormat
    bias: str | None = None
    scale: str | None = None
    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class _LayerHeaders:
    """What the headers say of a layer; all of them are checked."""

    checkpoint: Checkpoint
    matrices: dict[str, _Matrices]
    num_experts: int
    hidden: int
    intermediate: int

    @classmethod
    def find(cls, checkpoint: Checkpoint, layer: int) -> _LayerHeaders:
        """A layer that has tensors of these names. Raises MissingTensorError, FormatError, CheckpointError."""
        base, suffixes = f"blk.{layer}.", naming.block(checkpoint, layer)
        biases = architectures.of(checkpoint).biases
        old = sorted({int(match[1]) for suffix in suffixes if (match := _OLD_NAME.fullmatch(suffix))})
        if old and any("_exps." in suffix for suffix in suffixes):
            raise CheckpointError(f"{checkpoint.path}: {base}: expected tensors of all experts or of one each, found both")
        stems = _OLD if old else _FUSED if "ffn_gate_up_exps.weight" in suffixes else _APART
        wanted = {f"{stem}.{expert}.weight" for stem in stems.values() for expert in old}
        wanted = wanted or {f"{stem}.weight" for stem in stems.values()}
        gap = next((number for number, expert in enumerate(old) if number != expert), None)
        if gap is not None:
            wanted.add(f"ffn_gate.{gap}.weight")
        wanted |= {f"{stem}.bias" for stem in stems.values() if biases}
        if missing := min(wanted - suffixes, default=None):
            raise MissingTensorError(
                f"{checkpoint.path}: {base}{missing}: expected with the layer's others, found no such tensor"
            )
        extra = {f"{stem}.{ending}" for stem in stems.values() for ending in ("scale", "input_scale") if not old}
        if strange := min(suffixes - wanted - extra, default=None):
            known = f"{min(wanted)}, as {ARCHITECTURE} is {show(checkpoint.config[ARCHITECTURE])}"
            raise FormatError(f"{base}{strange}: expected none beside {known}, found one: its meaning is not known")
        matrices = {projection: _matrices(checkpoint, base, stem, suffixes, old) for projection, stem in stems.items()}
        if stems is _FUSED:
            matrices |= {p: replace(matrices[p], index=index, count=2) for index, p in enumerate(("gate", "up"))}
        found = cls(checkpoint, matrices, *_sizes(checkpoint, matrices, old))
        found._check_others(layer)
        return found

    def shape(self, projection: str) -> tuple[int, int]:
        return (self.hidden, self.intermediate) if projection == "down" else (self.intermediate, self.hidden)

    def read(self, expert: int, projection: str) -> Matrix:
        """Read a matrix. Of the tensors, one expert's bytes alone are read."""
        of, shape = self.matrices[projection], self.shape(projection)
        name, place = of.name, (expert * of.count + of.index, self.num_experts * of.count)
        if "{}" in name:
            name, place = name.format(expert), (0, 1)
        dtype, stored = of.format.arrays(*shape)["codes"]
        data = naming.read_slice(self.checkpoint, name, *place)
        arrays = {"codes": data.view(dtype).reshape(stored)}
        if of.bias:
            arrays["bias"] = self._floats(of.bias, *place)
        if of.format.factor:
            arrays["factor"] = self._floats(of.scale, expert, self.num_experts) if of.scale else np.ones(1, np.float32)
        label = name.removesuffix(".weight") + ("" if place == (0, 1) else f"[{expert}]")
        return Matrix(f"{label} {projection}" if of.count > 1 else label, of.format, shape, **arrays)

    def _floats(self, name: str, index: int, count: int) -> np.ndarray:
        stored = naming.read_slice(self.checkpoint, name, index, count)
        return float32(stored, self.checkpoint.info(name))

    def _check_others(self, layer: int) -> None:
        """Check biases, scales, and the number of experts that the metadata say. Raises CheckpointError, FormatError."""
        for projection, of in self.matrices.items():
            for name, shape, why in (
                (of.bias, (self.num_experts, self.shape(projection)[0] * of.count), "one bias per expert and row"),
                (of.scale, (self.num_experts,), "one factor per expert"),
            ):
                if name is not None:
                    info = self.checkpoint.info(name)
                    checks.dtype(info, *FACTORS)
                    checks.shape(_padded(info, len(shape)), shape, why)
        stated = self.checkpoint.config.get("num_experts", self.num_experts)
        if stated != self.num_experts:
            place, found = model_config.place(self.checkpoint, "num_experts"), f"found {self.num_experts} experts"
            raise CheckpointError(f"{self.checkpoint.path}: blk.{layer}: expected {show(stated)} by {place}, {found}")


def _matrices(checkpoint: Checkpoint, base: str, stem: str, suffixes: set[str], old: list[int]) -> _Matrices:
    """What the matrices of a stem are, by the header of the weights; of the first expert's if each has its own."""
    name = f"{base}{stem}.{{}}.weight" if old else f"{base}{stem}.weight"
    bias, scale = (f"{stem}.{ending}" if f"{stem}.{ending}" in suffixes else None for ending in ("bias", "scale"))
    info = checkpoint.info(name.format(0))
    return _Matrices(name, _format(info, scale is not None), bias and base + bias, scale and base + scale)


def _format(info: TensorInfo, has_scale: bool) -> WeightFormat:
    """Of a matrix whose weights have that header. has_scale: whether a factor stands beside them. Raises FormatError."""
    if info.dtype not in GGML:
        raise FormatError(f"{info.name}: type: expected one of {', '.join(GGML)}, found {checks.describe(info)}")
    found = GGML[info.dtype]
    return replace(found, factor=Factor(per_row=False)) if has_scale and not found.factor else found


def _sizes(checkpoint: Checkpoint, matrices: dict[str, _Matrices], old: list[int]) -> tuple[int, int, int]:
    """(experts, hidden, intermediate) by the weights' headers, of which all must agree."""
    shapes, dimensions = {}, 2 if old else 3
    for projection, of in matrices.items():
        infos = [_padded(checkpoint.info(of.name.format(expert)), dimensions) for expert in old or (0,)]
        checks.dimensions(infos[0], dimensions)
        for info in infos[1:]:
            if (info.dtype, info.shape) != (infos[0].dtype, infos[0].shape):
                like = checks.describe(infos[0])
                raise CheckpointError(f"{info.name}: expected {like} as in expert 0, found {checks.describe(info)}")
        shapes[projection] = (len(old), *infos[0].shape) if old else infos[0].shape
    gate = matrices["gate"]
    num_experts, rows, hidden = shapes["gate"]
    if rows % gate.count:
        raise CheckpointError(f"{gate.name}: expected an even number of rows, gate and up, found {rows}")
    intermediate = rows // gate.count
    for projection in PROJECTIONS[gate.count :]:
        expected = (num_experts, hidden, intermediate) if projection == "down" else (num_experts, intermediate, hidden)
        if shapes[projection] != expected:
            raise CheckpointError(
                f"{matrices[projection].name.format(0)}: expected [E, n, k] = {list(expected)}, as {gate.name.format(0)} is "
                f"{list(shapes['gate'])}, found {list(shapes[projection])}"
            )
    return num_experts, hidden, intermediate


def _padded(info: TensorInfo, dimensions: int) -> TensorInfo:
    """A tensor with so many dimensions at least: ggml leaves out those of 1 that come first in numpy's order."""
    return replace(info, shape=(1,) * (dimensions - len(info.shape)) + info.shape)


registry.register("gguf", Gguf())
