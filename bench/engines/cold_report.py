"""The time to the first token: figures, their table on a terminal, and what a results file keeps of them."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable

from rich.console import Console

from bench import tables
from bench.engines.cold import MMAP
from bench.engines.ways import COLD
from bench.results_file import Results, digits

NONE = "-"
#: What the process does before it opens a file.
BEFORE = ("start", "imports")
AFTER = ("load", "token")


def figures(comparison: dict, way: str, state: str) -> dict | None:
    """Medians over the rounds, in seconds; None where there is none. state: "cold" or "warm".

    before: until all is imported; load; token: from then on; total: of all. of_disk: of cold files, the time to read the whole
    GGUF file at the round's own bandwidth as a share of load and token. ratio, ratio_after: how many times as fast the way
    is as llama.cpp with mmap, in total and without what comes before; None of that itself.
    """
    rounds = [row for row in comparison["rounds"] if row["ways"].get(way)]
    if not rounds:
        return None

    def median(of: Callable[[dict], float]) -> float:
        return statistics.median(of(row) for row in rounds)

    def seconds(row: dict, parts: tuple[str, ...], of: str = way) -> float:
        return sum(row["ways"][of][state][part] for part in parts)

    def ratio(parts: tuple[str, ...]) -> float | None:
        ratios = [
            seconds(row, parts, MMAP.name) / seconds(row, parts)
            for row in rounds
            if way != MMAP.name and row["ways"].get(MMAP.name)
        ]
        return statistics.median(ratios) if ratios else None

    return {
        "before": median(lambda row: seconds(row, BEFORE)),
        "load": median(lambda row: seconds(row, ("load",))),
        "token": median(lambda row: seconds(row, ("token",))),
        "total": median(lambda row: seconds(row, (*BEFORE, *AFTER))),
        "of_disk": median(lambda row: comparison["file_bytes"] / row["disk"] / seconds(row, AFTER))
        if state == "cold"
        else None,
        "ratio": ratio((*BEFORE, *AFTER)),
        "ratio_after": ratio(AFTER),
    }


def show(result: dict, console: Console | None = None) -> None:
    console = console or tables.console(160)
    for comparison in result["comparisons"]:
        if comparison["comparison"] != COLD:
            continue
        heads, rows = _table(_published(comparison))
        title = f"{comparison['model']} {comparison['file']}, {comparison['layers']} of {comparison['of_layers']} layers"
        console.print(
            tables.table(heads, rows, title=f"{title}: seconds to the first token after {comparison['prompt']} tokens")
        )
        for way, about in comparison["ways"].items():
            if about["failure"]:
                console.print(f"out: {way}: {about['failure']}", highlight=False, markup=False, soft_wrap=True)


def section(saved: dict) -> dict | None:
    """A results file's `cold`, of what make bench-engines saved; None if it has nothing of it. Ways that failed are out."""
    found = [_published(comparison) for comparison in saved["comparisons"] if comparison["comparison"] == COLD]
    if not found:
        return None
    commit = {"commit": saved["commit"]} if saved["commit"] else {}
    date = datetime.date.fromisoformat(saved["date"])
    return {"date": date, **commit, "source": "make bench-engines", "comparison": found}


def _published(comparison: dict) -> dict:
    return {
        **{name: comparison[name] for name in ("model", "file", "layers", "of_layers", "vocabulary")},
        "file_gb": digits(comparison["file_bytes"] / 1e9),
        "disk_gb_s": digits(statistics.median(row["disk"] for row in comparison["rounds"]) / 1e9),
        "way": [
            _way(name, state, found)
            for state in ("cold", "warm")
            for name, about in comparison["ways"].items()
            if not about["failure"] and (found := figures(comparison, name, state))
        ],
    }


def _way(name: str, state: str, found: dict) -> dict:
    seconds = {f"{part}_s": digits(found[part]) for part in ("before", "load", "token", "total")}
    others = {part: digits(found[part]) for part in ("of_disk", "ratio", "ratio_after") if found[part] is not None}
    return {"name": name, "read": "from the disk" if state == "cold" else "page cache", **seconds, **others}


def _table(comparison: dict) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = ("way", "file", "start, imports", "loading", "first token", "loading and token", "total")
    rows = []
    for way in comparison["way"]:
        after = way["load_s"] + way["token_s"]
        disk = f", {100 * way['of_disk']:.0f} % of the disk" if "of_disk" in way else ""
        parts = [f"{way[f'{part}_s']:.3g} s" for part in ("before", "load", "token")]
        both = f"{after:.3g} s{disk}{_ratio(way, 'ratio_after')}", f"{way['total_s']:.3g} s{_ratio(way, 'ratio')}"
        rows.append((way["name"], way["read"], *parts, *both))
    return heads, rows


def _ratio(way: dict, name: str) -> str:
    return f", {way[name]:.2f} x" if name in way else ""


def page_table(found: list[Results]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A line for each way and state of the page cache."""
    lines = []
    for results in found:
        for comparison in results.data.get("cold", {}).get("comparison", ()):
            model = f"{comparison['model']} {comparison['file']}"
            layers = f"{comparison['layers']} of {comparison['of_layers']}"
            size = f"{comparison['file_gb']:.3g} GB, disk {comparison['disk_gb_s']:.2g} GB/s"
            lines += [(results.label, model, layers, size, *row) for row in _table(comparison)[1]]
    return ("CPU", "model", "layers", "size", *_table({"way": []})[0]), lines
