"""pack(): a packed cache of a checkpoint, layer by layer; what is there already is kept, and can be verified."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ktmoe import backends
from ktmoe._native import core
from ktmoe.backends.base import Arenas, Plan, Progress
from ktmoe.backends.choice import choose_backend
from ktmoe.cache import manifest, source
from ktmoe.cache.layer_file import LayerWriter, open_layer
from ktmoe.cache.manifest import Manifest, PackedLayerFile
from ktmoe.errors import CacheError, CheckpointError, InputError, OutOfSpaceError, OutputError, asking
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.files.lock import LOCK_NAME, exclusive
from ktmoe.files.output import output_folder
from ktmoe.loaders import naming
from ktmoe.loaders.base import find_layers, load_layers
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine import numa
from ktmoe.machine.numa import Placement, placement_of
from ktmoe.messages import show


@dataclass
class PackReport:
    """What pack() did: layers that it wrote, kept and verified; nbytes: of all files of those layers."""

    written: list[int | str] = field(default_factory=list)
    kept: list[int | str] = field(default_factory=list)
    verified: list[int | str] = field(default_factory=list)
    nbytes: int = 0


@dataclass(frozen=True)
class _LayerToPack:
    """A layer that is to be in the cache."""

    name: int | str
    experts: ExpertWeights
    placement: Placement

    @property
    def shards(self) -> list[tuple[int, int]]:
        return numa.split(self.experts.intermediate, self.experts.shard_unit, self.placement.shards)

    def each(self) -> Iterator[core.PackedLayer]:
        """Pack each expert in turn, alone in a layer of these shards."""
        choice = choose_backend("auto", self.experts)
        plan = Plan(self.experts.router_weight, choice.activations, placement=self.placement)
        with asking(choice.name, self.experts.name):
            return backends.get(choice.name).pack_each(self.experts, plan)


def pack(
    path: str | os.PathLike,
    out: str | os.PathLike,
    layers: Iterable[int | str] | None = None,
    *,
    loader: str = "auto",
    numa_nodes: Sequence[int] | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Write a packed cache of a checkpoint: its experts as they lie in memory, so that loading is mapping.

    path: a checkpoint. out: a folder that is made if need be, and is empty or has a cache of this checkpoint; layers that are
    packed there are kept. layers: by default all that have routed experts. numa_nodes: as MoELayer has them: how many there are
    decides how experts are cut into arenas.
    verify: then pack each expert anew, and compare all bytes.
    progress: called with (done_bytes, total_bytes) of the checkpoint; an exception from it ends packing. Finished layers stay.
    Memory is needed for a few experts. A layer's file is there whole or not at all.
    Raises OutputError (the target has something else, or another process writes it, or the disk is full), OutOfSpaceError,
    CheckpointError if the checkpoint's files change meanwhile, CacheError if bytes differ, and what loaders raise.
    """
    folder = output_folder(out)
    with Checkpoint(path) as seen:  # before those that are read are opened, so that a file that is replaced in between differs
        files = source.files_of(seen)
    with Checkpoint(path) as checkpoint:
        wanted = _wanted(checkpoint, layers, loader, numa_nodes)
        _make(folder)
        with exclusive(folder):
            there = replace(_there(folder, files, checkpoint), all_layers=tuple(map(str, find_layers(checkpoint, loader))))
            missing = [layer for layer in wanted if not _is_packed(folder, there, layer)]
            _check_space(folder, missing)
            if missing:
                there.write(folder)  # the folder is a cache's from now on
            total = sum(layer.experts.nbytes for layer in missing + (wanted if verify else []))
            count = _Count(progress, total)
            done = PackReport(kept=[layer.name for layer in wanted if layer not in missing])
            for layer in missing:
                entry = _write(folder, layer, there, checkpoint, count)
                there = replace(there, layers={**there.layers, str(layer.name): entry})
                there.write(folder)
                done.written.append(layer.name)
            for layer in wanted if verify else ():
                _verify(folder, there, layer, count)
                done.verified.append(layer.name)
            done.nbytes = sum(there.layers[str(layer.name)].nbytes for layer in wanted)
            return done


class _Count:
    """Bytes of the checkpoint that are done, for progress."""

    def __init__(self, progress: Progress | None, total: int):
        self._progress, self._total, self._done = progress, total, 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress:
            self._progress(self._done, self._total)


def _wanted(
    checkpoint: Checkpoint, layers: Iterable[int | str] | None, loader: str, numa_nodes: Sequence[int] | None
) -> list[_LayerToPack]:
    names = None if layers is None else [naming.layer_key(layer) for layer in layers]
    read = load_layers(checkpoint, loader, names)
    if not read or (names is not None and len(read) < len(names)):
        raise InputError(f"{checkpoint.path}: layers: expected at least one, each once, found {show(names or [])}")
    return [_LayerToPack(name, experts, placement_of(experts, numa_nodes)) for name, (_, experts) in read.items()]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        found = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{folder}: expected a folder, or a place for one: {found}") from error


def _there(folder: Path, files: tuple[source.SourceFile, ...], checkpoint: Checkpoint) -> Manifest:
    """What a folder has of this checkpoint. Raises OutputError if it has something else."""
    if not os.path.lexists(folder / manifest.NAME):
        others = sorted(name for name in os.listdir(folder) if name != LOCK_NAME and not name.startswith(f".{manifest.NAME}"))
        if others:
            raise OutputError(f"{folder}: expected an empty folder or a packed cache, found {show(others[0])} in it")
        return Manifest(files, (), {})
    try:
        there = manifest.read(folder)
    except CacheError as error:
        raise OutputError(f"{error}; remove {folder}, or choose another folder") from None
    if wrong := source.difference(there.source, files, checkpoint.folder):
        raise OutputError(
            f"{folder}: expected an empty folder or a cache of this checkpoint as it is now, found one of another: {wrong}; "
            f"remove {folder}, or choose another folder"
        )
    return there


def _is_packed(folder: Path, there: Manifest, layer: _LayerToPack) -> bool:
    """Whether a layer is packed. Raises OutputError if it is packed for other NUMA nodes, or by another version."""
    entry = there.layers.get(str(layer.name))
    if entry is None:
        return False
    if replace(entry, shards=tuple(entry.shards)) != manifest.expected(layer.name, layer.experts, layer.shards, entry.nbytes):
        raise OutputError(
            f"{folder}: layer {show(layer.name)} is packed for {len(entry.shards)} NUMA nodes, versions "
            f"{dict(entry.layout)}, which is not what is wanted; remove {folder}, or choose another folder"
        )
    try:
        _open(folder, there, layer)
    except CacheError:  # it was removed, or is another layer's
        return False
    return True


def _open(folder: Path, there: Manifest, layer: _LayerToPack) -> Arenas:
    """A layer's file. Raises CacheError if it is not what the manifest says."""
    entry = there.layers[str(layer.name)]
    return open_layer(folder, entry, layer.experts, manifest.stated(layer.name, entry, there.of_checkpoint))


def _check_space(folder: Path, missing: list[_LayerToPack]) -> None:
    needed = sum(layer.experts.num_experts * core.expert_nbytes(layer.experts, layer.shards) for layer in missing)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutOfSpaceError(f"{folder}: {len(missing)} packed layers need {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB is free")


def _write(folder: Path, layer: _LayerToPack, there: Manifest, checkpoint: Checkpoint, count: _Count) -> PackedLayerFile:
    entry = manifest.expected(layer.name, layer.experts, layer.shards)
    stated = manifest.stated(layer.name, entry, there.of_checkpoint)
    writer = None
    try:
        with closing(layer.each()) as experts:
            for one in experts:
                if writer is None:
                    writer = LayerWriter(folder / entry.file, layer.experts, layer.shards, one, stated)
                writer.add(one)
                count.add(layer.experts.nbytes // layer.experts.num_experts)
        writer.finish()
        if wrong := source.difference(there.source, source.files_of(checkpoint), checkpoint.folder):
            raise CheckpointError(f"{checkpoint.path}: expected files that do not change meanwhile: {wrong}")
        writer.commit()
    except BaseException:
        if writer is not None:
            writer.abort()
        raise
    return replace(entry, nbytes=writer.nbytes)


def _verify(folder: Path, there: Manifest, layer: _LayerToPack, count: _Count) -> None:
    """Raise CacheError, which names the matrix, where a layer's file has not the bytes that packing gives."""
    path = folder / there.layers[str(layer.name)].file
    choice = choose_backend("auto", layer.experts)
    plan = Plan(layer.experts.router_weight, choice.activations, placement=layer.placement)
    arenas = _open(folder, there, layer)
    with asking(choice.name, layer.experts.name):
        mapped = backends.get(choice.name).map(layer.experts, plan, arenas)
    with closing(mapped), closing(layer.each()) as experts:
        for expert, one in enumerate(experts):
            biases, factors = core.numbers(one)
            same = np.array_equal(core.seen(one)[0], arenas.seen[expert])
            wrong = next((p for p in PROJECTIONS if not _same(mapped, one, expert, p, len(layer.shards))), None)
            for found, ours in ((arenas.biases, biases), (arenas.factors, factors)):
                same = same and found.keys() == ours.keys()
                same = same and all(np.array_equal(_bits(found[p][expert]), _bits(ours[p][0])) for p in ours)
            if wrong or not same:
                raise CacheError(
                    f"{path}: expert {expert}: {wrong or 'scales, biases or factors'}: expected the bytes that packing gives, "
                    "found others; remove the file, and pack again"
                )
            count.add(layer.experts.nbytes // layer.experts.num_experts)


def _same(mapped: core.PackedLayer, one: core.PackedLayer, expert: int, projection: str, shards: int) -> bool:
    return all(
        np.array_equal(mapped.packed_bytes(expert, projection, shard), one.packed_bytes(0, projection, shard))
        for shard in range(shards)
    )


def _bits(numbers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(numbers).view(np.uint32)
