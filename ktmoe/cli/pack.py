"""`ktmoe pack`: a packed cache of a checkpoint, which starts by mapping."""

from __future__ import annotations

import time

import click

from ktmoe import progress_bar
from ktmoe.cache.packing import PackReport, pack
from ktmoe.cli import options, output, units
from ktmoe.cli.signals import signals_as_exit
from ktmoe.loaders import naming
from ktmoe.messages import printable

HELP = """Write a packed cache, for faster starts.

OUT becomes a folder with the weights of DIR as they lie in memory: one file for the experts of a layer, and one for each dense
matrix. Other commands map it with --cache OUT: they read and pack nothing of these at the start, and several processes share
it. It serves this checkpoint only, while its files do not change. After an interruption, run the command again: it keeps what
OUT has.
"""


@click.command("pack", help=HELP)
@options.MODEL
@options.OUT
@click.option("--layers", metavar="0-3,7", type=options.Layers(), help="By default all that have routed experts.")
@click.option("--no-layers", is_flag=True, help="Pack no layer, only the matrices.")
@click.option(
    "--matrix",
    "matrices",
    metavar="NAME",
    multiple=True,
    help="A dense matrix, such as lm_head; a * stands for any text. May be given more than once. By default all, but none with "
    "--layers.",
)
@click.option("--no-matrices", is_flag=True, help="Pack no dense matrix, only layers.")
@options.NUMA_NODES
@click.option("--verify", is_flag=True, help="In the end, pack each expert and matrix anew and compare all bytes.")
@options.JSON
def command(
    model: str,
    out: str,
    layers: list[int | str] | None,
    no_layers: bool,
    matrices: tuple[str, ...],
    no_matrices: bool,
    numa_nodes: list[int] | None,
    verify: bool,
    as_json: bool,
) -> None:
    if no_layers and layers is not None:
        raise click.UsageError("--no-layers excludes --layers")
    if no_matrices and (matrices or no_layers):
        raise click.UsageError("--no-matrices excludes --matrix and --no-layers")
    if not matrices and not no_matrices and (layers is None or no_layers):
        matrices = None  # all that there are
    layers = [] if no_layers else layers
    start = time.perf_counter()
    with signals_as_exit(), progress_bar.bytes_done("packing") as draw:
        done = pack(model, out, layers, matrices=matrices, numa_nodes=numa_nodes, verify=verify, progress=draw)
    seconds = time.perf_counter() - start
    if as_json:
        output.print_json(_data(model, out, done, seconds))
    else:
        output.print_lines(_lines(model, out, done, seconds))


def _data(model: str, out: str, done: PackReport, seconds: float) -> dict:
    layers = {"layers_written": done.written, "layers_kept": done.kept, "layers_verified": done.verified}
    of_each = (("written", done.matrices_written), ("kept", done.matrices_kept), ("verified", done.matrices_verified))
    matrices = {f"matrices_{what}": [printable(name) for name in names] for what, names in of_each}
    matrices["matrices_skipped"] = [{"name": printable(name), "reason": why} for name, why in done.skipped.items()]
    sizes = {"cache_bytes": done.nbytes, "seconds": seconds}
    return {"path": printable(model), "cache": printable(out), **layers, **matrices, **sizes}


def _lines(model: str, out: str, done: PackReport, seconds: float) -> list[str]:
    lines = [f"{printable(out)}: {units.gb(done.nbytes)} of {printable(model)}, in {seconds:.2f} s"]
    for what, layers, matrices in (
        ("written", done.written, done.matrices_written),
        ("kept", done.kept, done.matrices_kept),
        ("the same bytes again", done.verified, done.matrices_verified),
    ):
        if layers or matrices:
            lines.append(f"{what}: {', '.join(filter(None, (naming.listed(layers), _listed(matrices))))}")
    lines += [f"skipped: {printable(name)}: {why}" for name, why in done.skipped.items()]
    return lines


def _listed(matrices: list[str]) -> str:
    if len(matrices) < 4:
        return ", ".join(map(printable, matrices))
    return f"{printable(matrices[0])} ... {printable(matrices[-1])} ({len(matrices)} matrices)"
