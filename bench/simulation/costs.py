"""A cost file: what one thread takes for items, and what a machine's memory gives, as measure.py finds them on a machine."""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench import results_file
from ktmoe._native import core

FOLDER = Path(__file__).with_name("costs")
SCHEMA = {
    "machine": str,
    "date": results_file.datetime.date,
    "commit": str,
    "threads": int,
    "read_gb_s": {str: float},
    "before_us": float,
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
            "cache_ns": [float],
        }
    ],
}


@dataclass(frozen=True)
class Kernel:
    """What one thread takes with a kernel.

    memory_ns, cache_ns: nanoseconds for each packed byte of a panel that is multiplied with so many `rows`, with the weights
    from memory, which nobody else reads, and from the core's cache. peak_gflop_s: multiplies from registers.
    """

    weights: str
    backend: str
    isa: str
    activations: str
    peak_gflop_s: float = 0.0
    rows: list[int] = field(default_factory=list)
    memory_ns: list[float] = field(default_factory=list)
    cache_ns: list[float] = field(default_factory=list)

    def seconds(self, rows: int, nbytes: int) -> float:
        """Of one thread alone, for a strip of so many rows and panels of so many bytes from memory."""
        return 1e-9 * nbytes * sum(self._at(self.memory_ns, call) for call in core.call_rows(rows))

    def _at(self, ns: list[float], rows: int) -> float:
        """Between the measured numbers of rows in proportion."""
        above = min(max(1, bisect_right(self.rows, rows)), len(self.rows) - 1)
        low, high = self.rows[above - 1], self.rows[above]
        return ns[above - 1] + (ns[above] - ns[above - 1]) * (rows - low) / (high - low)


@dataclass(frozen=True)
class Costs:
    """A machine's. read_gb_s: by the number of threads, of all of them together. before_us: of a call before the workers are
    woken and after they ended, beside the routing of its slots: Python, checks. route_ns: of routing a slot and making lists.
    handoff_us: one thread sees what another one wrote, which shares its L3.
    """

    machine: str
    date: object
    commit: str
    threads: int
    read_gb_s: dict[str, float]
    before_us: float
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

    @property
    def core_read(self) -> float:
        """Bytes per second that one thread reads."""
        return self.read_gb_s["1"] * 1e9


def read(path: Path) -> Costs:
    """Raises results_file.ResultsError, which names file and field."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise results_file.ResultsError(f"{path}: {error}") from None
    results_file.check(data, str(path), SCHEMA)
    kernels = [Kernel(**kernel) for kernel in data.pop("kernel")]
    for kernel in kernels:
        if not len(kernel.rows) == len(kernel.memory_ns) == len(kernel.cache_ns) > 1:
            raise results_file.ResultsError(f"{path}: {kernel.weights}: expected a cost for each of two numbers of rows or more")
    return Costs(**data, kernel=kernels)


def write(costs: Costs, path: Path) -> None:
    """Numbers with four digits."""
    import tomli_w  # only whoever measures needs it

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(_rounded(asdict(costs))))


def _rounded(value):
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
