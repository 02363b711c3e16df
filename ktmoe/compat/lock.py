"""A lock that finalizers need not wait for: the garbage collector runs them in any thread, whatever locks that has."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ktmoe import forks


class FinalizerLock:
    """A reentrant lock, by with. soon(): what finalizers do under it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._left: deque[Callable[[], object]] = deque()
        forks.watch(self)

    def after_fork(self) -> None:
        if self._lock.acquire(blocking=False):  # nobody's, or this thread's, which goes on
            self._lock.release()
        else:
            self._lock = threading.RLock()
            self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_error: object) -> None:
        self._depth -= 1
        self._lock.release()
        self._settle()

    def soon(self, task: Callable[[], object]) -> None:
        """Run a task under the lock: now if nobody has it, not even this thread, else as soon as it is given back."""
        self._left.append(task)
        self._settle()

    def _settle(self) -> None:
        while self._left and self._lock.acquire(blocking=False):
            if self._depth:  # it is this thread's own, in the middle of something
                self._lock.release()
                return
            self._depth = 1
            try:
                if self._left:
                    self._left.popleft()()
            finally:
                self._depth = 0
                self._lock.release()
