"""Counts of the experts that modules are called with, while somebody wants them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from ktmoe import forks

#: The attribute of a module in which its counters are, by whoever counts.
_COUNTERS = "ktmoe_counters"


def count(module: torch.nn.Module, ids: torch.Tensor) -> None:
    """Tell whoever counts a module's experts which ones it is called with. ids: [tokens, top_k]; those outside are left out."""
    # not by torch's hooks, which cannot be added safely while another thread calls the module
    for counted, row in list(module.__dict__.get(_COUNTERS, {}).items()):
        counted.add(row, ids.cpu().numpy())


@contextmanager
def counting(rows: Mapping[torch.nn.Module, int]) -> Iterator[np.ndarray]:
    """int64 [modules, experts], which grow while these modules are called in the context. rows: {a module: its experts}."""
    counted = _Counted(len(rows), max(rows.values()))
    for row, module in enumerate(rows):
        module.__dict__.setdefault(_COUNTERS, {})[counted] = row
    try:
        yield counted.counts
    finally:
        for module in rows:
            del module.__dict__[_COUNTERS][counted]


class _Counted:
    def __init__(self, modules: int, experts: int):
        self.counts = np.zeros((modules, experts), np.int64)
        self.after_fork()
        forks.watch(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def add(self, row: int, ids: np.ndarray) -> None:
        size = self.counts.shape[1]
        new = np.bincount(ids[(ids >= 0) & (ids < size)], minlength=size)
        with self._lock:
            self.counts[row] += new
