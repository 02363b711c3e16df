"""bench/low_precision/results.toml: what was measured, which docs/low-precision.md shows."""

from __future__ import annotations

import datetime
from pathlib import Path

from bench import results_file

FILE = Path(__file__).with_name("results.toml")
_MEAN = {"mean": float, "standard_error": float}
_MADE = {"date": datetime.date, "commit": str}
SCHEMA = {
    "layer": {
        **_MADE,
        "model": str,
        "experts": int,
        "tokens": int,
        "error": [{"activations": str, "data": str, "relative": float, "cosine": float}],
    },
    "text?": {
        **_MADE,
        "python": str,
        "tokens": int,
        "run": [
            {
                "activations": str,
                "perplexity": _MEAN,
                "ratio?": _MEAN,
                "kl?": _MEAN,
                "same_top?": _MEAN,
                "least_error?": float,
                "most_error?": float,
            }
        ],
    },
}


def read(path: Path = FILE) -> dict:
    """Raises results_file.ResultsError, which names file and field."""
    return results_file.read_as(path, SCHEMA)


def renew(section: str, found: dict, path: Path = FILE) -> None:
    """Put a section in the place of the file's. Numbers have six digits, so that cosines near 1 differ."""
    data = (read(path) if path.exists() else {}) | {section: found}
    results_file.write_as(data, path, SCHEMA, lambda value: float(f"{value:.6g}"))
