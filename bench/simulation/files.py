"""The files of bench/simulation/results: what was simulated with a machine's costs, and how it agreed with measured calls.

What was simulated is not in git: `make simulation` writes it again.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from bench import results_file

FOLDER = Path(__file__).with_name("results")
SHARES = ("efficiency", "dispatch", "idle", "before", "dealing", "gates", "end")
SIMULATED = {
    "date": datetime.date,
    "commit": str,
    "machine": str,
    "bandwidth_gb_s": float,
    "jitter": float,
    "point": [
        {
            "model": str,
            "tokens": int,
            "nodes": int,
            "threads": int,
            "ms": float,
            **dict.fromkeys(SHARES, float),
            "read": float,
        }
    ],
}
CHECKED = {
    "date": datetime.date,
    "commit": str,
    "machine": str,
    "rounds": int,
    "call": [{"model": str, "threads": int, "tokens": int, "experts": int, "measured_ms": float, "simulated_ms": float}],
}


def simulated(costs: Path) -> Path:
    """Where the points with the costs of that file are."""
    return FOLDER / f"{costs.stem}-simulated.toml"


def read_all(ending: str, schema: dict, folder: Path = FOLDER) -> list[dict]:
    """The files whose names end so, in the order of their names."""
    return [results_file.read_as(path, schema) for path in sorted(folder.glob(f"*{ending}.toml"))]


def write(data: dict, path: Path, schema: dict) -> None:
    """Numbers with four digits."""
    results_file.write_as(data, path, schema, lambda value: max(0.0, results_file.digits(value)))
