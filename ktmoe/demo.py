"""`ktmoe demo` and `make demo`: one layer, written or given, loaded, checked and measured on every backend this CPU has."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from ktmoe import backends, measure, synthetic
from ktmoe.backends.base import Missing
from ktmoe.errors import MissingTensorError, OutOfSpaceError, UnavailableError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine import threads
from ktmoe.weights.formats import MXFP4

#: name, tokens, tokens whose outputs are checked against the reference, which takes a second or two for each.
PHASES = (("decode", 1, 1), ("prefill", 256, 2))
TOP_K = 6
#: Free space that is left alone beside the written checkpoint.
SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Row:
    """One line of the table. error: the worst one against its bound; above 1 is wrong."""

    backend: str
    phase: str
    result: measure.Result
    error: float


def run(
    model: str | None = None,
    layer: int | str | None = None,
    *,
    experts: int = 32,
    hidden: int = 4096,
    intermediate: int = 2048,
    seconds: float = 2.0,
    console: Console | None = None,
) -> int:
    """Print the table for a checkpoint's layer; 0 if every checked output is within its bound, else 1.

    model: the checkpoint, or None to write a synthetic one of `experts` experts of [intermediate, hidden] to a temporary
    folder, which is removed whatever happens. layer: by default the model's first. seconds: to measure each row for.
    console: where the table goes; progress goes to stderr. Raises OutOfSpaceError, and what loading raises.
    """
    console = console or wide_console()
    with _progress() as progress, tempfile.TemporaryDirectory(prefix="ktmoe-demo-") as folder:
        if model is None:
            _write(Path(folder), experts, hidden, intermediate, progress)
        loaded = load(Path(model).expanduser() if model is not None else Path(folder), layer)
        tables = measure.backends_for(loaded)
        if not tables:
            raise UnavailableError(f"{loaded.name}: no backend of this CPU can run {_describe(loaded)}")
        rows, peaks = [], []
        for name, table in tables.items():
            with _packed(loaded, name, progress) as packed:
                rows += _rows(loaded, packed, measure.Limits(packed, table), seconds, progress)
            peaks.append(f"{rows[-1].result.peak_limit / 1e9:.3g} GFLOP/s by floats of {table.name}")
    console.print(_table(rows))
    reads = [row.result.read_limit / 1e9 for row in rows]
    notes = [
        "",
        f"{_describe(loaded)}",
        f"{threads.cpu_name()}, {threads.get_num_threads()} threads",
        "1 token is decode, more are prefill; all figures are medians over rounds, each with limits measured in it:",
        f"  of read: of the bandwidth of reading packed weights, {', '.join(f'{r:.3g}' for r in reads)} GB/s row by row",
        f"  of peak: of the multiply peak, {', '.join(peaks)}",
        "error of bound: the worst of sampled outputs against a float64 reference; 100% is the most that rounding explains",
    ]
    for name in backends.ranked():
        if name not in tables:
            found = backends.get(name).lookup(loaded)
            reason = found.reason if isinstance(found, Missing) else "its limits cannot be measured"
            notes.append(f"not measured: {name}: {reason}")
    wrong = [row for row in rows if not row.error <= 1]
    notes += [f"WRONG: {row.backend} {row.phase}: an output is off by {row.error:.3g} times its bound" for row in wrong]
    console.print("\n".join(notes), highlight=False, markup=False, soft_wrap=True)
    return 1 if wrong else 0


def wide_console() -> Console:
    """stdout, wide enough for the table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=100)


def _write(folder: Path, experts: int, hidden: int, intermediate: int, progress: Progress) -> None:
    needed = experts * 3 * MXFP4.nbytes(hidden, intermediate)
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise OutOfSpaceError(
            f"{folder.parent}: the demo's checkpoint needs {(needed + SPARE_BYTES) / 2**20:.0f} MiB of free space, found"
            f" {free / 2**20:.0f} MiB; ask for fewer experts, or set TMPDIR to a folder that has more"
        )
    with _task(progress, "write a synthetic checkpoint", needed) as advance:
        synthetic.write_deepseek_v4(
            folder, num_experts=experts, hidden=hidden, intermediate=intermediate, top_k=TOP_K, progress=advance
        )


def load(path: Path, layer: int | str | None) -> ExpertWeights:
    checkpoint = Checkpoint(path)  # the experts keep it open: the reference reads them again
    loader = find_loader(checkpoint)
    if layer is None:
        layer = next(iter(loader.layers(checkpoint)), None)
        if layer is None:
            raise MissingTensorError(f"{path}: expected a layer with routed experts, found none")
    return loader.load(checkpoint, layer)


@contextmanager
def _packed(experts: ExpertWeights, backend: str, progress: Progress) -> Iterator[MoELayer]:
    with _task(progress, f"load for {backend}", experts.nbytes) as advance:
        layer = MoELayer(experts, backend, progress=advance)
    with layer:
        yield layer


def _rows(experts: ExpertWeights, layer: MoELayer, limits: measure.Limits, seconds: float, progress: Progress) -> Iterator[Row]:
    for phase, tokens, checked in PHASES:
        batches = measure.random_batches(tokens, TOP_K, experts.num_experts, experts.hidden)
        with _task(progress, f"measure {layer.backend} {phase}", None) as advance:
            result = measure.run(layer, limits, batches, seconds=seconds, progress=lambda share: advance(share, 1.0))
        with _task(progress, f"check {layer.backend} {phase}", None):
            error = measure.check(experts, layer, next(batches), tokens=checked).error
        yield Row(_label(layer), phase, result, error)


def _label(layer: MoELayer) -> str:
    """The backend, and its activation mode where that is not exact."""
    return layer.backend if layer.activations == "bf16" else f"{layer.backend} {layer.activations}"


def _describe(experts: ExpertWeights) -> str:
    formats = sorted({experts.formats[projection].description for projection in PROJECTIONS})
    shape = f"{experts.num_experts} experts of {experts.hidden} x {experts.intermediate}"
    return f"{experts.name}: {shape}, {', '.join(formats)}, {experts.nbytes / 1e9:.2f} GB, top-{TOP_K}"


def _table(rows: list[Row]) -> Table:
    """At most 80 columns wide."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("\nbackend", no_wrap=True)
    heads = ("\ntokens", "\nms", "\ntokens/s", "\nGB/s", "of\nread", "\nGFLOP/s", "of\npeak", "error\nof bound")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        r = row.result
        table.add_row(
            row.backend,
            str(r.tokens),
            _number(r.seconds * 1e3),
            _number(r.tokens / r.seconds),
            f"{r.bytes_rate / 1e9:.2f}",
            _share(r.read_share),
            _number(r.flops_rate / 1e9),
            _share(r.peak_share),
            f"{100 * row.error:.2g}%" if row.error <= 1 else "[red]WRONG[/red]",
        )
    return table


def _number(value: float) -> str:
    """Four digits or more, no exponent."""
    return f"{value:.{max(0, 3 - math.floor(math.log10(value)))}f}"


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


@contextmanager
def _progress() -> Iterator[Progress]:
    """Bars on stderr that vanish when all is done; nothing where stderr is no terminal."""
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress


@contextmanager
def _task(progress: Progress, description: str, total: float | None):
    """Yields a callback (done, total). total None: not known yet, the bar moves back and forth."""
    task = progress.add_task(description, total=total)

    def advance(done: float, total: float) -> None:
        progress.update(task, completed=done, total=total)

    yield advance
    progress.remove_task(task)
