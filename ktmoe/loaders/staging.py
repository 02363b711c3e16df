"""Staging: memory to read tensors into, used again and again, since the system clears new memory before it gives it."""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress

import numpy as np

from ktmoe import forks

_HUGE_BYTES = 1 << 21


class Staging:
    """Gives arrays, and takes their memory back when nobody has them any more, for the next ones of the same size.

    It never holds more than was in use at one time, and nothing once none of its arrays is in use.
    used, held: bytes of the arrays that are in use, and with those that are free.
    """

    def __init__(self) -> None:
        self.after_fork()
        self._free: list[mmap.mmap] = []  # the oldest first
        self.used = self.held = 0
        self._most = 0  # bytes that were in use at one time
        forks.watch(self)

    def after_fork(self) -> None:
        self._lock = threading.RLock()  # the collector may return an array where another one is being made

    def take(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], at the beginning of a page, with any content. Raises MemoryError."""
        size = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        with self._lock:
            self.used += size
            most = max(self._most, self.used)
            try:
                memory = self._found(size) or self._new(size, most)
            except BaseException:
                self.used -= size
                raise
            self._most = most
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._give_back, memory).atexit = False  # views of the array hold it
        return array[:nbytes]

    def _found(self, size: int) -> mmap.mmap | None:
        memory = next((memory for memory in self._free if len(memory) == size), None)
        if memory is not None:
            self._free.remove(memory)
        return memory

    def _new(self, size: int, most: int) -> mmap.mmap:
        """Memory that is not there yet, in place of what is free where both together would be more than `most` bytes."""
        while self._free and self.held + size > most:
            self.held -= len(self._free.pop(0))
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{size} bytes: {error.strerror}") from error
        if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # pages of 4 KiB serve
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.held += size
        return memory

    def _give_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._free.append(memory)
            self.used -= len(memory)
            if not self.used:
                self._free.clear()
                self.held = self._most = 0
