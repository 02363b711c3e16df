"""config_groups of config.json's quantization_config: what compressed-tensors says of the integers that are weights."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from ktmoe.errors import CheckpointError, FormatError
from ktmoe.loaders import quantization
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show

#: What config_groups.*.weights may say, besides nothing and group_size. actorder "weight" reorders nothing that is stored.
_SUPPORTED = {
    "num_bits": (4, 8),
    "type": ("int",),
    "symmetric": (True, False),
    "strategy": ("group", "channel", None),
    "actorder": (None, False, "weight", "static"),
}


@dataclass(frozen=True)
class ConfigGroups:
    """What the groups say that are supported. Which layers they are for is not looked at.

    group_size: columns that share a scale; None if there is none, or if groups differ. bits: those that some group has.
    """

    group_size: int | None
    bits: frozenset[int]


_stated: weakref.WeakKeyDictionary[Checkpoint, ConfigGroups] = weakref.WeakKeyDictionary()


def stated(checkpoint: Checkpoint) -> ConfigGroups:
    """read(), once for a checkpoint: a hostile config has many groups."""
    if checkpoint not in _stated:
        _stated[checkpoint] = read(checkpoint)
    return _stated[checkpoint]


def read(checkpoint: Checkpoint) -> ConfigGroups:
    """What config.json says. Raises FormatError, which names the key, if no group is supported; CheckpointError."""
    where, groups = f"{checkpoint.path}: quantization_config", quantization.read(checkpoint).get("config_groups")
    if not isinstance(groups, dict | None):
        raise CheckpointError(f"{where}.config_groups: expected an object, found {show(groups)}")
    refused, sizes, bits = None, [], set()
    for name, one in (groups or {}).items():
        weights = one.get("weights") if isinstance(one, dict) else None
        if not isinstance(weights, dict):  # a group that leaves weights as they are
            continue
        try:
            sizes.append(_group_size(f"{where}.config_groups.{name}.weights", weights))
        except FormatError as error:
            refused = refused or error
        else:
            bits |= {weights["num_bits"]} if "num_bits" in weights else set()
    if refused is not None and not sizes:
        raise refused
    return ConfigGroups(sizes[0] if len(set(sizes)) == 1 else None, frozenset(bits))


def _group_size(where: str, weights: dict[str, Any]) -> int | None:
    for key, supported in _SUPPORTED.items():
        found = weights.get(key, supported[0])
        if not any(type(found) is type(value) and found == value for value in supported):
            expected = " or ".join(repr(value) for value in supported)
            raise FormatError(f"{where}.{key}: expected {expected}, found {show(found)}")
    size = weights.get("group_size")
    if type(size) is int and size == -1:  # all of a row
        return None
    if size is not None and (type(size) is not int or not 1 <= size < 2**31):
        raise FormatError(f"{where}.group_size: expected a count of columns, found {show(size)}")
    return size
