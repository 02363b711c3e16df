"""What all wrappers of a process share: one worker that runs tasks in order, buffers, and where forward passes stand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from ktmoe import forks
from ktmoe.background.worker import Worker
from ktmoe.compat.buffers import Pool
from ktmoe.compat.captures import Captures
from ktmoe.compat.deferral import Passes
from ktmoe.compat.lock import FinalizerLock


class Engine:
    """lock: held from taking what a layer is due until its tasks are queued, so that tasks run in the order of the passes."""

    def __init__(self) -> None:
        self.lock = FinalizerLock()
        self.passes = Passes()
        self.captures = Captures(self.lock)
        self.pool = Pool()
        self._worker = Worker("ktmoe-kt-kernel")
        forks.watch(self)

    def submit(self, task: Callable, *arguments) -> Future:
        """Queue a task. Nothing starts before the first one."""
        with self.lock:
            return self._worker.submit(task, *arguments)

    def sync(self) -> None:
        """Wait until everything that was queued is done; whose result it is gets what it raised."""
        self.submit(lambda: None).result()

    def leave(self, model, layer: int) -> None:
        """Forget a layer whose weights are gone. The caller holds the lock."""
        self.passes.leave(model, layer)
        if model not in self.passes.layers:
            self.captures.forget(model)

    def after_fork(self) -> None:
        self.passes.abandon()
        self.captures.after_fork()
        self.pool = Pool(self.pool.captured)


ENGINE = Engine()


class CpuInfer:
    """What callers find as cpu_infer on every wrapper: the queue of all layers, for those who wait until it is empty."""

    def sync(self, allow_n_pending: int = 0) -> None:
        """Wait until the queue is empty. allow_n_pending: so many tasks need not be waited for; here all are."""
        ENGINE.sync()


CPU_INFER = CpuInfer()
