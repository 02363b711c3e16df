"""One file of a packed cache: a layer's arenas or a dense matrix's, and what else is to be known of these weights.

A safetensors file whose tensors are, in this order:

    padding                   U8 [bytes]: so that arenas begin at huge pages
    shard.0, shard.1 ...      U8 [bytes]: each shard's arena as it lies in memory, in whole huge pages
    gate.bias, up.bias ...    F32 [experts, n], of those projections that have one
    gate.factor ...           F32 [experts, n] or [experts, 1], likewise
    seen                      U8 [experts, projections, 3]: of the scales of each matrix the least and the greatest exponent,
                              and whether any is negative; kernels are chosen by it

A dense matrix is one expert whose only projection is "weight". The __metadata__ states what a file is packed from
(manifest.stated()).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from ktmoe._native import core
from ktmoe.backends.base import Arenas
from ktmoe.cache.manifest import PackedFile
from ktmoe.errors import CacheError, CheckpointError, FormatError
from ktmoe.files.safetensors_writer import SafetensorsWriter
from ktmoe.loaders.safetensors_file import SafetensorsFile
from ktmoe.messages import show
from ktmoe.weight_spec import WeightSpec

#: Tensors by name: (dtype, shape).
Tensors = dict[str, tuple[str, tuple[int, ...]]]
#: Panels of a matrix that are copied at a time: at 8,192 inputs of bfloat16, 64 MiB.
PANELS_AT_ONCE = 64


def tensors_of(weights: WeightSpec, shards: Sequence[tuple[int, int]], biases: Iterable[str]) -> Tensors:
    """What the file of these weights has. shards: columns of h, or rows, of each. biases: projections that have one."""
    tensors: Tensors = {"padding": ("U8", (core.HUGE_PAGE_BYTES - core.PAGE_BYTES,))}  # the header is a page
    for i, columns in enumerate(shards):
        arena = weights.num_experts * core.expert_nbytes(weights, [columns])
        tensors[f"shard.{i}"] = "U8", (-(-arena // core.HUGE_PAGE_BYTES) * core.HUGE_PAGE_BYTES,)
    for projection in biases:
        tensors[f"{projection}.bias"] = "F32", (weights.num_experts, weights.shape(projection)[0])
    for projection in weights.projections:
        if factor := weights.formats[projection].factor:
            tensors[f"{projection}.factor"] = "F32", (weights.num_experts, *factor.shape(weights.shape(projection)[0]))
    tensors["seen"] = "U8", (weights.num_experts, len(weights.projections), 3)
    return tensors


class PackedFileWriter:
    """Writes a file expert by expert; a dense matrix is one.

    first: a PackedLayer of one expert, the first, or a PackedLinear, which says whether there are biases.
    stated: what the file states.
    Raises OutputError, as SafetensorsWriter does.
    """

    def __init__(
        self,
        path: Path,
        weights: WeightSpec,
        shards: Sequence[tuple[int, int]],
        first: core.PackedLayer | core.PackedLinear,
        stated: Mapping[str, str],
    ):
        self._weights, self._shards = weights, shards
        self._biases = list(core.numbers(first)[0])
        self._numbers: dict[str, list[np.ndarray]] = {}
        tensors = [(name, *what) for name, what in tensors_of(weights, shards, self._biases).items()]
        # overwrite: what no manifest names is left over, and what is not of these weights is replaced
        self._file = SafetensorsWriter(path, tensors, stated, align=core.PAGE_BYTES, overwrite=True)
        try:
            self._file.write(np.zeros(tensors[0][2], np.uint8))
        except BaseException:
            self.abort()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self._file.nbytes

    def add(self, one: core.PackedLayer | core.PackedLinear) -> None:
        """Add the next expert, alone in a layer of these shards, or the matrix.

        Raises FormatError where only some experts have a bias.
        """
        for shard in range(len(self._shards)):
            for projection in self._weights.projections:
                for piece in pieces(one, 0, projection, shard):
                    self._file.write(piece, f"shard.{shard}")
        biases, factors = core.numbers(one)
        if list(biases) != self._biases:
            raise FormatError(
                f"{self._weights.name}: a packed cache has biases of all experts or of none, found "
                f"{', '.join(biases) or 'none'} after {', '.join(self._biases) or 'none'}"
            )
        arrays = {f"{projection}.bias": array for projection, array in biases.items()}
        arrays |= {f"{projection}.factor": array for projection, array in factors.items()}
        for name, array in (arrays | {"seen": core.seen(one)}).items():
            self._numbers.setdefault(name, []).append(array)

    def finish(self) -> None:
        """Write what follows the arenas; commit() is still to come."""
        for i, columns in enumerate(self._shards):
            arena = self._weights.num_experts * core.expert_nbytes(self._weights, [columns])
            self._file.write(np.zeros(-arena % core.HUGE_PAGE_BYTES, np.uint8), f"shard.{i}")
        for name, arrays in self._numbers.items():
            self._file.write(np.ascontiguousarray(np.concatenate(arrays)), name)

    def commit(self) -> None:
        """Let the file be found under its name, once it is on the disk.

        The page cache then forgets it: what was written lies there in small pages, what is read comes in huge ones.
        """
        self._file.commit()
        with suppress(OSError):  # a hint: the file is there, whatever becomes of it
            descriptor = os.open(self._file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def abort(self) -> None:
        """Remove what was written; nothing after commit()."""
        self._file.abort()


def pieces(packed: core.PackedLayer | core.PackedLinear, expert: int, projection: str, shard: int) -> Iterator[np.ndarray]:
    """What a shard has of one matrix, packed, a few panels at a time: a dense one may have gigabytes."""
    first = 0
    while (piece := packed.packed_bytes(expert, projection, shard, first, PANELS_AT_ONCE)).size:
        yield piece
        first += len(piece)


def open_packed(folder: Path, entry: PackedFile, weights: WeightSpec, stated: Mapping[str, str]) -> Arenas:
    """The arenas of a file, and what belongs to them; the arenas are not read.

    entry: what the manifest says of it. stated: what the file has to state.
    Raises CacheError, which names the file, if it is not what it should be.
    """
    path = folder / entry.file
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # nonblocking: a FIFO must not hang
    except OSError as error:
        raise CacheError(f"{path}: expected a readable file, found {error.strerror}") from error
    try:
        found = os.fstat(descriptor).st_size
        if found != entry.nbytes:
            fault = "truncated" if found < entry.nbytes else "grown"
            raise CacheError(f"{path}: {fault}: expected {entry.nbytes} bytes, found {found}")
        try:
            file = SafetensorsFile(path)
        except CheckpointError as error:
            raise CacheError(str(error)) from None
        try:
            _check_stated(path, file.metadata, stated)
            biases = [projection for projection in weights.projections if f"{projection}.bias" in file.tensors]
            _check_tensors(path, file, tensors_of(weights, entry.shards, biases))
            offsets = [file.tensors[f"shard.{i}"].offset for i in range(len(entry.shards))]
            numbers = {name: _read(file, name) for name in file.tensors if name != "padding" and not name.startswith("shard.")}
            arenas = core.ArenaFile(str(path), descriptor, offsets)
            if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
                raise CacheError(f"{path}: expected one file, found another one in its place")
            file.check()  # from here on, the arenas see what changes
        except CheckpointError as error:
            raise CacheError(str(error)) from None
        finally:
            file.close()
    except OSError as error:
        raise CacheError(f"{path}: expected a readable file, found {error.strerror}") from error
    finally:
        os.close(descriptor)
    names = weights.projections
    of = {end: {p: numbers[f"{p}.{end}"] for p in names if f"{p}.{end}" in numbers} for end in ("bias", "factor")}
    return Arenas(arenas, numbers["seen"], of["bias"], of["factor"])


def _check_stated(path: Path, metadata: Mapping[str, str], stated: Mapping[str, str]) -> None:
    for what, expected in stated.items():
        if metadata.get(what) != expected:
            raise CacheError(
                f"{path}: is packed from something else: {what}: expected {show(expected)}, found {show(metadata.get(what))}; "
                "`ktmoe pack` writes it again"
            )


def _check_tensors(path: Path, file: SafetensorsFile, expected: Tensors) -> None:
    found = {name: (info.dtype, info.shape) for name, info in file.tensors.items()}
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name):
            raise CacheError(
                f"{path}: tensor {show(name)}: expected {expected.get(name, 'none')}, found {show(found.get(name, 'none'))}"
            )


def _read(file: SafetensorsFile, name: str) -> np.ndarray:
    info = file.tensors[name]
    array = np.empty(info.shape, np.uint8 if info.dtype == "U8" else np.float32)
    try:
        file.read_into(array.reshape(-1).view(np.uint8), info)
    except CheckpointError as error:
        raise CacheError(str(error)) from None
    return array
