"""What a packed cache says of the checkpoint's files, so that it serves no other ones: names, sizes, times, digests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ktmoe.errors import CacheError, CheckpointError, MissingTensorError
from ktmoe.loaders import unchanged
from ktmoe.loaders.checkpoint import INDEX_NAME, MISTRAL_INDEX_NAME, Checkpoint
from ktmoe.loaders.tensor_file import fill, open_regular
from ktmoe.messages import show

#: Files that say what tensors mean, or which file has them. All of their bytes are compared, and not the time.
_MEANING = ("config.json", "params.json", "quantize_config.json", INDEX_NAME, MISTRAL_INDEX_NAME)
_AT_ONCE = 1 << 20  # bytes that are read at a time: a manifest may ask for the digest of a whole file
#: The bytes of a sample of what follows a header; samples are in the digest, one in so many bytes, and at least and at most so
#: many a file.
_SAMPLE, _SAMPLE_APART, _SAMPLES_LEAST, _SAMPLES_MOST = 4096, 1 << 26, 16, 1024


@dataclass(frozen=True)
class SourceFile:
    """One of the checkpoint's files.

    nbytes: its size. mtime_ns: when its contents were last changed; None if all of them are in the digest.
    digest: SHA-256, in hexadecimal, of its first `digested` bytes, a header, and of samples of the others.
    """

    name: str
    nbytes: int
    mtime_ns: int | None
    digested: int
    digest: str


def files_of(checkpoint: Checkpoint) -> tuple[SourceFile, ...]:
    """All files of a checkpoint that are there, as they are now. Raises CheckpointError."""
    headers: dict[str, int] = {}
    for name in checkpoint.names():
        try:
            info = checkpoint.info(name)
        except MissingTensorError:  # its file is not there
            continue
        headers[info.file.name] = min(info.offset, headers.get(info.file.name, info.offset))
    return _look(checkpoint, headers)


def check(checkpoint: Checkpoint, known: Sequence[SourceFile], whose: str) -> None:
    """Raise CacheError, which names the file, unless an open checkpoint has these files, and they are as they were.

    whose: what to call the cache.
    """
    try:
        wrong = difference(known, _look(checkpoint, {file.name: file.digested for file in known}), checkpoint.folder)
    except CheckpointError as error:
        wrong = str(error)
    if wrong:
        raise CacheError(f"{whose}: is of another checkpoint: {wrong}; `ktmoe pack` makes another one")


def difference(known: Sequence[SourceFile], found: Sequence[SourceFile], folder: Path) -> str | None:
    """What is not as it was, for messages; None if all is."""
    known_by, found_by = ({file.name: file for file in files} for files in (known, found))
    if known_by.keys() != found_by.keys():
        gone, more = known_by.keys() - found_by.keys(), found_by.keys() - known_by.keys()
        return f"{folder}: expected {_listed(gone) or 'no other file'}, found {_listed(more) or 'none of that name'}"
    for name, was in known_by.items():
        now = found_by[name]
        for what, expected, there in (
            ("bytes", was.nbytes, now.nbytes),
            ("last change (ns)", was.mtime_ns, now.mtime_ns),
            ("bytes of the header", was.digested, now.digested),
            ("SHA-256 of the header and of samples", was.digest, now.digest),
        ):
            if expected != there:
                return f"{folder / name}: {what}: expected {expected}, found {there}"
    return None


def _listed(names: set[str]) -> str:
    return ", ".join(map(show, sorted(names)[:3])) + ", ..." * (len(names) > 3)


def _look(checkpoint: Checkpoint, headers: dict[str, int]) -> tuple[SourceFile, ...]:
    """The checkpoint's files that are there. headers: how long each one's is, by name; a file without one is digested whole."""
    weights = [file for file in checkpoint.files if _is_there(file)]
    meaning = [file for name in _MEANING if _is_there(file := checkpoint.folder / name)]
    found = [_look_at(file, headers.get(file.name), True) for file in weights]
    return (*found, *(_look_at(file, None, False) for file in meaning))


def _is_there(file: Path) -> bool:
    try:
        return file.exists()
    except OSError as error:  # which does not say
        raise CheckpointError(f"{file}: expected a readable file, found {error.strerror}") from error


def _look_at(path: Path, digested: int | None, timed: bool) -> SourceFile:
    descriptor, status = open_regular(path)
    nbytes = status.nbytes
    try:
        of_all, digested = hashlib.sha256(), nbytes if digested is None else digested
        samples = list(_samples(digested, nbytes))
        with suppress(OSError, AttributeError):  # a hint; without it, a disk would be asked for one after another
            for start, count in samples:
                os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_WILLNEED)
        for start, count in (*_pieces(0, min(digested, nbytes)), *samples):
            data = bytearray(count)
            of_all.update(memoryview(data)[: fill(descriptor, data, start, str(path))])
        unchanged.check(path, status, unchanged.look(path, descriptor))
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, found {error.strerror}") from error
    finally:
        os.close(descriptor)
    return SourceFile(path.name, nbytes, status.changed if timed else None, digested, of_all.hexdigest())


def _samples(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(start, bytes) of places that are spread over [start, stop), the first and the last among them; all of it if it is
    short."""
    wanted = min(max(_SAMPLES_LEAST, (stop - start) // _SAMPLE_APART), _SAMPLES_MOST)
    if stop - start <= wanted * _SAMPLE:
        return _pieces(start, stop)
    step = (stop - start - _SAMPLE) / (wanted - 1)
    return ((start + int(i * step), _SAMPLE) for i in range(wanted))


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((at, min(_AT_ONCE, stop - at)) for at in range(start, stop, _AT_ONCE))
