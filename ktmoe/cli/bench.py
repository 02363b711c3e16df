"""`ktmoe bench`: what this machine allows, and how near one layer comes to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ktmoe import backends, measuring, progress_bar, synthetic
from ktmoe._native import core
from ktmoe.backends.base import Arenas
from ktmoe.backends.choice import choose_backend
from ktmoe.cache.opened import Cache
from ktmoe.cli import bench_picture, measurements, options, output, results, units
from ktmoe.cli.measurements import Row, Subject
from ktmoe.errors import OutOfMemoryError, UnavailableError
from ktmoe.experts import ExpertWeights
from ktmoe.loaders import naming
from ktmoe.machine import memory, threads
from ktmoe.machine.numa import placement_of

#: Tokens of a call.
DECODE, PREFILL = (1, 4, 16), (64, 256, 1024, 4096)
#: Seconds that a call may take, so that all are measured within a minute; longer ones are left out.
LONGEST = 3.0
#: The synthetic layer: the model whose shape it has, its bytes, and its largest share of the memory that can be had.
SYNTHETIC, SYNTHETIC_BYTES, SHARE_OF_MEMORY = "V4-Flash", 1e9, 0.4

HELP = """The machine's limits, and one layer beside them.

It takes about a minute. DIR is a checkpoint; without it the layer is synthetic, has the shape of DeepSeek-V4-Flash's,
and stays in memory. Decode has 1, 4 and 16 tokens a call, prefill more. Outputs are checked against a float64
reference. `ktmoe demo` compares all backends instead.
"""


@click.command("bench", help=HELP)
@click.argument("model", metavar="[DIR]", required=False, type=options.PathType())
@options.LAYER
@click.option(
    "--experts", metavar="N", type=click.IntRange(1), help="The layer's first N; by default all, or 1 GB if synthetic."
)
@options.BACKEND
@options.ACTIVATIONS
@options.TUNED_FOR
@options.CACHE
@options.TOP_K
@options.SECONDS
@click.option(
    "--output", "file", metavar="FILE", type=click.Path(dir_okay=False), help="Write a results file, if all is right."
)
@click.option(
    "--picture",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Draw decode beside the read bandwidth and prefill beside the multiply peak: a .png, .svg or .pdf file. It needs "
    "matplotlib, which the extra picture has.",
)
@options.JSON
def command(
    model: str | None,
    layer: int | str | None,
    experts: int | None,
    backend: str,
    activations: str,
    tuned_for: str,
    cache: str | None,
    top_k: int | None,
    seconds: float,
    file: str | None,
    picture: str | None,
    as_json: bool,
) -> int:
    if file:
        results.check_writable(Path(file))  # before a minute of measuring
    if picture:
        bench_picture.check(Path(picture))
    if cache and (model is None or experts):
        raise click.UsageError("--cache needs DIR, and excludes --experts")
    with progress_bar.steps() as step, _layer(model, layer, experts, top_k, cache) as (loaded, top_k, arenas):
        table = _table(loaded, backend, activations)
        with measurements.packed(loaded, backend, step, activations, tuned_for, arenas) as packed:
            with step("measure the machine's limits"):
                limits = measuring.settled(packed, table)
            rows, left_out = _rows(Subject(loaded, packed, table.name, limits, top_k, step), seconds)
            choices = {"rounding": packed.rounding, "tuned_for": packed.tuned_for}
    name = SYNTHETIC if model is None else Path(model).expanduser().resolve().name
    layer_data = results.layer(rows, loaded, name, choices)
    right = all(row.right for row in rows)
    if file and right:
        results.write(Path(file), results.results(rows, layer_data))
    if picture and right:
        machine = f"{threads.cpu_name()}, {units.count(threads.get_num_threads(), 'thread')}"
        bench_picture.write(Path(picture), rows, measurements.describe(loaded, top_k), machine)
    if as_json:
        output.print_json(_data(rows, layer_data, left_out, loaded, top_k))
    else:
        console = measurements.console()
        console.print(measurements.table(rows))
        lines = ["", measurements.describe(loaded, top_k), *measurements.notes(rows)]
        lines += [f"not measured: {what}" for what in left_out]
        measurements.print_text(console, lines + [row.wrong_words for row in rows if not row.right])
    return 0 if right else 1


@contextmanager
def _layer(
    model: str | None, layer: int | str | None, experts: int | None, top_k: int | None, cache: str | None
) -> Iterator[tuple[ExpertWeights, int, Arenas | None]]:
    """The experts to measure, how many of them a token has, and where they lie packed, if in a cache."""
    if model is None:
        made = synthetic.deepseek_v4_experts(num_experts=_synthetic_experts(experts))
        yield made, min(top_k or measurements.TOP_K, made.num_experts), None
        return
    path, arenas = Path(model).expanduser(), None
    checkpoint, loaded, top_k = measurements.open_layer(path, layer, top_k)
    with checkpoint:
        if experts and experts < loaded.num_experts:
            loaded = loaded.take(range(experts))
        if cache:
            name = measurements.first_layer(checkpoint) if layer is None else naming.layer_key(layer)
            arenas = Cache(cache, checkpoint).layer(name, loaded, placement_of(loaded))
        yield loaded, min(top_k, loaded.num_experts), arenas


def _synthetic_experts(asked: int | None) -> int:
    """How many experts to make: as many as asked, or as SYNTHETIC_BYTES hold. Raises OutOfMemoryError if they do not fit."""
    available, of_one = memory.available_bytes(), synthetic.deepseek_v4_experts(num_experts=1).nbytes
    if asked is None:
        nbytes = SYNTHETIC_BYTES if available is None else min(SYNTHETIC_BYTES, SHARE_OF_MEMORY * available)
        return max(measurements.TOP_K, int(nbytes // of_one))
    if available is not None and asked * of_one > available:
        needed = f"{asked} synthetic experts need {units.gb(asked * of_one)} of memory"
        raise OutOfMemoryError(f"{needed}, found {units.gb(max(0, available))}; ask for fewer with --experts")
    return asked


def _table(experts: ExpertWeights, backend: str, activations: str) -> core.KernelTable:
    chosen = choose_backend(backend, experts, activations)
    table = backends.get(chosen.name).lookup(experts, chosen.activations).table
    if table is None:
        raise UnavailableError(f"backend {chosen.name!r} ({chosen.why}) has no kernel table: its limits cannot be measured")
    return table


def _rows(subject: Subject, seconds: float) -> tuple[list[Row], list[str]]:
    """The rows, and which calls were left out, since they take too long."""
    rows = [subject.row("decode", tokens, seconds, checked=1) for tokens in DECODE]
    for i, tokens in enumerate(PREFILL):
        last = rows[-1].result
        expected = last.seconds * tokens / last.tokens if i else 0.0  # at most: more tokens share more weights
        if expected > LONGEST:
            rest = ", ".join(map(str, PREFILL[i:]))
            return rows, [f"prefill of {rest} tokens: a call of {tokens} would take up to {expected:.0f} s"]
        rows.append(subject.row("prefill", tokens, seconds, checked=1))
    return rows, []


def _data(rows: list[Row], layer: dict, left_out: list[str], experts: ExpertWeights, top_k: int) -> dict:
    calls = [
        {
            "work": row.work,
            **measurements.call(row),
            "tokens_s": row.result.tokens / row.result.seconds,
            "error_of_bound": row.check.error,
            "right": row.right,
            "disturbed": bool(row.disturbed),
        }
        for row in rows
    ]
    about = {key: value for key, value in layer.items() if key not in ("decode", "prefill")}
    sizes = {"hidden": experts.hidden, "intermediate": experts.intermediate, "top_k": top_k, "layer_bytes": experts.nbytes}
    machine = {"cpu": results.cpu(), "limits": units.limits_data(measurements.limits(rows))}
    return {**machine, "layer": {**about, **sizes}, "calls": calls, "not_measured": left_out}
