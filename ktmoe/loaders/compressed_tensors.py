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
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from ktmoe.errors import CheckpointError, FormatError
from ktmoe.experts import Matrix
from ktmoe.loaders import naming, quantization, registry
from ktmoe.loaders.base import NAMED
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.per_expert import Headers, PerExpert, group, spellings
from ktmoe.messages import show
from ktmoe.weights.formats import WeightFormat, int4

_ARRAYS = {"codes": ".weight_packed", "scales": ".weight_scale"}
_STATED = ".weight_shape"
_FOREIGN = {
    "weight_zero_point": "asymmetric quantization is not supported",
    "weight_g_idx": "activation reordering (actorder group) is not supported",
    "weight_global_scale": "FP4 (NVFP4) is not supported",
    "input_global_scale": "quantized activations are not supported",
    "input_scale": "quantized activations are not supported",
    "bias": "biases are not supported",
}
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


class CompressedTensors(PerExpert):
    """Reads INT4 experts with one bfloat16 scale a group along k, of any group size.

    A weight_shape is compared when its matrix is read. Refused are other quantizations, by tensors or config.
    """

    names = naming.Names("compressed-tensors' pack-quantized", *spellings(_ARRAYS, optional=(_STATED,), foreign=_FOREIGN))
    dtypes: ClassVar = {"codes": ("I32",)}

    def detect(self, checkpoint: Checkpoint) -> float:
        """0.9 if the first layer that can be read has experts packed in I32; NAMED if they are packed otherwise; 0 for NVFP4.

        What else is refused, is by load(), so that it is said: the names are no other scheme's.
        """

        def score(spelling: naming.Spelling, prefix: str) -> float:
            gate = prefix + spelling.stems["gate"]
            if checkpoint.info(f"{gate}.weight_packed").dtype == "I32":
                return 0.9
            return 0.0 if f"{gate}.weight_global_scale" in checkpoint.names() else NAMED

        return self.names.detect(checkpoint, score)

    def format(self, headers: Headers) -> WeightFormat:
        packed = headers.info("codes")
        naming.check_dtype(packed, "I32")
        naming.check_dimensions(packed, 2)
        return int4(_stated_group(headers.checkpoint) or _derived_group(headers, 8 * packed.shape[1]))

    def check_more(self, headers: Headers, endings: Iterable[str], shape: tuple[int, int]) -> None:
        if _STATED in endings:
            info = headers.checkpoint.info(headers.name + _STATED)
            naming.check_dtype(info, *_SHAPE_DTYPES)
            naming.check_shape(info, (2,), "n and k")

    def check_read(self, matrix: Matrix, headers: Headers, endings: Iterable[str]) -> None:
        if _STATED in endings:
            name, checkpoint = headers.name + _STATED, headers.checkpoint
            found = checkpoint.read(name).view(_SHAPE_DTYPES[checkpoint.info(name).dtype]).tolist()
            if found != list(matrix.shape):
                raise CheckpointError(f"{name}: expected {list(matrix.shape)} by weight_packed, found {found}")


def _derived_group(headers: Headers, k: int) -> int:
    """The group size by a matrix's shapes, where config.json does not give it."""
    scale = headers.info("scales")
    if len(scale.shape) == 2 and scale.shape[1] == 1:
        raise FormatError(
            f"{scale.name}: shape: expected one scale per group, found one per row (channel), {show(list(scale.shape))}"
        )
    return group(headers, k, axis=1)


def _stated_group(checkpoint: Checkpoint) -> int | None:
    """read_group(), once for all layers of a checkpoint: a hostile config has many groups."""
    if checkpoint not in _groups:
        _groups[checkpoint] = read_group(checkpoint)
    return _groups[checkpoint]


def read_group(checkpoint: Checkpoint) -> int | None:
    """config.json's group_size, None if it gives none. Raises FormatError, which names the key, for what is not supported.

    Where there are several config groups, one of them must be supported: which layers they are for is not looked at.
    """
    where, stated = f"{checkpoint.path}: quantization_config", quantization.read(checkpoint)
    groups = stated.get("config_groups")
    if not isinstance(groups, dict | None):
        raise CheckpointError(f"{where}.config_groups: expected an object, found {show(groups)}")
    refused, sizes = None, []
    for name, one in (groups or {}).items():
        weights = one.get("weights") if isinstance(one, dict) else None
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


registry.register("compressed_tensors", CompressedTensors())
