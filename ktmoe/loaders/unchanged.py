"""Whether a file is still what it was when its header was read: its size, when it was last changed and, by its name, its inode.

Whoever reads looks before and after. Of a write in between, the system changes the time before the bytes, so no new byte is
taken for an old one. Three kinds of writes cannot be told: one within the tick of the file system's clock in which the file was
changed before (up to 10 ms; less since Linux 6.13, where the time that somebody has looked at is not given again), one whose
writer sets the time back, and one through a shared mapping or on another machine, of which the time may be told late.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ktmoe.errors import CheckpointError


class FileStatus(NamedTuple):
    """nbytes: a file's size. changed: when its contents were, in ns (mtime; ctime is also that of a new name). inode: its."""

    nbytes: int
    changed: int
    inode: int


#: What messages call the fields of FileStatus.
_LABELS = ("size", "time of change", "inode")


def of(found: os.stat_result) -> FileStatus:
    """What the system says of a file."""
    return FileStatus(found.st_size, found.st_mtime_ns, found.st_ino)


def look(path: Path, descriptor: int | None = None) -> FileStatus:
    """What there is of that name now; or how the open file is, whatever has its name. Raises CheckpointError."""
    try:
        return of(os.stat(path) if descriptor is None else os.fstat(descriptor))
    except OSError as error:
        raise CheckpointError(f"{path}: expected the file that was read, found {error.strerror}") from error


def check(path: Path, was: FileStatus, now: FileStatus) -> None:
    """Raise CheckpointError, which names the file, if it has changed."""
    for label, before, after in zip(_LABELS, was, now, strict=True):
        if before != after:
            raise CheckpointError(f"{path}: changed while it was read: {label}: expected {before}, found {after}")
