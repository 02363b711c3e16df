"""`ktmoe convert`: a checkpoint whose routed experts are rounded to another format."""

from __future__ import annotations

import click

from ktmoe import progress_bar
from ktmoe.cli import options, output, units
from ktmoe.cli.signals import signals_as_exit
from ktmoe.conversion import Report, convert
from ktmoe.conversion.convert import SHARD_BYTES
from ktmoe.loaders.naming import listed
from ktmoe.machine.threads import set_num_threads
from ktmoe.messages import printable
from ktmoe.quantization import TARGETS

HELP = """Round the routed experts of a checkpoint.

OUT becomes a checkpoint with the experts of DIR in another format. All else stays as it is. After an interruption, run the
command again: it goes on. For each layer the report says how large the added error is beside the weights (root mean
squares). docs/converting.md says which engines read the result.
"""


class GroupType(click.ParamType):
    """What shares a scale: 32 for "32", (128, 128) for "128x128"; "row" and "matrix" as they are."""

    name = "group"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        if not isinstance(value, str) or value in ("row", "matrix"):
            return value
        sizes = value.split("x")
        if len(sizes) > 2 or not all(size.isdecimal() and len(size) < 10 for size in sizes):
            self.fail(f"expected a number of columns, ROWSxCOLUMNS, row or matrix, found {value!r}", param, ctx)
        return int(value) if len(sizes) == 1 else (int(sizes[0]), int(sizes[1]))


@click.command("convert", help=HELP)
@options.MODEL
@options.OUT
@click.option("--to", type=click.Choice(list(TARGETS)), required=True, help="The format of the experts.")
@click.option("--rule", metavar="NAME", help="How to round (docs/quantizing.md); each format has a default.")
@click.option(
    "--group", metavar="G", type=GroupType(), help="Which weights share a scale: 32 (columns), 128x128, row or matrix."
)
@click.option("--scales", type=click.Choice(["fp32", "bf16", "fp16"]), help="The kind of scales, where there is a choice.")
@click.option("--symmetric/--asymmetric", default=None, help="Without or with zero points; only int4 can have them.")
@click.option("--layers", metavar="0-3,7", type=options.Layers(), help="By default all that have routed experts.")
@click.option("--requantize", is_flag=True, help="Also round experts that have 4 bits already.")
@options.shard_bytes(SHARD_BYTES)
@options.THREADS
@options.JSON
def command(
    model: str,
    out: str,
    to: str,
    rule: str | None,
    group: int | tuple[int, int] | str | None,
    scales: str | None,
    symmetric: bool | None,
    layers: list[int | str] | None,
    requantize: bool,
    shard_bytes: int,
    threads: int | None,
    as_json: bool,
) -> None:
    if threads is not None:
        set_num_threads(threads)
    with signals_as_exit(), progress_bar.bytes_done("converting") as draw:
        report = convert(
            model,
            out,
            to,
            rule=rule,
            group=group,
            scales=scales,
            symmetric=symmetric,
            layers=layers,
            requantize=requantize,
            shard_bytes=shard_bytes,
            progress=draw,
        )
    if as_json:
        output.print_json(_data(report))
    else:
        output.print_lines(_lines(report))


def _lines(report: Report) -> list[str]:
    lines = [
        f"{printable(report.path)}: {listed(list(report.layers))} as {report.format}, rule {report.rule}",
        f"{units.gb(report.source_nbytes)} became {units.gb(report.nbytes)}",
    ]
    if report.kept:
        lines.append(f"{units.count(len(report.kept), 'file')} of an interrupted run stayed")
    lines.append("added error beside the weights, root mean squares:")
    lines += [f"  layer {layer}: {100 * error.relative:.3f} %" for layer, error in report.layers.items()]
    if report.left_out:
        lines.append(f"not copied: {printable(units.some(report.left_out))}")
    return lines + ([report.note] if report.note else [])


def _data(report: Report) -> dict:
    return {
        "path": printable(report.path),
        "to": report.to,
        "rule": report.rule,
        "format": report.format,
        "source_bytes": report.source_nbytes,
        "bytes": report.nbytes,
        "files_kept": report.kept,
        "not_copied": [printable(name) for name in report.left_out],
        "note": report.note or None,
        "layers": [
            {"layer": layer, "relative_rms_error": error.relative, "sum_of_squares": error.weights, "of_error": error.error}
            for layer, error in report.layers.items()
        ],
    }
