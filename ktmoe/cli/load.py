"""`ktmoe load`: how fast a whole checkpoint loads, and the memory that it takes."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ktmoe.cli import options, output, units
from ktmoe.messages import printable
from ktmoe.model import MoEModel

HELP = """Load a checkpoint: time and memory.

All layers of DIR that have routed experts are loaded, and given back. A model that does not fit is refused before a
weight is read.
"""


@click.command("load", help=HELP)
@options.MODEL
@click.option("--layers", metavar="0-3,7", type=options.Layers(), help="By default all that have routed experts.")
@options.BACKEND
@options.TUNED_FOR
@options.CACHE
@options.JSON
def command(model: str, layers: list[int | str] | None, backend: str, tuned_for: str, cache: str | None, as_json: bool) -> None:
    start = time.perf_counter()
    chosen = {"tuned_for": tuned_for, "cache": cache}
    with MoEModel.from_checkpoint(model, layers, backend, **chosen, progress=True) as loaded:
        seconds = time.perf_counter() - start
        _, nbytes = loaded.loaded
        found = {
            "path": printable(model),
            "layers": len(loaded),
            "backends": sorted({loaded[layer].backend for layer in loaded}),
            "checkpoint_bytes": nbytes,
            "packed_bytes": loaded.nbytes,
            "mapped": cache is not None,
            "peak_rss_bytes": peak_rss_bytes(),
            "seconds": seconds,
            "gb_s": nbytes / seconds / 1e9,
        }
    if as_json:
        output.print_json(found)
        return
    words = units.count(found["layers"], "layer"), units.gb(nbytes), f"backend {', '.join(found['backends'])}"
    rate = "nothing was read" if found["mapped"] else units.gb_s(nbytes / seconds)
    output.print_lines(
        [
            f"{found['path']}: {words[0]}, {words[1]} in the checkpoint, {words[2]}",
            f"{'mapped' if found['mapped'] else 'loaded'} in {seconds:.2f} s, {rate}",
            f"packed weights {units.gb(found['packed_bytes'])}, peak RSS {units.gb(found['peak_rss_bytes'])}",
        ]
    )


def peak_rss_bytes() -> int:
    """The most memory that this process ever had, by VmHWM of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])
