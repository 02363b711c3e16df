"""config.json's quantization_config: what it may say, and group_size."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ktmoe.errors import CheckpointError, FormatError
from ktmoe.loaders import model_config
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show


def read(checkpoint: Checkpoint) -> dict[str, Any]:
    """quantization_config, at the top or in text_config; empty if there is none. Raises CheckpointError if it is no object."""
    stated = model_config.value(checkpoint, "quantization_config")
    if not isinstance(stated, dict | None):
        raise CheckpointError(f"{checkpoint.path}: quantization_config: expected an object, found {show(stated)}")
    return stated or {}


def group_size(checkpoint: Checkpoint) -> int | None:
    """The group_size of quantization_config; None if there is none, or if it is no count, which check() refuses."""
    size = read(checkpoint).get("group_size")
    return size if type(size) is int and 1 <= size < 2**31 else None


def block_size(checkpoint: Checkpoint) -> tuple[int, int]:
    """The weight_block_size of quantization_config, (rows, columns) that share a scale; 128x128 if none. Raises FormatError."""
    stated = read(checkpoint).get("weight_block_size")
    if stated is None:
        return 128, 128
    if not (isinstance(stated, list) and len(stated) == 2 and all(type(size) is int and 0 < size < 2**31 for size in stated)):
        where = f"{checkpoint.path}: quantization_config.weight_block_size of config.json"
        raise FormatError(f"{where}: expected two counts, found {show(stated)}")
    return stated[0], stated[1]


def check_transforms(checkpoint: Checkpoint, name: str = "") -> None:
    """Raise FormatError if weights are only right for inputs that have been rotated: compressed-tensors' transform_config, or
    the layers of a rotation that Quark leaves to the inference. name: of a matrix; by default, the weights are all experts.
    """
    stated, where = read(checkpoint), f"{checkpoint.path}: quantization_config"
    transforms = stated.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        where += ".transform_config"
        raise FormatError(f"{where}: expected none, found {show(transforms)}: inputs would have to be rotated")
    algorithms = stated.get("algo_config")
    for algorithm in algorithms if isinstance(algorithms, list) else []:
        online = algorithm.get("online_config") if isinstance(algorithm, dict) else None
        layers = online.get("online_rotation_layers") if isinstance(online, dict) else None
        if isinstance(layers, list) and (wrong := next((each for each in layers if _is_of(str(each), name)), None)):
            where += ".algo_config: online_rotation_layers"
            whose = name or "experts"
            raise FormatError(f"{where}: expected none of {whose}, found {show(wrong)}: inputs would have to be rotated")


def _is_of(pattern: str, name: str) -> bool:
    """Whether a layer's name, or the end of one, perhaps with asterisks, may mean a matrix; without a name, experts."""
    return fnmatchcase(f".{name}", f"*.{pattern.lstrip('*.')}") if name else "experts" in pattern


def check(checkpoint: Checkpoint, supported: Mapping[str, tuple[Any, ...]], also: tuple[int, ...] = ()) -> None:
    """Raise FormatError, which names the key, for a value that is not supported, or a group_size that is no count.

    supported: by key, the values that it may have where it is there; the first ones are named. also: other group sizes.
    """
    stated, where = read(checkpoint), f"{checkpoint.path}: quantization_config"
    for key, values in supported.items():
        found = stated.get(key, values[0])
        if not any(type(found) is type(value) and found == value for value in values):
            expected = " or ".join(repr(value) for value in values if value is not None)
            raise FormatError(f"{where}.{key}: expected {expected}, found {show(found)}")
    if stated.get("group_size") not in (None, *also) and group_size(checkpoint) is None:
        raise FormatError(f"{where}.group_size: expected a count of columns, found {show(stated['group_size'])}")
