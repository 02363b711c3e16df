"""Cache: a packed cache that was opened for one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ktmoe.backends.base import Arenas
from ktmoe.cache import manifest, source
from ktmoe.cache.manifest import Item, PackedFile
from ktmoe.cache.packed_file import open_packed
from ktmoe.errors import CacheError, InputError
from ktmoe.experts import ExpertWeights
from ktmoe.linear_weights import LinearSpec
from ktmoe.loaders import naming
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine import numa
from ktmoe.machine.numa import Placement
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.weight_spec import WeightSpec


class Cache:
    """A folder that `ktmoe pack` has made of a checkpoint.

    path: the folder. checkpoint: that it is used with. layers, matrices: those that are packed, as text.
    Its manifest is read here, and of the checkpoint's files headers and samples.
    Raises CacheError, which names the file, if the cache is damaged, of another version, or of another checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str], checkpoint: Checkpoint):
        self.path = Path(path)
        self._manifest = manifest.read(path)
        source.check(checkpoint, self._manifest.source, str(path))
        self._of_checkpoint = {what: self._manifest.of_checkpoint(what) for what in ("layer", "matrix")}
        self.layers, self.matrices = list(self._manifest.layers), list(self._manifest.matrices)

    @property
    def all_layers(self) -> list[int | str]:
        """All layers of the checkpoint that have routed experts, packed or not. Raises CacheError if none is packed."""
        if not self.layers:
            raise CacheError(f"{self.path}: layers: expected to be packed, found none; `ktmoe pack` adds them")
        return [naming.layer_key(name) for name in self._manifest.all_layers]

    def experts(self, checkpoint: Checkpoint, layers: Iterable[int | str], loader: str) -> dict[int | str, ExpertWeights]:
        """What the checkpoint's loader gives for these layers. It is asked for one of each kind; others are not parsed.

        Layers of one kind were alike when they were packed, and neither the files nor config.json have changed since.

        Raises CacheError for a layer that was not packed, and what loaders raise.
        """
        known: dict[str, ExpertWeights] = {}
        found = {}
        for layer in layers:
            entry = self._entry(Item("layer", layer))
            kind = repr(replace(entry, file="", nbytes=0, label=""))
            if kind not in known:
                known[kind] = find_loader(checkpoint, loader, layer).load(checkpoint, layer)
            found[layer] = _of_layer(known[kind], entry.label, checkpoint, loader, layer)
        return found

    def layer(self, layer: int | str, experts: ExpertWeights, placement: Placement) -> Arenas:
        """What a layer of that name maps. experts: what the checkpoint's loader gives for it; no matrix is read.

        Raises CacheError if it was not packed, or for other experts or another number of shards.
        """
        return self._arenas(Item("layer", layer), experts, placement)

    def matrix(self, name: str, weights: LinearSpec, placement: Placement) -> Arenas:
        """What a dense matrix of that name maps. weights: what the checkpoint's headers say of it; the matrix is not read.

        Raises CacheError if it was not packed, or as another matrix or for another number of shards.
        """
        return self._arenas(Item("matrix", name), weights, placement)

    def _arenas(self, item: Item, weights: WeightSpec, placement: Placement) -> Arenas:
        what, entry = f"{self.path}: {item}", self._entry(item)
        if len(entry.shards) != placement.shards:
            raise CacheError(
                f"{what}: expected arenas for {_nodes(placement.shards)}, found them for {_nodes(len(entry.shards))}; choose "
                "numa_nodes, or pack for other ones with `ktmoe pack --numa-nodes`"
            )
        shards = numa.split(weights.intermediate, weights.shard_unit, placement.shards)
        expected = manifest.expected(item, weights, shards, entry.nbytes)
        for key in ("file", "experts", "hidden", "intermediate", "formats", "shards", "layout"):
            want, found = getattr(expected, key), getattr(entry, key)
            if want != found:
                raise CacheError(f"{what}: {key}: expected {want}, found {show(found)}; `ktmoe pack` makes another one")
        return open_packed(self.path, entry, weights, manifest.stated(item, entry, self._of_checkpoint[item.what]))

    def _entry(self, item: Item) -> PackedFile:
        entry = self._manifest.entry(item)
        if entry is None:
            if item.what == "layer":
                packed = naming.listed([naming.layer_key(name) for name in self.layers]) or "no layers"
            else:
                packed = ", ".join(map(show, self.matrices[:4])) + ", ..." * (len(self.matrices) > 4) or "no matrices"
            raise CacheError(f"{self.path}: {item}: expected to be packed, found {packed}; `ktmoe pack` adds it")
        return entry


def open_cache(cache: str | os.PathLike[str], checkpoint: Checkpoint, physical_to_logical: object) -> Cache:
    """A cache of that checkpoint. Raises CacheError; InputError if experts are to be in other places."""
    if physical_to_logical is not None:
        raise InputError("cache: expected no physical_to_logical: a packed cache has the checkpoint's experts as they are")
    return Cache(cache, checkpoint)


def _of_layer(alike: ExpertWeights, name: str, checkpoint: Checkpoint, loader: str, layer: int | str) -> ExpertWeights:
    """Experts that are alike but for their matrices, which are read if somebody asks for them."""

    def read(expert: int, projection: str) -> Matrix:
        return find_loader(checkpoint, loader, layer).load(checkpoint, layer).matrix(expert, projection)

    sizes = alike.num_experts, alike.hidden, alike.intermediate
    return ExpertWeights(*sizes, read, alike.formats, alike.activation, name, alike.router_weight)


def _nodes(shards: int) -> str:
    return f"{shards} NUMA node{'s' * (shards > 1)}"
