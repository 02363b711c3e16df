"""Gate and up of an expert, where one read gives both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from ktmoe import forks
from ktmoe.matrix import Matrix


class GateUpReader:
    """Gate and up, read together: who asks for one of an expert's leaves the other for whoever asks for that.

    read: expert -> both by projection. At most `kept` experts wait for their second half; the oldest is dropped, and would be
    read again. Threads that ask for both halves at once share one read, and its exception.
    """

    def __init__(self, read: Callable[[int], dict[str, Matrix]], kept: int = 4):
        self._read = read
        self._kept = kept
        self.after_fork()
        forks.watch(self)

    def after_fork(self) -> None:
        """What another thread was reading is read again."""
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, str], Future[Matrix]] = {}

    def take(self, expert: int, projection: str) -> Matrix:
        other = "up" if projection == "gate" else "gate"
        with self._lock:
            left = self._waiting.pop((expert, projection), None)
            if left is None:
                mine = self._waiting[expert, other] = Future()
                while len(self._waiting) > self._kept:
                    del self._waiting[next(iter(self._waiting))]
        if left is not None:
            return left.result()
        try:
            pair = self._read(expert)
        except BaseException as error:
            with self._lock:
                if self._waiting.get((expert, other)) is mine:
                    del self._waiting[expert, other]  # the next one tries again
            mine.set_exception(error)
            raise
        mine.set_result(pair[other])
        return pair[projection]
