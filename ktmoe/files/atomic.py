"""A file that is there whole, or not at all: it is written under another name beside its own, and renamed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ktmoe.errors import InputError, OutputError
from ktmoe.files.lock import open_locked

#: What the name of a file that is not whole yet ends in. It also begins with a dot.
UNFINISHED = ".part"
_FULL: dict[int, str | None] = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "files may not be so large",
}


class AtomicFile:
    """A new file. commit() gives it its name once all of it is on the disk, abort() removes it.

    path: what it will be called. Its folder must exist. overwrite: whether it may take the place of another file.
    As a context manager it commits at the end, and aborts after an exception.
    What a process that was killed has left, under the name of an unfinished file, is written over by the next one.
    Raises OutputError, which names the file: it exists, another process writes it, the disk is full.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False):
        self.path = Path(path)
        self._overwrite = overwrite
        self._unfinished = unfinished(self.path)
        self._file = open(open_locked(self._unfinished, str(self.path)), "r+b", buffering=0)  # noqa: SIM115
        try:
            self._refuse_existing()
            with _told(self.path):
                os.ftruncate(self._file.fileno(), 0)  # which goes on after a signal
        except BaseException:
            self.abort()
            raise

    def write(self, data: bytes | np.ndarray, at: int | None = None) -> None:
        """Add bytes, or a C-contiguous array's, at the end of what was written last, or at that offset."""
        view = memoryview(data).cast("B") if isinstance(data, bytes) else _bytes(data).data
        with _told(self.path):
            if at is not None:
                self._file.seek(at)
            while view:  # one call writes at most 2 GiB, and less where a signal or the end of the disk comes between
                view = view[self._file.write(view) :]

    def finish(self) -> None:
        """Wait until all of it is on the disk: the last step that a full disk can end. commit() does it, too."""
        with _told(self.path):
            os.fsync(self._file.fileno())

    def commit(self) -> None:
        """Let the file be found under its name. Nothing can be written any more."""
        try:
            self.finish()
            with _told(self.path):
                self._refuse_existing()
                os.rename(self._unfinished, self.path)
                self._file.close()
                sync_folder(self.path.parent)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove what was written; nothing after commit()."""
        if not self._file.closed:
            with suppress(OSError):
                os.unlink(self._unfinished)  # before its lock is given back, see exclusive()
            with suppress(OSError):  # what was written is gone
                self._file.close()

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def _refuse_existing(self) -> None:
        if not self._overwrite and os.path.lexists(self.path):
            raise OutputError(f"{self.path}: expected no such file, found one")


def unfinished(path: Path) -> Path:
    """Where a file is written before it has its name."""
    return path.with_name(f".{path.name}{UNFINISHED}")


def write_json(path: str | os.PathLike[str], value: dict[str, Any], *, overwrite: bool = False) -> None:
    """A whole file of indented JSON. Raises OutputError."""
    with AtomicFile(path, overwrite=overwrite) as file:
        file.write(indented_json(value))


def indented_json(value: dict[str, Any]) -> bytes:
    """What write_json() writes."""
    return json.dumps(value, indent=2).encode() + b"\n"


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk. Raises OutputError."""
    with _told(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raise OutputError in the place of an OSError."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {_FULL.get(error.errno or 0, error.strerror)}") from error


def _bytes(array: np.ndarray) -> np.ndarray:
    """uint8 [nbytes] of the same memory, whatever the dtype is."""
    if not array.flags.c_contiguous:
        raise InputError(f"expected a C-contiguous array, found strides {array.strides}")
    return array.reshape(-1).view(np.uint8)
