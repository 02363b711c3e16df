"""What `ktmoe accuracy` found, as tables and for JSON."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ktmoe.cli import measurements, units
from ktmoe.loaders.naming import listed
from ktmoe.messages import printable

if TYPE_CHECKING:
    from ktmoe.transformers.accuracy import Accuracy, Run
    from ktmoe.transformers.perplexity import Mean

#: Modes beside bf16 in a table of 80 columns; others get a table of their own.
_BESIDE = 2

_LAYER = re.compile(r"\blayers\.(\d+)\.")

_DEFINITIONS = (
    "perplexity: exp of the mean negative log-likelihood of the scored tokens",
    "ln ratio: ln(perplexity / perplexity of {exact}), the log-likelihood that a token loses",
    "KL: mean divergence of the next token's distribution from that of {exact}",
    "same top: how often the likeliest token is that of {exact}",
    "±: standard error over windows",
)
_LAYER_DEFINITIONS = (
    "layers: ||y - y of {exact}|| / ||y of {exact}|| over {sampled} of the text, and the largest of a token;",
    "  each layer gets what enters it with {exact}",
    "layers, {column}: the same beside float64 for {checked}; of bound: above 100% is wrong",
)


def show(found: Accuracy, models: list[str]) -> None:
    """Print tables of 80 columns, each with the exact run and up to two others, and what they mean. models: lines that name
    them, where there are two."""
    console = measurements.console()
    scored = int(found.runs[0].scores.tokens.sum())
    cut = f"{units.count(len(found.windows), 'window')} of {found.context}, a new one every {found.context // 2}"
    for runs in _beside(found):
        console.print(_table(found, runs))
    column = found.runs[0].mode.label
    exact = "the original" if found.runs[0].mode.model else column
    lines = [*map(printable, models), f"text: {units.count(found.tokens, 'token')}, {scored} of them scored; {cut}"]
    for run in found.runs:
        lines.append(f"{run.mode.label}: backend {', '.join(run.backends)}; loaded in {run.load_seconds:.1f} s")
    if len(found.runs) == 1:
        lines.append("nothing to compare: no other mode was asked for, or the backend has none for these weights")
    lines += [line.format(exact=exact) for line in _DEFINITIONS]
    if found.layers:
        for runs in _beside(found):
            console.print(_layer_table(found, runs))
        sampled = units.count(len(found.layers[0].sample.x), "token")
        checked = units.count(found.layers[0].checked, "token")
        lines += [line.format(exact=exact, column=column, sampled=sampled, checked=checked) for line in _LAYER_DEFINITIONS]
        lines += _weights(found)
        lines += [
            f"WRONG: {layer.name}: an output of {exact} is off by {layer.of_bound:.3g} times its bound"
            for layer in found.layers
            if layer.of_bound > 1
        ]
    measurements.print_text(console, lines)


def _beside(found: Accuracy) -> list[list[Run]]:
    """The runs of each table: the exact one, and _BESIDE others."""
    others = found.runs[1:]
    return [[found.runs[0], *others[at : at + _BESIDE]] for at in range(0, max(1, len(others)), _BESIDE)]


def _table(found: Accuracy, runs: list[Run]) -> Table:
    """A row for each quantity, a column for each mode."""
    rows: dict[str, list[str]] = {name: [] for name in ("perplexity", "ln ratio", "KL", "same top, %", "seconds")}
    for run in runs:
        scores = run.scores
        compared = ["-"] * 3
        if scores.kl is not None:
            means = found.lost(run), scores.mean(scores.kl), scores.mean(100 * scores.same_top)
            compared = [_mean(mean) for mean in means]
        cells = [_mean(scores.perplexity), *compared, f"{run.seconds:.1f}"]
        for row, cell in zip(rows.values(), cells, strict=True):
            row.append(cell)
    drawn = Table(box=SIMPLE_HEAD)
    drawn.add_column("model" if found.runs[0].mode.model else "activations")
    for run in runs:
        drawn.add_column(run.mode.label, justify="right")
    for name, cells in rows.items():
        drawn.add_row(name, *cells)
    return drawn


def _layer_table(found: Accuracy, runs: list[Run]) -> Table:
    drawn = Table(box=SIMPLE_HEAD)
    drawn.add_column("layer")
    for run in runs:
        drawn.add_column(run.mode.label, justify="right")
        drawn.add_column("of bound" if run is runs[0] else "largest", justify="right")
    for number, layer in enumerate(found.layers):
        cells = [f"{layer.relative:.1e}", units.percent(layer.of_bound)]
        for run in runs[1:]:
            cells += [f"{run.layers[number].relative:.1e}", f"{run.layers[number].largest:.1e}"]
        drawn.add_row(str(_layer(layer.name)), *cells)
    return drawn


def _layer(module: str) -> int | str:
    """A layer's number, or its module's name if that has none."""
    found = _LAYER.search(module)
    return int(found[1]) if found else module


def _weights(found: Accuracy) -> list[str]:
    """Lines of text: the formats, and what those of the original were rounded to."""
    layers: dict[str, list[int | str]] = {}
    for number, layer in enumerate(found.layers):
        rounded = f", rounded: {found.runs[1].formats[number]}" if found.runs[0].mode.model else ""
        layers.setdefault(layer.formats + rounded, []).append(_layer(layer.name))
    return [f"{listed(having)}: {formats}" for formats, having in layers.items()]


def _mean(mean: Mean) -> str:
    """The mean with as many decimals as its standard error has for two digits."""
    if not math.isfinite(mean.value) or not mean.error > 0:
        return f"{mean.value:.4g}"
    digits = max(0, 1 - math.floor(math.log10(mean.error)))
    return f"{mean.value:.{digits}f} ± {mean.error:.{digits}f}"


def data(found: Accuracy) -> dict:
    """What was found, for JSON."""
    return {
        "tokens": found.tokens,
        "scored_tokens": int(found.runs[0].scores.tokens.sum()),
        "windows": len(found.windows),
        "context": found.context,
        "stride": found.context // 2,
        "runs": [_run_data(found, run) for run in found.runs],
        "layers": [_layer_data(found, number) for number in range(len(found.layers))],
    }


def _run_data(found: Accuracy, run: Run) -> dict:
    scores = run.scores
    compared = scores.kl is not None
    return {
        "model": run.mode.model or None,
        "activations": run.mode.activations,
        "rounding": run.mode.rounding,
        "dense": run.mode.dense,
        "backends": run.backends,
        "perplexity": _mean_data(scores.perplexity),
        "ln_ratio": _mean_data(found.lost(run)) if compared else None,
        "kl": _mean_data(scores.mean(scores.kl)) if compared else None,
        "same_top": _mean_data(scores.mean(scores.same_top)) if compared else None,
        "load_seconds": run.load_seconds,
        "seconds": run.seconds,
    }


def _mean_data(mean: Mean) -> dict:
    return {"mean": mean.value, "standard_error": mean.error}


def _layer_data(found: Accuracy, number: int) -> dict:
    layer = found.layers[number]
    return {
        "name": layer.name,
        "formats": layer.formats,
        "sampled_tokens": len(layer.sample.x),
        "checked_tokens": layer.checked,
        "exact": {"relative_error": layer.relative, "error_of_bound": layer.of_bound},
        "runs": [
            {
                "model": run.mode.model or None,
                "formats": run.formats[number],
                "activations": run.mode.activations,
                "rounding": run.mode.rounding,
                "dense": run.mode.dense,
                "relative_error": run.layers[number].relative,
                "largest_relative_error": run.layers[number].largest,
            }
            for run in found.runs[1:]
        ],
    }
