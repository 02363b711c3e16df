"""The table, from a result alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench import tables
from bench.peers.rounds import figures

NAMES = ("\npoint", "\nparticipant", "\nrun as")
HEADS = ("\nms", "\ntokens/s", "\nGB/s", "of\nread", "\nGFLOP/s", "of\npeak", "our\nlead", "int8\nlead", "\nerror", "\nrounds")


def show(result: dict, console: Console | None = None) -> None:
    console = console or tables.console(128)
    console.print(_table(result))
    for note in _notes(result):
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def wrong(result: dict) -> list[str]:
    """Participants with outputs beyond what rounding explains."""
    return [
        f"{point['name']}: {key}"
        for point in result["points"]
        for key, entry in point["participants"].items()
        if entry.get("failure", "").startswith("WRONG")
    ]


def _table(result: dict) -> Table:
    table = tables.table(NAMES + HEADS, (), names=len(NAMES))
    for point in result["points"]:
        rows = {key: figures(result, point, key) for key in point["participants"]}
        measured = sorted((key for key, row in rows.items() if row), key=lambda key: rows[key]["seconds"])
        for number, key in enumerate(measured):
            row, entry = rows[key], point["participants"][key]
            table.add_row(
                point["name"] if number == 0 else "",
                Text(key, style="bold" if key.startswith("ktmoe") else ""),
                entry["best"],
                _number(row["seconds"] * 1e3),
                _number(row["tokens_rate"]),
                f"{row['bytes_rate'] / 1e9:.2f}",
                f"{row['read_share']:.0%}",
                _number(row["flops_rate"] / 1e9),
                f"{row['peak_share']:.0%}" if row["peak_share"] else "",
                f"{row['ratio']:.2f}x" if row["ratio"] else "1",
                f"{row['int8_ratio']:.2f}x" if row["int8_ratio"] else "1" if key == result.get("int8_base") else "",
                f"{entry['error']:.2%}",
                str(row["rounds"]),
            )
        table.add_section()
    return table


def _notes(result: dict) -> Iterator[str]:
    shape, machine = result["shape"], result["machine"]
    yield (
        f"\n{shape['experts']} experts of {shape['hidden']} x {shape['intermediate']}, top-{shape['top_k']}"
        f", the same {shape['weights']} weights for all; {machine['cpu']}, {machine['threads']} threads; {result['date']}"
    )
    yield f'our lead: of {result["base"]}, which "auto" takes here; the median of the rounds\' own ratios, below 1 is behind'
    if int8 := result.get("int8_base"):
        yield f"int8 lead: the same of {int8}, beside others that round activations to 8 bits"
    yield f"GB/s: of the distinct experts' packed {shape['weights']} weights, whatever a participant reads"
    yield "of read, of peak: of limits measured in the same rounds"
    yield "error: norm of sampled outputs' differences from float64, of the outputs' norm"
    for key, participant in result["participants"].items():
        about = participant["about"]
        if about:
            details = ", ".join(f"{name} {_words(value)}" for name, value in about.items() if name != "version")
            yield f"{key}: {about['version']}; {details}"
    for key, participant in result["participants"].items():
        if participant["failure"]:
            yield f"out: {key}: {participant['failure']}"
    for point in result["points"]:
        for key, entry in point["participants"].items():
            if "failure" in entry and entry["failure"] != result["participants"][key]["failure"]:
                yield f"out: {point['name']}: {key}: {entry['failure']}"
    yield from result["notes"]


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(value: float) -> str:
    """Three digits or more, no exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
