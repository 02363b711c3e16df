"""The limits that dense matrices meet, on pages that no call reads. Needs ktmoe, and no other worker's file."""

from __future__ import annotations

import numpy as np

import ktmoe
from ktmoe import measuring
from ktmoe.backends.base import Found
from ktmoe.linear import Linear
from ktmoe.matrix import Matrix
from ktmoe.weights.formats import BF16

_K = 4096


class Meters:
    """nbytes: of the pages, which should be more than caches hold. Attributes: kernels: the names of the kernel tables that
    serve exact bf16 here, which are those of all formats. streams: that each thread reads at once."""

    def __init__(self, nbytes: int):
        shape = max(1, nbytes // (2 * _K)), _K
        arrays = {label: np.zeros(of, dtype) for label, (dtype, of) in BF16.arrays(*shape).items()}
        self._pages = Linear(Matrix("pages", BF16, shape, **arrays))
        self.nbytes = self._pages.nbytes
        tables = {}
        for name in ktmoe.backends.available():
            match ktmoe.backends.get(name).lookup(self._pages.spec, "bf16"):
                case Found(table=table) if table is not None:
                    tables[table.name] = table
        self.kernels = tuple(tables)
        first, *others = tables.values()
        self._read = measuring.settled(self._pages, first)
        self.streams = self._read.streams
        self._peaks = {first.name: self._read} | {table.name: measuring.LimitMeter(self._pages, table) for table in others}

    def read(self, seconds: float) -> float:
        """Bytes a second, measured for about so long, which also takes what was read before out of the caches."""
        return self._read.read(seconds)

    def peak(self, kernels: str, seconds: float) -> float:
        """FLOPs a second of one of the kernel tables."""
        return self._peaks[kernels].peak(seconds)

    def close(self) -> None:
        self._pages.close()
