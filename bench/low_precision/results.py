"""bench/low_precision/results.toml: what was measured, which docs/low-precision.md shows."""

from __future__ import annotations

import tomllib
from pathlib import Path

from bench import results_file

FILE = Path(__file__).with_name("results.toml")
_MEAN = {"mean": float, "standard_error": float}
_MADE = {"date": results_file.datetime.date, "commit": str}
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
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise results_file.ResultsError(f"{path}: {error}") from None
    results_file.check(data, str(path), SCHEMA)
    return data


def renew(part: str, found: dict, path: Path = FILE) -> None:
    """Put a part in the place of the file's. Numbers have six digits, so that cosines near 1 differ."""
    import tomli_w  # only whoever measures needs it

    data = _rounded((tomllib.loads(path.read_text()) if path.exists() else {}) | {part: found})
    results_file.check(data, str(path), SCHEMA)
    path.write_text(tomli_w.dumps(data))


def _rounded(value):
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
