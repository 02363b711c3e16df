"""`ktmoe merge`: a checkpoint whose experts have an adapter added to their weights."""

from __future__ import annotations

import click

from ktmoe import progress_bar
from ktmoe.adapters import Merged, merge_adapter
from ktmoe.cli import options, output, units
from ktmoe.cli.signals import signals_as_exit
from ktmoe.conversion.convert import SHARD_BYTES
from ktmoe.loaders.naming import listed
from ktmoe.machine.threads import set_num_threads
from ktmoe.messages import printable
from ktmoe.quantization import Error

HELP = """Add a LoRA adapter to the weights of a checkpoint's routed experts.

ADAPTER is a folder in PEFT's format. OUT becomes a checkpoint with the weights W + s B A, rounded to bfloat16. All else
stays as it is. The experts of DIR must be bfloat16, or become so with --dequantize. After an interruption, run the command
again: it goes on. For each layer the report says how much of the adapter rounding lost (root mean squares).
"""


@click.command("merge", help=HELP)
@options.MODEL
@click.argument("adapter", metavar="ADAPTER", type=options.PathType())
@options.OUT
@click.option("--experts-only", is_flag=True, help="Leave out what the adapter has of other modules, such as attention.")
@click.option("--dequantize", is_flag=True, help="Let quantized experts become bfloat16, in all layers.")
@options.shard_bytes(SHARD_BYTES)
@options.THREADS
@options.JSON
def command(
    model: str,
    adapter: str,
    out: str,
    experts_only: bool,
    dequantize: bool,
    shard_bytes: int,
    threads: int | None,
    as_json: bool,
) -> None:
    if threads is not None:
        set_num_threads(threads)
    with signals_as_exit(), progress_bar.bytes_done("merging") as draw:
        options_of_merge = {"experts_only": experts_only, "dequantize": dequantize, "shard_bytes": shard_bytes}
        merged = merge_adapter(model, adapter, out, **options_of_merge, progress=draw)
    if as_json:
        output.print_json(_data(merged))
    else:
        output.print_lines(_lines(merged))


def _lines(merged: Merged) -> list[str]:
    lines = [f"{printable(merged.path)}: {listed(list(merged.layers))} with the adapter, {units.gb(merged.nbytes)}"]
    if merged.kept:
        lines.append(f"{units.count(len(merged.kept), 'file')} of an interrupted run stayed")
    lines.append("what rounding to bfloat16 lost of the adapter, root mean squares:")
    lines += [f"  layer {layer}: {_lost(error)}" for layer, error in merged.layers.items()]
    return lines + ([f"not copied: {printable(units.some(merged.left_out))}"] if merged.left_out else [])


def _lost(error: Error) -> str:
    return f"{100 * error.relative:.3f} %" if error.weights else "nothing, since the adapter changes no weight"


def _data(merged: Merged) -> dict:
    return {
        "path": printable(merged.path),
        "bytes": merged.nbytes,
        "files_kept": merged.kept,
        "not_copied": [printable(name) for name in merged.left_out],
        "layers": [
            {
                "layer": layer,
                "relative_rms_lost": error.relative,
                "sum_of_squares": error.weights,
                "of_what_was_lost": error.error,
            }
            for layer, error in merged.layers.items()
        ],
    }
