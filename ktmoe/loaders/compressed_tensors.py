"""compressed-tensors, pack-quantized: symmetric INT4 experts (Kimi-K2-Thinking, and what llm-compressor writes as W4A16).

An expert's tensors are {base}.{E}.{gate,up,down}_proj.weight_{packed,scale,shape}, or with w1, w3, w2, where base is
layers.{L}.mlp.experts, or another module's experts, behind model. and language_model. prefixes:

    weight_packed  I32 [N, K/8], eight codes an integer, lowest bits first along k, a code stores q + 8
    weight_scale   BF16 [N, K/group]
    weight_shape   I32 or I64 [2], holds N and K; may be absent

The little-endian bytes of an I32 are two codes each, low nibble = even k, so nothing is converted. config.json's
quantization_config must agree with the tensors where it is given.
"""

from __future__ import annotations

import weakref

import ml_dtypes
import numpy as np

from ktmoe.errors import CheckpointError, FormatError
from ktmoe.experts import ExpertWeights, Matrix
from ktmoe.loaders import naming, registry
from ktmoe.loaders.base import NAMED, Loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show
from ktmoe.weights.formats import WeightFormat, int4

_ENDINGS, _STATED = (".weight_packed", ".weight_scale"), ".weight_shape"
_FOREIGN = {
    "weight_zero_point": "asymmetric quantization is not supported",
    "weight_g_idx": "activation reordering (actorder group) is not supported",
    "weight_global_scale": "FP4 (NVFP4) is not supported",
    "input_global_scale": "quantized activations are not supported",
    "input_scale": "quantized activations are not supported",
    "bias": "biases are not supported",
}
_NAMES = naming.Names(
    "compressed-tensors' pack-quantized",
    *(naming.Spelling(stems, _ENDINGS, (_STATED,), _FOREIGN) for stems in (naming.PROJ_STEMS, naming.NUMBERED_STEMS)),
)
_SHAPE_DTYPES = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
#: What config_groups.*.weights may say, besides nothing and group_size. actorder "weight" reorders nothing that is stored.
_SUPPORTED = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group", None),
    "actorder": (None, False, "weight", "static"),
}

#: By checkpoint.
_groups: weakref.WeakKeyDictionary[Checkpoint, int | None] = weakref.WeakKeyDictionary()


class CompressedTensors(Loader):
    """Reads INT4 experts with one bfloat16 scale a group along k, of any group size.

    num_experts is what the tensor names say; num_experts, n_routed_experts or num_local_experts of config.json, at the top
    or in text_config, must agree with it where it is given.
    """

    def detect(self, checkpoint: Checkpoint) -> float:
        """0.9 if the first layer that can be read has experts packed in I32; NAMED if they are packed otherwise (FP4).

        What else is refused, is by load(), so that it is said: the names are no other scheme's.
        """

        def score(spelling: naming.Spelling, prefix: str) -> float:
            packed = checkpoint.info(f"{prefix}{spelling.stems['gate']}.weight_packed")
            return 0.9 if packed.dtype == "I32" else NAMED

        return _NAMES.detect(checkpoint, score)

    def layers(self, checkpoint: Checkpoint) -> list[int | str]:
        return _NAMES.layers(checkpoint)

    def load(self, checkpoint: Checkpoint, layer: int | str) -> ExpertWeights:
        """One layer's experts, which keep the checkpoint open and read a matrix when it is asked for.

        layer: int, or its digits, or a name such as "mtp.0". All headers are checked here, before any weight is read; a
        weight_shape is compared when its matrix is read. What was read is released from the page cache.
        Raises MissingTensorError for a layer, an expert or a tensor that does not exist; FormatError for another quantization
        than symmetric INT4 in groups, by tensors or config, and for another activation than SiLU; CheckpointError for experts
        of different shapes, and for a config.json or a weight_shape that contradicts the tensors.
        """
        place = _NAMES.locate(checkpoint, layer)
        group = _stated_group(checkpoint) or _derived_group(checkpoint, place.name("gate", 0))
        weight_format = int4(group)
        stated = _STATED in place.endings
        shapes = place.shapes(lambda name: _shape(checkpoint, name, weight_format, stated))
        activation = naming.silu(checkpoint)

        def read(expert: int, projection: str) -> Matrix:
            name, (n, k) = place.name(projection, expert), shapes[projection]
            if stated:
                _check_stated_shape(checkpoint, name + _STATED, (n, k))
            codes = checkpoint.read(f"{name}.weight_packed", release=True).reshape(weight_format.codes_shape(n, k))
            scales = checkpoint.read(f"{name}.weight_scale", release=True).view(ml_dtypes.bfloat16)
            return Matrix(name, weight_format, (n, k), codes, scales.reshape(weight_format.scale.shape(n, k)))

        return ExpertWeights(place.num_experts, *shapes["down"], read, weight_format, activation, place.base)


def _shape(checkpoint: Checkpoint, name: str, weight_format: WeightFormat, stated: bool) -> tuple[int, int]:
    """(n, k) of a matrix, from its headers. Raises FormatError if it is not of that format."""
    n, k = _packed_shape(checkpoint, name)
    scale, group = checkpoint.info(f"{name}.weight_scale"), weight_format.scale.extent[1]
    naming.check_dtype(scale, "BF16")
    naming.check_shape(scale, weight_format.scale.shape(n, k), f"one scale per {group} along k = {k}")
    if stated:
        shape = checkpoint.info(name + _STATED)
        naming.check_dtype(shape, *_SHAPE_DTYPES)
        naming.check_shape(shape, (2,), "n and k")
    return n, k


def _packed_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    packed = checkpoint.info(f"{name}.weight_packed")
    naming.check_dtype(packed, "I32")
    naming.check_dimensions(packed, 2)
    return packed.shape[0], 8 * packed.shape[1]


def _derived_group(checkpoint: Checkpoint, name: str) -> int:
    """The group size by a matrix's shapes, where config.json does not give it."""
    _, k = _packed_shape(checkpoint, name)
    scale = checkpoint.info(f"{name}.weight_scale")
    naming.check_dimensions(scale, 2)
    groups = scale.shape[1]
    if groups == 1:
        raise FormatError(
            f"{scale.name}: shape: expected one scale per group, found one per row (channel), {show(list(scale.shape))}"
        )
    if k % groups:
        raise FormatError(
            f"{scale.name}: shape: expected a number of columns that divides k = {k}, or group_size in quantization_config of "
            f"config.json, found {show(list(scale.shape))}"
        )
    return k // groups


def _stated_group(checkpoint: Checkpoint) -> int | None:
    """read_group(), once for all layers of a checkpoint: a hostile config has many groups."""
    if checkpoint not in _groups:
        _groups[checkpoint] = read_group(checkpoint)
    return _groups[checkpoint]


def read_group(checkpoint: Checkpoint) -> int | None:
    """config.json's group_size, None if it gives none. Raises FormatError, which names the key, for what is not supported.

    Where there are several config groups, one of them must be supported: which layers they are for is not looked at.
    """
    stated = naming.config(checkpoint, "quantization_config")
    if stated is None:
        return None
    where = f"{checkpoint.path}: quantization_config"
    if not isinstance(stated, dict):
        raise CheckpointError(f"{where}: expected an object, found {show(stated)}")
    groups = stated.get("config_groups")
    if not isinstance(groups, dict | None):
        raise CheckpointError(f"{where}.config_groups: expected an object, found {show(groups)}")
    refused, sizes = None, []
    for name, group in (groups or {}).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):  # a group that leaves weights as they are
            continue
        try:
            sizes.append(_group_size(f"{where}.config_groups.{name}.weights", weights))
        except FormatError as error:
            refused = refused or error
    if refused is not None and not sizes:
        raise refused
    sizes = set(sizes) - {None}
    return sizes.pop() if len(sizes) == 1 else None


def _group_size(where: str, weights: dict) -> int | None:
    for key, supported in _SUPPORTED.items():
        found = weights.get(key, supported[0])
        if not any(type(found) is type(value) and found == value for value in supported):
            expected = " or ".join(repr(value) for value in supported)
            raise FormatError(f"{where}.{key}: expected {expected}, found {show(found)}")
    size = weights.get("group_size")
    if size is not None and (type(size) is not int or not 1 <= size < 2**31):
        raise FormatError(f"{where}.group_size: expected a count of columns, found {show(size)}")
    return size


def _check_stated_shape(checkpoint: Checkpoint, name: str, expected: tuple[int, int]) -> None:
    found = checkpoint.read(name).view(_SHAPE_DTYPES[checkpoint.info(name).dtype]).tolist()
    if found != list(expected):
        raise CheckpointError(f"{name}: expected {list(expected)} by weight_packed, found {found}")


registry.register("compressed_tensors", CompressedTensors())
