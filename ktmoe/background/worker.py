"""Worker: one thread that runs jobs in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ktmoe import forks
from ktmoe.errors import thread_for
from ktmoe.machine import numa


class Worker:
    """Runs jobs one after another on a thread of that name, which starts with the first. A forked child starts its own."""

    def __init__(self, name: str):
        self._name = name
        self._executor: ThreadPoolExecutor | None
        self.after_fork()
        forks.watch(self)

    def submit(self, job: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Queue a job. Raises UnavailableError if the thread cannot be started; the job is dropped then."""
        with self._lock:
            executor = self._executor or ThreadPoolExecutor(1, self._name, numa.unpin)
            try:
                with thread_for(f"starting thread {self._name}"):
                    future = executor.submit(job, *arguments)
            except BaseException:
                if self._executor is None:
                    executor.shutdown(wait=False, cancel_futures=True)  # the job was queued all the same
                raise
            self._executor = executor
            return future

    def after_fork(self) -> None:
        """The thread and what it was about to do are the parent's."""
        self._lock = threading.Lock()
        self._executor = None


#: The thread of submit(), whatever it is of: jobs run in the order of submission.
jobs = Worker("ktmoe-submit")
