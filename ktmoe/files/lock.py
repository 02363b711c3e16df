"""One process at a time writes into a folder, or a file."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ktmoe.errors import OutputError

#: The name of the file in a folder that is locked; it is removed when the lock is given back.
LOCK_NAME = ".ktmoe.lock"


@contextmanager
def exclusive(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other processes that ask for the same folder out, as long as this one lives.

    The system gives the lock back when a process dies, however it does. Raises OutputError if another process has it, or if it
    cannot be taken.
    """
    path = Path(folder) / LOCK_NAME
    descriptor = open_locked(path, str(folder))
    try:
        yield
    finally:
        with suppress(OSError):  # the folder may be gone
            os.unlink(path)  # before the lock is given back: whoever waits for this file finds that it is not there any more
        with suppress(OSError):  # nothing was written
            os.close(descriptor)


def open_locked(path: Path, what: str) -> int:
    """The descriptor of a file, which is made if need be, that no other process has locked; its content stays.

    what: how messages call what is locked. Raises OutputError.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OutputError(f"{path}: expected a file that can be written, found {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(path, descriptor):
                return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise OutputError(f"{what}: another process is writing it") from error
            raise OutputError(f"{path}: cannot be locked: {error.strerror}") from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # whoever had it has renamed or removed it since


def _is(path: Path, descriptor: int) -> bool:
    """Whether a path still leads to that open file."""
    try:
        found, mine = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)
