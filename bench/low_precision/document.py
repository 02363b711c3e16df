"""The tables of docs/low-precision.md, from results.toml."""

from __future__ import annotations

import math

from bench import document
from bench.low_precision import results
from bench.low_precision.layer import DATA

PAGE = document.DOCS / "low-precision.md"
PICTURE = document.DOCS / "img" / "low-precision.png"
Row = tuple[str, ...]


def write() -> None:
    PAGE.write_text(filled(PAGE.read_text()))


def filled(text: str) -> str:
    """The text with all tables in it. Raises ValueError where it lacks a mark."""
    data = results.read()
    for name, make in TABLES.items():
        text = document.replaced(text, name, document.markdown(*make(data)))
    return text


def modes(data: dict) -> tuple[Row, list[Row]]:
    return _errors(data, [mode for mode in _modes(data) if ":" not in mode])


def text(data: dict) -> tuple[Row, list[Row]]:
    rows = []
    for run in data.get("text", {}).get("run", ()):
        cells = [f"{run['perplexity']['mean']:.4g}"]
        cells += [_mean(run[name]) if name in run else "-" for name in ("ratio", "kl")]
        cells.append(f"{100 * run['same_top']['mean']:.1f} %" if "same_top" in run else "-")
        ends = dict.fromkeys(_percent(run[name]) for name in ("least_error", "most_error") if name in run)
        layers = " to ".join(ends) or "-"
        rows.append((f"`{run['activations']}`", *cells, layers))
    return ("mode", "perplexity", "beside bf16", "KL", "same top", "errors of the layers"), rows


def _modes(data: dict) -> list[str]:
    return list(dict.fromkeys(error["activations"] for error in data["layer"]["error"]))


def _errors(data: dict, modes: list[str]) -> tuple[Row, list[Row]]:
    found = {(error["activations"], error["data"]): error for error in data["layer"]["error"]}
    rows = []
    for mode in modes:
        of_mode = [found[mode, name] for name in DATA]
        rows.append((f"`{mode}`", *(f"{_percent(error['relative'])}, {error['cosine']:.5f}" for error in of_mode)))
    return ("mode", *DATA), rows


def _percent(share: float) -> str:
    return f"{float(f'{100 * share:.2g}'):g} %"


def _mean(mean: dict) -> str:
    """The mean with as many decimals as its standard error has for two digits."""
    digits = max(0, 1 - math.floor(math.log10(mean["standard_error"])))
    return f"{mean['mean']:.{digits}f} ± {mean['standard_error']:.{digits}f}"


TABLES = {"modes": modes, "text": text}
