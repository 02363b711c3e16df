"""What a packed cache says of the checkpoint's files, so that it serves no other ones: sizes, times, digests of headers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ktmoe.errors import CacheError, CheckpointError, MissingTensorError
from ktmoe.loaders.checkpoint import INDEX_NAME, MISTRAL_INDEX_NAME, Checkpoint
from ktmoe.loaders.tensor_file import open_regular

#: Files that say what tensors mean, or which file has them. All of their bytes are compared, and not the time.
_MEANING = ("config.json", "params.json", "quantize_config.json", INDEX_NAME, MISTRAL_INDEX_NAME)
_AT_ONCE = 1 << 20  # bytes that are read at a time: a manifest may ask for the digest of a whole file


@dataclass(frozen=True)
class SourceFile:
    """One of the checkpoint's files.

    nbytes: its size. mtime_ns: when its contents were last changed; None if all of them are in the digest.
    digest: SHA-256, in hexadecimal, of its first `digested` bytes: a header.
    """

    name: str
    nbytes: int
    mtime_ns: int | None
    digested: int
    digest: str


def folder_of(path: str | os.PathLike) -> Path:
    """Where a checkpoint's files are; it may be one of them."""
    path = Path(path)
    return path if path.is_dir() else path.parent


def files_of(checkpoint: Checkpoint) -> list[SourceFile]:
    """All files of a checkpoint that are there, as they are now. Raises CheckpointError."""
    headers: dict[Path, int] = {}
    for name in checkpoint.names():
        try:
            info = checkpoint.info(name)
        except MissingTensorError:  # its file is not there
            continue
        headers[info.file] = min(info.offset, headers.get(info.file, info.offset))
    found = [_look(file.parent, file.name, digested, True) for file, digested in sorted(headers.items())]
    folder = folder_of(checkpoint.path)
    meaning = [folder / name for name in _MEANING if (folder / name).exists()]
    return found + [_look(folder, file.name, file.stat().st_size, False) for file in meaning]


def check(folder: Path, files: Iterable[SourceFile], whose: str) -> None:
    """Raise CacheError, which names the file, if one is not as it was, or says what tensors mean and was not there.

    whose: what to call the cache.
    """
    files = list(files)
    if added := next((name for name in _MEANING if (folder / name).exists() and name not in {f.name for f in files}), None):
        raise CacheError(
            f"{whose}: is of another checkpoint: {folder / added}: expected none, found one; `ktmoe pack` makes another one"
        )
    for known in files:
        try:
            found = _look(folder, known.name, known.digested, known.mtime_ns is not None)
        except CheckpointError as error:
            raise CacheError(f"{whose}: is of another checkpoint: {error}") from None
        for what, was, now in (
            ("bytes", known.nbytes, found.nbytes),
            ("last change (ns)", known.mtime_ns, found.mtime_ns),
            ("SHA-256 of the header", known.digest, found.digest),
        ):
            if was != now:
                raise CacheError(
                    f"{whose}: is of another checkpoint: {folder / known.name}: {what}: expected {was}, found {now}; "
                    "`ktmoe pack` makes another one"
                )


def _look(folder: Path, name: str, digested: int, timed: bool) -> SourceFile:
    path = folder / name
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path)[0], "rb") as file:
        try:
            status, left = os.fstat(file.fileno()), digested
            while data := file.read(min(left, _AT_ONCE)):
                digest.update(data)
                left -= len(data)
        except OSError as error:
            raise CheckpointError(f"{path}: expected a readable file, found {error.strerror}") from error
    return SourceFile(name, status.st_size, status.st_mtime_ns if timed else None, digested, digest.hexdigest())
