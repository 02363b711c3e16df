"""The tables after a run, one for each suite, at most 180 columns wide."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from bench import tables
from bench.linear import page as linear

WIDTH = 180
Row = dict


def text(rows: list[Row]) -> str:
    """rows: extra_info of all points that were measured."""
    console = Console(width=WIDTH)
    with console.capture() as capture:
        for suite, draw in SUITES.items():
            mine = [row for row in rows if row.get("suite") == suite]
            if mine:
                console.print(draw(mine))
        for line in sorted({f"{row['cpu']}, {row['threads']} threads" for row in rows if "cpu" in row}):
            console.print(line, highlight=False)
        if rows:
            console.print("Medians over rounds; each round measures its own limits.")
    return capture.get()


def _layer(rows: list[Row]) -> Table:
    heads = ("model", "backend", "ISA", "mode", "rounding", "tuned for", "work", "routing")
    numbers = ("tokens", "experts", "ms", "GB/s", "of read", "GFLOP/s", "of peak", "limits", "footprint", "error/bound")

    def cells(row: Row) -> tuple[str, ...]:
        return (
            row["model"],
            row["backend"],
            row["isa"],
            row["activations"],
            row["rounding"],
            row.get("tuned_for", "decode"),
            row["work"],
            row["routing"],
            f"{row['tokens']}",
            f"{row['experts']}",
            f"{row['ms']:.2f}",
            f"{row['read_gb_s']:.2f}",
            f"{row['share_of_read_bandwidth']:.1%}",
            f"{row['gflop_s']:.1f}",
            f"{row['share_of_multiply_peak']:.1%}",
            f"{row['limit_read_gb_s']:.1f}, {row['limit_gflop_s']:.0f}",
            f"{row['footprint_of_llc']:.1f} LLC",
            f"{100 * row['worst_error_of_bound']:.2g}%",
        )

    return tables.table(heads + numbers, map(cells, rows), names=len(heads), title="Layers")


def _kernels(rows: list[Row]) -> Table:
    """A line for each kernel, its way of being called and where its weights are; a column for each number of rows."""
    columns = sorted({row["rows"] for row in rows})
    lines: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in rows:
        key = (row["isa"], row["weights"], row["activations"], row["scales"], row["source"], row["called"])
        lines.setdefault(key, {})[row["rows"]] = row
    heads = ("ISA", "weights", "mode", "scales", "from", "called", *(f"{m} rows" for m in columns))

    def cells(key: tuple[str, ...], points: dict[int, Row]) -> tuple[str, ...]:
        numbers = (
            f"{points[m]['gflop_s']:.0f} {statistics.median(points[m]['shares']):.0%}" if m in points else "" for m in columns
        )
        return (*key, *numbers)

    title = "Kernels (GFLOP/s, share of the nearer limit)"
    return tables.table(heads, (cells(key, points) for key, points in sorted(lines.items())), names=6, title=title)


def _latencies(rows: list[Row]) -> Table:
    heads = ("work", "median, us", "8 of 10 rounds, us", "a handoff, us", "of a call", "target")

    def cells(row: Row) -> tuple[str, ...]:
        low, high = row["most_us"]
        of_call = f"{row['share_of_call']:.2%}" if "share_of_call" in row else ""
        return row["work"], f"{row['us']:.2f}", f"{low:.2f} to {high:.2f}", f"{row['handoff_us']:.3f}", of_call, row["target"]

    return tables.table(heads, map(cells, rows), title="Pool")


def _load(rows: list[Row]) -> Table:
    cells = ((row["work"], row["figure"], row["contract"]) for row in rows)
    return tables.table(("work", "measured", "contract"), cells, names=3, title="Loading")


def _modes(rows: list[Row]) -> Table:
    heads = ("backend", "ISA", "rows", "mode", "work", "beside", "ms", "times as long", "error/bound")

    def cells(row: Row) -> tuple[str, ...]:
        names = (row[name] for name in ("backend", "isa", "form", "activations", "work", "beside"))
        return (*names, f"{row['ms']:.2f}", f"{row['ratio']:.3f}", f"{100 * row['worst_error_of_bound']:.2g}%")

    return tables.table(heads, map(cells, rows), names=6, title="Activation modes")


def _linear(rows: list[Row]) -> Table:
    heads = ("call", "weights", "backend", "ISA", "rows", "ms", "GB/s", "of read", "GFLOP/s", "of peak", "limits", "footprint")

    def cells(row: Row) -> tuple[str, ...]:
        return (
            f"{row['model']}, {row['call']}",
            row["weights"],
            row["backend"],
            row["isa"],
            f"{row['rows']}",
            f"{row['ms']:.4g}",
            f"{row['read_gb_s']:.2f}",
            f"{row['share_of_read_bandwidth']:.1%}",
            f"{row['gflop_s']:.1f}",
            f"{row['share_of_multiply_peak']:.1%}",
            f"{row['limit_read_gb_s']:.1f}, {row['limit_gflop_s']:.0f}",
            f"{row['footprint_of_llc']:.1f} LLC",
        )

    return tables.table(
        (*heads, "error/bound"),
        ((*cells(row), f"{100 * row['worst_error_of_bound']:.2g}%") for row in linear.ordered(rows)),
        names=4,
        title="Dense matrices",
    )


SUITES: dict[str, Callable[[list[Row]], Table]] = {
    "layer": _layer,
    "kernels": _kernels,
    "modes": _modes,
    "linear": _linear,
    "pool": _latencies,
    "load": _load,
}
