"""Reading files with plain preads, what loading is compared with.

python -m bench.reading FOLDER THREADS reuse|keep prints the seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

PIECE_BYTES = 1 << 22
_LIBC = ctypes.CDLL(None, use_errno=True)


def files(folder: Path) -> list[Path]:
    """The files with the weights."""
    return sorted((*folder.glob("*.safetensors"), *folder.glob("*.gguf")))


def total_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's files."""
    return sum(file.stat().st_size for file in files(folder))


def forget(folder: Path) -> None:
    """Take them out of the page cache."""
    os.sync()  # what is not on the disk yet stays
    for file in files(folder):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached_share(folder: Path) -> float:
    """The share of the files' pages that are in the page cache."""
    pages = there = 0
    for file in files(folder):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            known = np.empty(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
            view = np.frombuffer(mapped, np.uint8)
            if _LIBC.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped)), known.ctypes.data_as(ctypes.c_void_p)
            ):
                raise OSError(ctypes.get_errno(), f"{file}: mincore failed")
            del view  # else the file stays mapped
            pages, there = pages + len(known), there + int(np.count_nonzero(known & 1))
    return there / pages


def touch(nbytes: int) -> None:
    """Use so much memory and give it back: a virtual machine's host may have taken it, and bringing it back costs more than all
    that is measured here."""
    _new(nbytes).fill(1)


def read(folder: Path, threads: int, *, keep: bool = False) -> float:
    """Seconds that so many threads take to read all of them, each into one buffer, or all into new memory that is kept.

    keep: what whoever wants the weights in memory has to do at least, since the system has to find and clear that memory.
    """
    descriptors = {file: os.open(file, os.O_RDONLY) for file in files(folder)}
    pieces, at = [], 0
    for file, fd in descriptors.items():
        for offset in range(0, file.stat().st_size, PIECE_BYTES):
            pieces.append((fd, offset, at + offset))
        at += -(-file.stat().st_size // PIECE_BYTES) * PIECE_BYTES
    todo, lock = iter(pieces), threading.Lock()
    start = time.perf_counter()
    memory = _new(at if keep else threads * PIECE_BYTES)

    def work(thread: int) -> None:
        while True:
            with lock:
                fd, offset, place = next(todo, (None, 0, 0))
            if fd is None:
                return
            place = place if keep else thread * PIECE_BYTES
            os.preadv(fd, [memory[place : place + PIECE_BYTES]], offset)

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
        return time.perf_counter() - start
    finally:
        for fd in descriptors.values():
            os.close(fd)


def _new(nbytes: int) -> np.ndarray:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def fastest(folder: Path, threads: Iterable[int] = (1, 2, 4, 8)) -> int:
    """How many threads read them fastest, from the disk."""

    def seconds(count: int) -> float:
        forget(folder)
        return read(folder, count)

    return min(threads, key=seconds)


if __name__ == "__main__":
    print(read(Path(sys.argv[1]), int(sys.argv[2]), keep=sys.argv[3] == "keep"))
