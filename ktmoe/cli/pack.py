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

OUT becomes a folder with the experts of DIR as they lie in memory, one file a layer. Other commands map it with --cache OUT:
they read and pack no weight at the start, and several processes share it. It serves this checkpoint only, while its files do
not change. After an interruption, run the command again: it keeps the layers that OUT has.
"""


@click.command("pack", help=HELP)
@options.MODEL
@options.OUT
@click.option("--layers", metavar="0-3,7", type=options.Layers(), help="By default all that have routed experts.")
@options.NUMA_NODES
@click.option("--verify", is_flag=True, help="In the end, pack each expert anew and compare all bytes.")
@options.JSON
def command(
    model: str, out: str, layers: list[int | str] | None, numa_nodes: list[int] | None, verify: bool, as_json: bool
) -> None:
    start = time.perf_counter()
    with signals_as_exit(), progress_bar.bytes_done("packing") as draw:
        done = pack(model, out, layers, numa_nodes=numa_nodes, verify=verify, progress=draw)
    seconds = time.perf_counter() - start
    if as_json:
        output.print_json(_data(model, out, done, seconds))
    else:
        output.print_lines(_lines(model, out, done, seconds))


def _data(model: str, out: str, done: PackReport, seconds: float) -> dict:
    layers = {"layers_written": done.written, "layers_kept": done.kept, "layers_verified": done.verified}
    return {"path": printable(model), "cache": printable(out), **layers, "cache_bytes": done.nbytes, "seconds": seconds}


def _lines(model: str, out: str, done: PackReport, seconds: float) -> list[str]:
    lines = [f"{printable(out)}: {units.gb(done.nbytes)} of {printable(model)}, in {seconds:.2f} s"]
    for what, layers in (("written", done.written), ("kept", done.kept), ("the same bytes again", done.verified)):
        if layers:
            lines.append(f"{what}: {naming.listed(layers)}")
    return lines
