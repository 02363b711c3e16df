"""The files of bench/simulation/results: what was simulated with a machine's costs, and how it agreed with measured calls."""

from __future__ import annotations

import tomllib
from pathlib import Path

from bench import results_file

FOLDER = Path(__file__).with_name("results")
SHARES = ("efficiency", "dispatch", "idle", "before", "dealing", "gates", "end")
SIMULATED = {
    "date": results_file.datetime.date,
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
    "date": results_file.datetime.date,
    "commit": str,
    "machine": str,
    "rounds": int,
    "call": [{"model": str, "threads": int, "tokens": int, "experts": int, "measured_ms": float, "simulated_ms": float}],
}


def read(path: Path, schema: dict) -> dict:
    """Raises results_file.ResultsError, which names file and field."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise results_file.ResultsError(f"{path}: {error}") from None
    results_file.check(data, str(path), schema)
    return data


def read_all(ending: str, schema: dict, folder: Path = FOLDER) -> list[dict]:
    """Those whose names end so, by name."""
    return [read(path, schema) for path in sorted(folder.glob(f"*{ending}.toml"))]


def write(data: dict, path: Path, schema: dict) -> None:
    """Numbers with four digits."""
    import tomli_w  # only whoever measures or simulates needs it

    data = _rounded(data)
    results_file.check(data, str(path), schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(data))


def _rounded(value):
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return max(0.0, float(f"{value:.4g}")) if isinstance(value, float) else value
