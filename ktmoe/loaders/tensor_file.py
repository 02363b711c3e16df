"""TensorFile: an open file of tensors whose header has been checked; what it does with their bytes, whatever the header is.

Bytes are read with pread and never mapped, so a file that shrinks while it is read raises CheckpointError. After each read, one
fstat says whether the file is as it was before its header was read: no tensor has bytes of another state of its file.
"""

from __future__ import annotations

import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ktmoe import forks
from ktmoe.errors import CheckpointError, ClosedError, memory_for
from ktmoe.loaders import unchanged
from ktmoe.loaders.direct_io import DirectFile
from ktmoe.loaders.staging import Staging
from ktmoe.loaders.unchanged import FileStatus
from ktmoe.messages import show

#: How a file begins that stands in the place of one that git-lfs has not fetched (git-lfs, docs/spec.md).
_POINTER = b"version https://git-lfs.github.com/spec/"
_FOLIO_BYTES = 1 << 21  # the page cache's largest unit on x86-64


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says about one tensor.

    dtype: the header's name, such as "I8" or "F8_E8M0"; a GGUF file's type, such as "Q4_K". shape: in elements, also where
    several of them share bytes. file: the file that holds it. offset: of its first byte, from the start of that file.
    nbytes: its length in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class TensorFile(ABC):
    """An open file whose header has been checked; its descriptor closes when the last reader is done.

    tensors: TensorInfo by name. metadata: what its header has besides. status: the file's, before its header was read.
    Raises CheckpointError, which names the file, the tensor, the expected and the found.
    """

    metadata: Mapping[str, object]

    def __init__(self, path: Path):
        self.path = path
        self.after_fork()
        self._closing = False
        self._fd = -1
        self._direct: DirectFile | None = None
        forks.watch(self)
        self._fd, self.status = open_regular(path)
        self._direct = DirectFile(self._fd)
        try:
            self.tensors = self._read_header(self._fd, self.status.nbytes)
            self.check()
        except BaseException:
            self.close()
            raise
        # tensors are read whole, by several threads: what the kernel read ahead of one would be released before it is used
        _advise(self._fd, 0, 0, "POSIX_FADV_RANDOM")

    @abstractmethod
    def _read_header(self, fd: int, size: int) -> dict[str, TensorInfo]:
        """The tensors by name, of a file of `size` bytes that is open as `fd`. Raises CheckpointError."""

    def after_fork(self) -> None:
        """Nobody reads in the child yet."""
        self._lock = threading.Lock()
        self._readers = 0

    def read_into(self, out: np.ndarray, info: TensorInfo, *, start: int = 0, release: bool = False) -> None:
        """Fill `out`, C-contiguous uint8, with a tensor's bytes from `start` on; then release their pages if asked to.

        start + out.nbytes: at most info.nbytes. Raises CheckpointError if the file has changed since it was opened.
        """
        stop = start + out.nbytes
        with self._descriptor() as fd:
            found = fill(fd, out, info.offset + start, f"{self.path}: tensor {show(info.name)}")
            if release:
                _drop_pages(fd, info, start, stop)
            self._expect(fd, info, start, out.nbytes, found)

    def take(self, info: TensorInfo, start: int, stop: int, staging: Staging) -> np.ndarray:
        """A tensor's bytes [start, stop) in memory of `staging`, uint8, of which none stay in the page cache."""
        with self._descriptor() as fd:
            with memory_for(f"{self.path}: tensor {show(info.name)}"):
                data = self._direct.read(info.offset + start, stop - start, staging) if self._direct else None
            if data is not None:
                _drop_pages(fd, info, start, stop)  # looking whether it is there may have brought a page
                self._expect(fd, info, start, stop - start, len(data))
        if data is None:
            with memory_for(f"{self.path}: tensor {show(info.name)}"):
                data = staging.take(stop - start)
            self.read_into(data, info, start=start, release=True)
        return data

    def check(self) -> None:
        """Raise CheckpointError if the file has changed since it was opened. That its name is another's by now is no change."""
        with self._descriptor() as fd:
            unchanged.check(self.path, self.status, unchanged.look(self.path, fd))

    def release(self, info: TensorInfo, start: int, stop: int) -> None:
        """Let the kernel drop the pages of a tensor's bytes [start, stop) from its file cache; only ever a hint."""
        with self._descriptor() as fd:
            _drop_pages(fd, info, start, stop)

    def close(self) -> None:
        """Close the file as soon as no thread reads from it."""
        with self._lock:
            self._closing = True
            if not self._readers:
                self._close()

    def _expect(self, fd: int, info: TensorInfo, start: int, expected: int, found: int) -> None:
        """Raise CheckpointError unless so many bytes were found, in a file that has not changed."""
        if found < expected:
            raise CheckpointError(
                f"{self.path}: truncated: tensor {show(info.name)}: expected {expected} bytes at {info.offset + start}, "
                f"found {found}"
            )
        unchanged.check(self.path, self.status, unchanged.look(self.path, fd))

    @contextmanager
    def _descriptor(self) -> Iterator[int]:
        # counted, so that close() in another thread cannot hand this number to a different file under a read
        with self._lock:
            if self._closing:
                raise ClosedError(f"{self.path}: read after close()")
            self._readers += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._readers -= 1
                if self._closing and not self._readers:
                    self._close()

    def _close(
        self, close: Callable[[int], None] = os.close
    ) -> None:  # when the interpreter ends, os may be gone before a file
        fd, self._fd = self._fd, -1
        if self._direct is not None:
            self._direct.close()
        if fd >= 0:
            close(fd)

    def __del__(self) -> None:
        self._close()


def new_bytes(count: int, what: str) -> np.ndarray:
    """uint8 [count]. Raises OutOfMemoryError, which says what for."""
    with memory_for(what):
        return np.empty(count, np.uint8)


def open_regular(path: Path) -> tuple[int, FileStatus]:
    """Descriptor and status of a regular file; a symlink to one is normal (the Hugging Face cache is made of them)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # nonblocking: a FIFO in the file's place must not hang
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL or a lone surrogate
        found = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: expected a readable file, found {found}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: expected a regular file, found {stat.filemode(status.st_mode)}")
        _refuse_pointer(path, fd)
    except OSError as error:
        os.close(fd)
        raise CheckpointError(f"{path}: expected a readable file, found {error.strerror}") from error
    except BaseException:
        os.close(fd)
        raise
    return fd, unchanged.of(status)


def _refuse_pointer(path: Path, fd: int) -> None:
    """Raise CheckpointError for a pointer of git-lfs."""
    start = bytearray(len(_POINTER))
    if fill(fd, start, 0, str(path)) == len(start) and start == _POINTER:
        raise CheckpointError(
            f"{path}: expected the file itself, found git-lfs's pointer to it: run `git lfs pull` in its folder"
        )


def fill(fd: int, out: np.ndarray | bytearray, offset: int, what: str) -> int:
    """Fill `out` from a file's offset on; the number of bytes that were there."""
    view, done = out.data if isinstance(out, np.ndarray) else memoryview(out), 0
    if not view.nbytes:
        return 0
    view = view.cast("B")
    try:
        while done < len(view):  # one preadv returns at most 2 GiB, and less where a signal or a network comes between
            count = os.preadv(fd, [view[done:]], offset + done)
            if not count:
                break
            done += count
    except OSError as error:
        raise CheckpointError(f"{what}: expected {len(view)} bytes at offset {offset}, found {error} after {done}") from error
    return done


def _drop_pages(fd: int, info: TensorInfo, start: int, stop: int) -> None:
    if start == stop:
        return
    # the kernel keeps a folio that is covered in part: widen to the largest folio's bounds, at worst a neighbour is read again.
    # A range's last folio is left to the range behind it, which is likely to be read next and may be there already.
    first = (info.offset + start) // _FOLIO_BYTES * _FOLIO_BYTES
    end = info.offset + stop
    end += -end % _FOLIO_BYTES if stop == info.nbytes else -(end % _FOLIO_BYTES)
    if first < end:
        _advise(fd, first, end - first, "POSIX_FADV_DONTNEED")


def _advise(fd: int, offset: int, length: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a hint that some file systems refuse
            os.posix_fadvise(fd, offset, length, getattr(os, advice))
