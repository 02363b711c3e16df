"""`ktmoe accuracy`: what activation modes change, in the perplexity of a text and in each layer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ktmoe import progress_bar
from ktmoe.backends.choice import choose_backend
from ktmoe.cli import engine, measuring, options, output, units
from ktmoe.errors import InputError
from ktmoe.messages import printable

if TYPE_CHECKING:
    from ktmoe.transformers.accuracy import Accuracy, Run
    from ktmoe.transformers.perplexity import Mean

HELP = """What activation modes change.

DIR is a checkpoint with its tokenizer, FILE a text in UTF-8. The text's perplexity with each activation mode stands beside
the exact one, "bf16". So do the divergence of the next token's distribution from the exact one, and the error that each mode
adds in each layer. The modes run one after the other. It needs torch and transformers.
"""

_DEFINITIONS = (
    "perplexity: exp of the mean negative log-likelihood of the scored tokens; lower is better",
    "ln ratio: ln(perplexity / exact perplexity), the log-likelihood that a token loses",
    "KL: mean divergence of the next token's distribution from the exact one",
    "same top: how often the likeliest token is the exact run's",
    "±: standard error over windows",
)
_LAYER_DEFINITIONS = (
    "layers: ||y - y of bf16|| / ||y of bf16|| over {sampled} of the text, and the largest of one token;",
    "  each layer gets what enters it in the exact run",
    "layers, bf16: the same beside the float64 reference for {checked}; of bound: more than 100% is wrong",
)


@click.command("accuracy", help=HELP)
@options.MODEL
@click.option("--text", "file", metavar="FILE", required=True, type=click.Path(), help="The text, UTF-8.")
@options.BACKEND
@click.option("--activations", metavar="M,M", help="The modes; by default all that the backend has for these weights.")
@click.option(
    "--rounding",
    type=click.Choice(["exact", "folded"]),
    default="exact",
    help="folded: also bf16 with weights that may be rounded to bfloat16.",
)
@click.option("--tokens", metavar="N", type=click.IntRange(2), help="The text's first N; by default all.")
@click.option(
    "--context",
    metavar="N",
    type=click.IntRange(2),
    default=512,
    show_default=True,
    help="Tokens of a window; a new one every N/2.",
)
@click.option("--layers/--no-layers", default=True, help="The errors of each layer, too. On by default.")
@options.JSON
def command(
    model: str,
    file: str,
    backend: str,
    activations: str | None,
    rounding: str,
    tokens: int | None,
    context: int,
    layers: bool,
    as_json: bool,
) -> int:
    text = _read(Path(file).expanduser())
    modes = None if activations is None else activations.split(",")
    for mode in modes or ["auto"]:
        choose_backend(backend, None, mode)  # raises, before anything is loaded
    engine.start()
    from ktmoe.transformers.accuracy import accuracy

    with progress_bar.steps() as step:
        found = accuracy(
            model,
            text,
            backend=backend,
            activations=modes,
            rounding=rounding,
            tokens=tokens,
            context=context,
            layers=layers,
            step=step,
        )
    if as_json:
        output.print_json({"path": printable(model), "text": printable(file), **_data(found)})
    else:
        _print(found)
    return 1 if any(layer.of_bound > 1 for layer in found.layers) else 0


def _read(file: Path) -> str:
    """Raises InputError if the file is empty or not UTF-8, OSError if it cannot be read."""
    data = file.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: expected text in UTF-8, found byte {data[error.start]:#04x} at {error.start}") from None
    if not text.strip():
        raise InputError(f"{file}: expected a text, found {'white space alone' if text else 'an empty file'}")
    return text


def _print(found: Accuracy) -> None:
    console = measuring.console()
    scored = int(found.runs[0].scores.tokens.sum())
    cut = f"{units.count(len(found.windows), 'window')} of {found.context}, a new one every {found.context // 2}"
    console.print(_table(found))
    lines = [f"text: {units.count(found.tokens, 'token')}, {scored} of them scored; {cut}"]
    for run in found.runs:
        lines.append(f"{run.mode.label}: backend {', '.join(run.backends)}; loaded in {run.load_seconds:.1f} s")
    if len(found.runs) == 1:
        lines.append("the backend has no other activation mode for these weights")
    lines += _DEFINITIONS
    if found.layers:
        console.print(_layer_table(found))
        sampled = units.count(len(found.layers[0].sample.x), "token")
        checked = units.count(found.layers[0].checked, "token")
        lines += [line.format(sampled=sampled, checked=checked) for line in _LAYER_DEFINITIONS]
        lines += [
            f"WRONG: {layer.name}: an output of bf16 is off by {layer.of_bound:.3g} times its bound"
            for layer in found.layers
            if layer.of_bound > 1
        ]
    measuring.print_text(console, lines)


def _table(found: Accuracy) -> Table:
    drawn = Table(box=SIMPLE_HEAD)
    drawn.add_column("activations")
    for heading in ("perplexity", "ln ratio", "KL", "same top", "seconds"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for run in found.runs:
        scores = run.scores
        compared = ["-", "-", "-"]
        if scores.kl is not None:
            same = _mean(scores.mean(100 * scores.same_top))
            compared = [_mean(found.lost(run)), _mean(scores.mean(scores.kl)), f"{same} %"]
        drawn.add_row(run.mode.label, _mean(scores.perplexity), *compared, f"{run.seconds:.1f}")
    return drawn


def _layer_table(found: Accuracy) -> Table:
    drawn = Table(box=SIMPLE_HEAD)
    drawn.add_column("layer", no_wrap=True)
    drawn.add_column("weights")
    for run in found.runs:
        drawn.add_column(run.mode.label, justify="right")
        drawn.add_column("of bound" if run is found.runs[0] else "largest", justify="right")
    for number, layer in enumerate(found.layers):
        cells = [f"{layer.relative:.1e}", units.percent(layer.of_bound)]
        for run in found.runs[1:]:
            cells += [f"{run.layers[number].relative:.1e}", f"{run.layers[number].largest:.1e}"]
        drawn.add_row(layer.name, layer.formats, *cells)
    return drawn


def _mean(mean: Mean) -> str:
    """With as many decimals as its standard error has for two digits."""
    if not math.isfinite(mean.value) or not mean.error > 0:
        return f"{mean.value:.4g}"
    digits = max(0, 1 - math.floor(math.log10(mean.error)))
    return f"{mean.value:.{digits}f} ± {mean.error:.{digits}f}"


def _data(found: Accuracy) -> dict:
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
        "activations": run.mode.activations,
        "rounding": run.mode.rounding,
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
                "activations": run.mode.activations,
                "rounding": run.mode.rounding,
                "relative_error": run.layers[number].relative,
                "largest_relative_error": run.layers[number].largest,
            }
            for run in found.runs[1:]
        ],
    }
