"""What all wrappers of a process share: one worker that runs tasks in order, buffers, and where forward passes stand."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ktmoe.compat.buffers import Pool
from ktmoe.compat.deferral import Passes


class Engine:
    """order: held from taking what a layer is due until its tasks are queued, so that tasks run in the order of the passes."""

    def __init__(self):
        self.order = threading.RLock()
        self.passes = Passes()
        self.pool = Pool()
        self._worker: ThreadPoolExecutor | None = None
        self._forks = False

    def submit(self, task: Callable, *arguments) -> Future:
        """Queue a task. Nothing starts before the first one."""
        with self.order:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "ktmoe-kt-kernel")
                if not self._forks:
                    self._forks = True
                    os.register_at_fork(after_in_child=self._forget)
            return self._worker.submit(task, *arguments)

    def _forget(self) -> None:
        """In a forked child: the worker and what it was about to do are the parent's."""
        self.order = threading.RLock()
        self.passes.abandon()
        self.pool = Pool(self.pool.captured)
        self._worker = None


ENGINE = Engine()
