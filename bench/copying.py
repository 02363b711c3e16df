"""Copies of the bytes that a benchmark moves, in the same rounds: what its speed is a share of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import ktmoe


class Copying:
    """source: uint8, copied by as many threads as ktmoe has, into memory that has been touched. A context."""

    def __init__(self, source: np.ndarray):
        threads = ktmoe.get_num_threads()
        target = np.ones_like(source)
        self._slices = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
        self._pool = ThreadPoolExecutor(threads)
        self._seconds: list[float] = []

    def __enter__(self) -> Copying:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown()

    def copy(self) -> None:
        """Once, timed."""
        start = time.perf_counter()
        list(self._pool.map(lambda arrays: np.copyto(*arrays), self._slices))
        self._seconds.append(time.perf_counter() - start)

    def shares(self, seconds: Sequence[float]) -> list[float]:
        """What moved the same bytes in these times, as a share of memcpy: of the last rounds, each with its own copy."""
        return [copied / moved for copied, moved in zip(self._seconds[-len(seconds) :], seconds, strict=True)]
