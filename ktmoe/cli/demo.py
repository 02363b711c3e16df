"""`ktmoe demo` and `make demo`: one layer, written or given, loaded, checked and measured on every backend this CPU has."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from ktmoe import backends, measuring, progress_bar, synthetic
from ktmoe.backends.base import Missing
from ktmoe.cli import measurements, options, units
from ktmoe.cli.measurements import TOP_K, Row
from ktmoe.cli.signals import signals_as_exit
from ktmoe.errors import OutOfSpaceError, UnavailableError
from ktmoe.experts import ExpertWeights
from ktmoe.weights.formats import MXFP4

#: work, tokens, tokens whose outputs are checked against the reference, which takes a second or two for each.
PHASES = (("decode", 1, 1), ("prefill", 256, 2))
#: Free space that is left alone beside the written checkpoint.
SPARE_BYTES = 64 << 20

HELP = """One layer on every backend of this CPU.

It is loaded, measured for decode and prefill, and checked against a float64 reference.
"""


@click.command("demo", help=HELP)
@click.option(
    "--model",
    metavar="DIR",
    type=options.PathType(),
    help="A checkpoint; by default a synthetic one, written and removed again.",
)
@options.LAYER
@click.option(
    "--experts", metavar="N", type=click.IntRange(1), default=32, show_default=True, help="Of the synthetic checkpoint."
)
@options.TOP_K
@options.SECONDS
def command(model: str | None, layer: int | str | None, experts: int, top_k: int | None, seconds: float) -> int:
    with signals_as_exit():
        return run(model, layer, top_k, experts=experts, seconds=seconds)


def run(
    model: str | None = None,
    layer: int | str | None = None,
    top_k: int | None = None,
    *,
    experts: int = 32,
    hidden: int = 4096,
    intermediate: int = 2048,
    seconds: float = 2.0,
    console: Console | None = None,
) -> int:
    """Print the table for a checkpoint's layer; 0 if every checked output is within its bound, else 1.

    model: the checkpoint, or None to write a synthetic one of `experts` experts of [intermediate, hidden] to a temporary
    folder, which is removed whatever happens. layer: by default the model's first. top_k: experts of a token, by default what
    config.json says. seconds: to measure each row for.
    console: where the table goes; progress goes to stderr. Raises OutOfSpaceError, and what loading raises.
    """
    console = console or measurements.console()
    with progress_bar.steps() as step, tempfile.TemporaryDirectory(prefix="ktmoe-demo-") as folder:
        if model is None:
            _write(Path(folder), experts, hidden, intermediate, step)
        path = Path(model).expanduser() if model is not None else Path(folder)
        _, loaded, top_k = measurements.open_layer(path, layer, top_k)
        tables = measuring.backends_for(loaded)
        if not tables:
            raise UnavailableError(f"{loaded.name}: no backend of this CPU can run {measurements.describe(loaded, top_k)}")
        rows = []
        for name, table in tables.items():
            with measurements.packed(loaded, name, step) as packed:
                with step(f"measure limits for {name}"):
                    limits = measuring.settled(packed, table)
                subject = measurements.Subject(loaded, packed, table.name, limits, top_k, step)
                rows += [subject.row(work, tokens, seconds, checked) for work, tokens, checked in PHASES]
    console.print(measurements.table(rows))
    measurements.print_text(console, _notes(loaded, top_k, rows, set(tables)))
    return 0 if all(row.right for row in rows) else 1


def _notes(experts: ExpertWeights, top_k: int, rows: list[Row], measured: set[str]) -> list[str]:
    notes = [
        "",
        measurements.describe(experts, top_k),
        *measurements.notes(rows),
    ]
    for name in backends.ranked():
        if name not in measured:
            found = backends.get(name).lookup(experts)
            reason = found.reason if isinstance(found, Missing) else "its limits cannot be measured"
            notes.append(f"not measured: {name}: {reason}")
    return notes + [row.wrong_words for row in rows if not row.right]


def _write(folder: Path, experts: int, hidden: int, intermediate: int, step: Callable) -> None:
    needed = experts * 3 * MXFP4.nbytes(hidden, intermediate)
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise OutOfSpaceError(
            f"{folder.parent}: the demo's checkpoint needs {units.gb(needed + SPARE_BYTES)} of free space, found"
            f" {units.gb(free)}; ask for fewer experts, or set TMPDIR to a folder that has more"
        )
    with step("write a synthetic checkpoint", needed) as draw:
        synthetic.write_deepseek_v4(
            folder, num_experts=experts, hidden=hidden, intermediate=intermediate, top_k=TOP_K, progress=draw
        )
