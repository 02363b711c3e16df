"""The clock: workers that compute and read beside each other, and gates at which they wait.

A worker is a generator. It yields Work and goes on when that is done, or a Gate and goes on once that is open.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bench.simulation import memory

#: The least of a piece of work that is still to be done: less is an error of rounding.
_DONE = 1e-9


class Work(NamedTuple):
    """seconds: while nobody else reads. nbytes: read from the memory of `node`.

    item: whether it is an item, and not what goes with dealing, waking and waiting.
    """

    seconds: float
    nbytes: float = 0.0
    node: int = 0
    item: bool = True


@dataclass
class Gate:
    """Shut until `left` was passed. seconds: until a waiting worker sees it open."""

    left: int
    seconds: float = 0.0
    waiting: list[int] = field(default_factory=list)


Worker = Generator[Work | Gate, None, None]


@dataclass
class Run:
    """What happened. busy, overhead, waited: seconds of each worker with items, with dealing and waking, and at gates.

    nbytes: read from each node.
    """

    seconds: float
    busy: np.ndarray
    overhead: np.ndarray
    waited: np.ndarray
    nbytes: np.ndarray

    @property
    def ended(self) -> np.ndarray:
        """Seconds of each worker from its end to that of the last one."""
        return self.seconds - self.busy - self.overhead - self.waited


class Clock:
    """One run of some workers. bandwidth: of each node."""

    def __init__(self, workers: int, nodes: int, bandwidth: float, sharpness: float):
        self.now = 0.0
        self._bandwidth, self._sharpness = bandwidth, sharpness
        self._alone, self._nbytes = np.zeros(workers), np.zeros(workers)
        self._left, self._speed = np.full(workers, np.inf), np.zeros(workers)
        self._node = np.full(workers, -1)  # whose memory it reads
        self._item = np.zeros(workers, bool)
        self._since = np.zeros(workers)
        self._stale: set[int] = set()  # nodes whose readers have changed
        self._blocked = 0  # workers at gates
        self.run = Run(0.0, *np.zeros((3, workers)), np.zeros(nodes))

    def go(self, workers: list[Worker]) -> Run:
        """Run the workers until all have ended. Raises RuntimeError where some wait for ever."""
        self._workers = workers
        for worker in range(len(workers)):
            self._advance(worker)
        while np.isfinite(self._left).any():
            for node in self._stale:
                self._share(node)
            self._stale.clear()
            with np.errstate(divide="ignore", invalid="ignore"):
                ahead = self._left / self._speed
            step = ahead.min()
            self.now += step
            running = np.isfinite(self._left)
            self._left[running] -= self._speed[running] * step
            for worker in np.flatnonzero(self._left <= _DONE):
                self._finish(worker)
                self._advance(worker)
        if self._blocked:
            raise RuntimeError("workers wait at a gate that nobody passes")
        self.run.seconds = self.now
        return self.run

    def pass_gate(self, gate: Gate, count: int = 1) -> None:
        """Whoever waits goes on when the last has passed."""
        gate.left -= count
        if gate.left < 0:
            raise RuntimeError("a gate was passed more often than it was shut for")
        if not gate.left:
            for worker in gate.waiting:
                self.run.waited[worker] += self.now - self._since[worker]
                self._start(worker, Work(gate.seconds, item=False))
            self._blocked -= len(gate.waiting)
            gate.waiting.clear()

    def _advance(self, worker: int) -> None:
        """Move a worker to its next piece of work, or to a gate that is shut, or to its end."""
        for found in self._workers[worker]:
            if isinstance(found, Gate):
                if found.left:
                    found.waiting.append(worker)
                    self._blocked += 1
                    self._since[worker] = self.now
                    return
            elif found.seconds > 0:
                self._start(worker, found)
                return

    def _start(self, worker: int, work: Work) -> None:
        self._alone[worker], self._nbytes[worker] = work.seconds, work.nbytes
        self._left[worker], self._speed[worker] = (1.0, 1 / work.seconds) if work.seconds else (0.0, 1.0)
        self._item[worker], self._since[worker] = work.item, self.now
        if work.nbytes:
            self._node[worker] = work.node
            self.run.nbytes[work.node] += work.nbytes
            self._stale.add(work.node)

    def _finish(self, worker: int) -> None:
        times = self.run.busy if self._item[worker] else self.run.overhead
        times[worker] += self.now - self._since[worker]
        self._left[worker] = np.inf
        if self._node[worker] >= 0:
            self._stale.add(int(self._node[worker]))
            self._node[worker] = -1

    def _share(self, node: int) -> None:
        readers = np.flatnonzero(self._node == node)
        if len(readers):
            alone, nbytes = self._alone[readers], self._nbytes[readers]
            self._speed[readers] = 1 / memory.seconds(alone, nbytes, self._bandwidth, self._sharpness)
