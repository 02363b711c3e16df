"""What is to be packed: layers of a checkpoint that have routed experts, and dense matrices by their names."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ktmoe import backends
from ktmoe._native import core
from ktmoe.backends.base import Arenas, Plan
from ktmoe.backends.choice import choose_backend
from ktmoe.cache.manifest import Item
from ktmoe.errors import CheckpointError, FormatError, InputError, MissingTensorError, UnavailableError, asking
from ktmoe.experts import ExpertWeights
from ktmoe.linear_weights import LinearWeights
from ktmoe.loaders import naming, one_matrix
from ktmoe.loaders.base import load_layers
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.dense import find_matrix
from ktmoe.machine import numa
from ktmoe.machine.numa import Placement, placement_of
from ktmoe.messages import show


@dataclass(frozen=True)
class ToPack:
    """A layer or a dense matrix that is to be in the cache."""

    item: Item
    weights: ExpertWeights | LinearWeights
    placement: Placement

    @property
    def shards(self) -> list[tuple[int, int]]:
        return numa.split(self.weights.intermediate, self.weights.shard_unit, self.placement.shards)

    def each(self) -> Generator[core.PackedLayer | core.PackedLinear, None, None]:
        """Pack each expert in turn, alone in a layer of these shards; or the matrix."""
        backend, plan = self._chosen()
        with asking(backend, self.weights.name):
            return backends.get(backend).pack_each(self.weights, plan)

    def map(self, arenas: Arenas) -> core.PackedLayer | core.PackedLinear:
        """What lies packed in a file."""
        backend, plan = self._chosen()
        chosen = backends.get(backend)
        mapped: Any  # of the types that pack_each() gives
        with asking(backend, self.weights.name):
            if isinstance(self.weights, LinearWeights):
                mapped = chosen.map_linear(self.weights, plan, arenas)
            else:
                mapped = chosen.map(self.weights, plan, arenas)
        return mapped

    def _chosen(self) -> tuple[str, Plan]:
        """The backend, and a plan: packed bytes are the same in all modes."""
        choice = choose_backend("auto", self.weights)
        return choice.name, Plan(activations=choice.activations, placement=self.placement)


def wanted(
    checkpoint: Checkpoint,
    layers: Iterable[int | str] | None,
    matrices: Iterable[str] | None,
    loader: str,
    numa_nodes: Sequence[int] | None,
) -> tuple[list[ToPack], dict[str, str]]:
    """What pack() packs; its arguments. And matrices that fit a * and are left out: why, by name. Only headers are read.

    Raises InputError, and what loaders raise.
    """
    if isinstance(matrices, str):
        raise InputError(f"matrices must be a sequence of names, found {show(matrices)}")
    skipped: dict[str, str] = {}
    if matrices is None:
        chosen = _fitting(checkpoint, "*", skipped)
    else:
        chosen = list(dict.fromkeys(name for given in matrices for name in _named(checkpoint, given, skipped)))
    names = None if layers is None else [naming.layer_key(layer) for layer in layers]
    if names is None and chosen and not naming.layers(checkpoint):  # a dense model
        names = []
    read = {} if names == [] else load_layers(checkpoint, loader, names)
    if len(read) < len(names or []) or not (read or chosen):
        raise InputError(f"{checkpoint.path}: layers: expected at least one, each once, found {show(names or [])}")
    found: list[tuple[Item, ExpertWeights | LinearWeights]]
    found = [(Item("layer", name), experts) for name, (_, experts) in read.items()]
    found += [(Item("matrix", name), _weights(checkpoint, name)) for name in chosen]
    items = [ToPack(item, weights, placement_of(weights, numa_nodes)) for item, weights in found]
    return items, {name: why for name, why in skipped.items() if name not in chosen}


def _weights(checkpoint: Checkpoint, name: str) -> LinearWeights:
    found = find_matrix(checkpoint, name)
    return LinearWeights.of_headers(found.name, found.format, found.shape, found.read)


def _named(checkpoint: Checkpoint, given: str, skipped: dict[str, str]) -> list[str]:
    """The matrices that a name means: itself or, if it has a *, all that fit it, can be read, and are no routed expert's and no
    embedding. skipped: takes the others, and why."""
    if not isinstance(given, str):
        raise InputError(f"matrices must be a sequence of names, found {show(given)} in it")
    if "*" not in given:
        return [given]
    found = _fitting(checkpoint, given, skipped)
    if not found:
        why = next((f" that is read: {name}: {why}" for name, why in skipped.items() if fnmatchcase(name, given)), "")
        raise MissingTensorError(f"{checkpoint.path}: matrices: expected names that fit {show(given)}, found none{why}")
    return found


def _fitting(checkpoint: Checkpoint, pattern: str, skipped: dict[str, str]) -> list[str]:
    """The matrices whose names fit a pattern; see _named()."""
    experts = {name.rpartition(".")[0] for layer in naming.layers(checkpoint) for name in naming.tensors(checkpoint, layer)}
    found, left_out = [], {}
    for base in one_matrix.bases(checkpoint):  # so norms, which have one dimension, and convolutions are no matrices
        if base in experts or not fnmatchcase(base, pattern):
            continue
        if one_matrix.is_table(base):
            left_out[base] = "a token reads some rows of an embedding; if it is the output layer, too, ask for it by its name"
            continue
        try:
            find_matrix(checkpoint, base)
        except (CheckpointError, FormatError, UnavailableError) as error:
            left_out[base] = str(error)
        else:
            found.append(base)
    skipped |= left_out
    return sorted(found, key=_counted)


def _counted(name: str) -> list[tuple[int, str]]:
    """What sorts names as people count: layer 2 before layer 10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split("([0-9]+)", name)]
