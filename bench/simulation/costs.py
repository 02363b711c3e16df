"""A cost file: what one thread takes for items, and what a machine's memory gives, as measure.py finds them on a machine."""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from bench import results_file
from bench.simulation import files
from ktmoe._native import core

FOLDER = Path(__file__).with_name("machines")
SCHEMA = {
    "machine": str,
    "date": datetime.date,
    "commit": str,
    "threads": int,
    "read_gb_s": {str: float},
    "before": [{"read_mb": float, "us": float}],
    "route_ns": float,
    "handoff_us": float,
    "kernel": [
        {
            "weights": str,
            "backend": str,
            "isa": str,
            "activations": str,
            "peak_gflop_s": float,
            "rows": [int],
            "memory_ns": [float],
        }
    ],
}


@dataclass(frozen=True)
class Kernel:
    """What one thread takes with a kernel.

    memory_ns: nanoseconds for each packed byte of a panel that is multiplied with so many `rows`, with the weights from memory,
    which nobody else reads. peak_gflop_s: multiplies from registers.
    """

    weights: str
    backend: str
    isa: str
    activations: str
    peak_gflop_s: float = 0.0
    rows: list[int] = field(default_factory=list)
    memory_ns: list[float] = field(default_factory=list)

    def seconds(self, rows: int, nbytes: int) -> float:
        """The seconds of one thread alone, for a strip of so many rows and panels of so many bytes from memory.

        They are in proportion between the measured numbers of rows.
        """
        return 1e-9 * nbytes * float(np.interp(core.call_rows(rows), self.rows, self.memory_ns).sum())


@dataclass(frozen=True)
class Costs:
    """A machine's. read_gb_s: by the number of threads, of all of them together.

    before: what a call costs beside its items and slots (Python, checks, memory), by how much the caller's core has read since
    the last call, which took what Python needs out of the caches. route_ns: of routing a slot and making lists. handoff_us: one
    thread sees what another one wrote that shares its L3.
    """

    machine: str
    date: object
    commit: str
    threads: int
    read_gb_s: dict[str, float]
    before: list[dict[str, float]]
    route_ns: float
    handoff_us: float
    kernel: list[Kernel] = field(default_factory=list)

    def of(self, weights: str) -> Kernel:
        """Raises ValueError, which names them, for weights that were not measured."""
        for kernel in self.kernel:
            if kernel.weights == weights:
                return kernel
        known = ", ".join(kernel.weights for kernel in self.kernel)
        raise ValueError(f"{self.machine}: no costs of {weights} were measured; known are {known}")

    def before_seconds(self, nbytes: float) -> float:
        """nbytes: that the caller reads in a call. Between the measured ones in proportion."""
        points = [(point["read_mb"] * 1e6, point["us"] * 1e-6) for point in self.before]
        return float(np.interp(nbytes, *zip(*points, strict=True)))

    @property
    def core_read(self) -> float:
        """Bytes per second that one thread reads."""
        return self.read_gb_s["1"] * 1e9


def paths() -> list[Path]:
    """All files, by name."""
    return sorted(FOLDER.glob("*.toml"))


def read(path: Path) -> Costs:
    """Raises results_file.ResultsError, which names file and field."""
    data = results_file.read_as(path, SCHEMA)
    kernels = [Kernel(**kernel) for kernel in data.pop("kernel")]
    for kernel in kernels:
        if not len(kernel.rows) == len(kernel.memory_ns) > 1:
            raise results_file.ResultsError(
                f"{path}: {kernel.weights}: expected a cost for each of two numbers of rows or more"
            )
    return Costs(**data, kernel=kernels)


def write(costs: Costs, path: Path) -> None:
    files.write(asdict(costs), path, SCHEMA)
