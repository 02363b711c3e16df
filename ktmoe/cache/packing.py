"""pack(): a packed cache of a checkpoint, file by file; what is there already is kept, and can be verified."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ktmoe._native import core
from ktmoe.backends.base import Arenas, Progress
from ktmoe.cache import manifest, source
from ktmoe.cache.manifest import Item, Manifest, PackedFile
from ktmoe.cache.packed_file import PackedFileWriter, open_packed, pieces
from ktmoe.cache.wanted import ToPack, wanted
from ktmoe.errors import CacheError, CheckpointError, OutOfSpaceError, OutputError
from ktmoe.files.lock import LOCK_NAME, exclusive
from ktmoe.files.output import free_bytes, names_in, output_folder
from ktmoe.loaders.base import find_layers
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show


@dataclass
class PackReport:
    """What pack() did: layers and dense matrices that it wrote, kept and verified; nbytes: of all their files.

    skipped: matrices that fit a name with a * and were left out, and why.

    Examples:
        >>> report = pack("DeepSeek-V4-Flash", "packed-report", layers=[0])
        >>> report.written, report.nbytes > 0
        ([0], True)
    """

    written: list[int | str] = field(default_factory=list)
    kept: list[int | str] = field(default_factory=list)
    verified: list[int | str] = field(default_factory=list)
    matrices_written: list[str] = field(default_factory=list)
    matrices_kept: list[str] = field(default_factory=list)
    matrices_verified: list[str] = field(default_factory=list)
    nbytes: int = 0
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, item: Item) -> None:
        """Say that an item was "written", "kept" or "verified"."""
        getattr(self, what if item.what == "layer" else f"matrices_{what}").append(item.name)


def pack(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    layers: Iterable[int | str] | None = None,
    *,
    matrices: Iterable[str] | None = (),
    loader: str = "auto",
    numa_nodes: Sequence[int] | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Write a packed cache of a checkpoint: its weights as they lie in memory, so that loading is mapping.

    path: a checkpoint. out: a folder that is made if need be, and is empty or has a cache of this checkpoint; what is packed
    there is kept. layers: by default all that have routed experts. matrices: names of dense matrices, as load_matrix() has
    them; one with a * stands for all that fit it and load_matrix() reads, without routed experts and embeddings. None: all of
    these that there are.
    numa_nodes: as MoELayer has them: how many there are decides how weights are cut into arenas.
    verify: then pack each expert and matrix anew, and compare all bytes.
    progress: called with (done_bytes, total_bytes) of the checkpoint; an exception from it ends packing. Finished files stay.
    Memory is needed for a few experts, or for one matrix, read and packed. A file is there whole or not at all.
    Raises OutputError (the target has something else, or another process writes it, or the disk is full), OutOfSpaceError,
    CheckpointError if the checkpoint's files change meanwhile, CacheError if bytes differ, and what loaders raise.

    Examples:
        >>> report = pack("DeepSeek-V4-Flash", "packed", layers=[3])
        >>> layer = ktmoe.MoELayer.from_checkpoint("DeepSeek-V4-Flash", 3, cache="packed")
        >>> layer.mapped
        True
    """
    folder = output_folder(out)
    with Checkpoint(path) as seen:  # before those that are read are opened, so that a file that is replaced in between differs
        files = source.files_of(seen)
    with Checkpoint(path) as checkpoint:
        items, skipped = wanted(checkpoint, layers, matrices, loader, numa_nodes)
        _make(folder)
        with exclusive(folder):
            there = _there(folder, files, checkpoint)
            if any(each.item.what == "layer" for each in items):
                there = replace(there, all_layers=tuple(map(str, find_layers(checkpoint, loader))))
            missing = [each for each in items if not _is_packed(folder, there, each)]
            _check_space(folder, missing)
            if missing:
                there.write(folder)  # the folder is a cache's from now on
            total = sum(each.weights.nbytes for each in missing + (items if verify else []))
            count, done = _Count(progress, total), PackReport(skipped=skipped)
            for each in items:
                if each not in missing:
                    done.add("kept", each.item)
            for each in missing:
                there = there.with_entry(each.item, _write(folder, each, there, checkpoint, count))
                there.write(folder)
                done.add("written", each.item)
            for each in items if verify else ():
                _verify(folder, there, each, count)
                done.add("verified", each.item)
            done.nbytes = sum(there.entry(each.item).nbytes for each in items)
            return done


class _Count:
    """Bytes of the checkpoint that are done, for progress."""

    def __init__(self, progress: Progress | None, total: int):
        self._progress, self._total, self._done = progress, total, 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress:
            self._progress(self._done, self._total)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        found = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{folder}: expected a folder, or a place for one: {found}") from error


def _there(folder: Path, files: tuple[source.SourceFile, ...], checkpoint: Checkpoint) -> Manifest:
    """What a folder has of this checkpoint. Raises OutputError if it has something else."""
    if not os.path.lexists(folder / manifest.NAME):
        others = sorted(name for name in names_in(folder) if name != LOCK_NAME and not name.startswith(f".{manifest.NAME}"))
        if others:
            raise OutputError(f"{folder}: expected an empty folder or a packed cache, found {show(others[0])} in it")
        return Manifest(files, (), {}, {})
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


def _is_packed(folder: Path, there: Manifest, one: ToPack) -> bool:
    """Whether an item is packed. Raises OutputError if it is packed for other NUMA nodes, or by another version."""
    entry = there.entry(one.item)
    if entry is None:
        return False
    if entry != manifest.expected(one.item, one.weights, one.shards, entry.nbytes):
        raise OutputError(
            f"{folder}: {one.item} is packed for {len(entry.shards)} NUMA nodes, versions "
            f"{dict(entry.layout)}, which is not what is wanted; remove {folder}, or choose another folder"
        )
    try:
        _open(folder, there, one)
    except CacheError:  # it was removed, or is another one's
        return False
    return True


def _open(folder: Path, there: Manifest, one: ToPack) -> Arenas:
    """An item's file. Raises CacheError if it is not what the manifest says."""
    entry = there.entry(one.item)
    return open_packed(folder, entry, one.weights, manifest.stated(one.item, entry, there.of_checkpoint(one.item.what)))


def _check_space(folder: Path, missing: list[ToPack]) -> None:
    needed = sum(each.weights.num_experts * core.expert_nbytes(each.weights, each.shards) for each in missing)
    free = free_bytes(folder)
    if needed > free:
        layers = sum(each.item.what == "layer" for each in missing)
        counts = (layers, "packed layers"), (len(missing) - layers, "packed matrices")
        what = " and ".join(f"{count} {kind}" for count, kind in counts if count)
        raise OutOfSpaceError(f"{folder}: {what} need {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB is free")


def _write(folder: Path, one: ToPack, there: Manifest, checkpoint: Checkpoint, count: _Count) -> PackedFile:
    entry = manifest.expected(one.item, one.weights, one.shards)
    stated = manifest.stated(one.item, entry, there.of_checkpoint(one.item.what))
    writer = None
    try:
        with closing(one.each()) as each:
            for packed in each:
                if writer is None:
                    writer = PackedFileWriter(folder / entry.file, one.weights, one.shards, packed, stated)
                writer.add(packed)
                count.add(one.weights.nbytes // one.weights.num_experts)
        writer.finish()
        if wrong := source.difference(there.source, source.files_of(checkpoint), checkpoint.folder):
            raise CheckpointError(f"{checkpoint.path}: expected files that do not change meanwhile: {wrong}")
        writer.commit()
    except BaseException:
        if writer is not None:
            writer.abort()
        raise
    return replace(entry, nbytes=writer.nbytes)


def _verify(folder: Path, there: Manifest, one: ToPack, count: _Count) -> None:
    """Raise CacheError, which names the expert's matrix or the dense one, where a file has not the bytes that packing gives."""
    path, arenas = folder / one.item.file, _open(folder, there, one)
    with closing(one.map(arenas)) as mapped, closing(one.each()) as each:
        for expert, packed in enumerate(each):
            biases, factors = core.numbers(packed)
            same = np.array_equal(core.seen(packed)[0], arenas.seen[expert])
            wrong = next((p for p in one.weights.projections if not _same(mapped, packed, expert, p, len(one.shards))), None)
            for found, ours in ((arenas.biases, biases), (arenas.factors, factors)):
                same = same and found.keys() == ours.keys()
                same = same and all(np.array_equal(_bits(found[p][expert]), _bits(ours[p][0])) for p in ours)
            if wrong or not same:
                raise CacheError(
                    f"{path}: {one.weights.one(expert)}: {wrong or 'scales, biases or factors'}: expected the bytes that "
                    "packing gives, found others; remove the file, and pack again"
                )
            count.add(one.weights.nbytes // one.weights.num_experts)


def _same(
    mapped: core.PackedLayer | core.PackedLinear,
    packed: core.PackedLayer | core.PackedLinear,
    expert: int,
    projection: str,
    shards: int,
) -> bool:
    return all(
        np.array_equal(found, expected)
        for shard in range(shards)
        for found, expected in zip(pieces(mapped, expert, projection, shard), pieces(packed, 0, projection, shard), strict=True)
    )


def _bits(numbers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(numbers).view(np.uint32)
