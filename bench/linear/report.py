"""The table of what `make bench-linear` measured, and what a results file keeps of it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from rich.console import Console

from bench import tables
from bench.linear.session import figures
from bench.results_file import digits

NAMES = ("call", "weights", "rows", "participant", "run as")
HEADS = ("its bytes", "ms", "GB/s", "of read", "GFLOP/s", "of peak", "our lead", "error", "rounds")


def show(result: dict, console: Console | None = None) -> None:
    console = console or tables.console(180)
    console.print(tables.table(NAMES + HEADS, rows(result), names=len(NAMES)))
    for line in notes(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def rows(result: dict) -> Iterator[tuple[str, ...]]:
    for call in result["calls"]:
        for point in call["points"]:
            found = {key: figures(result, call, point, key) for key in point["participants"]}
            measured = sorted((key for key, row in found.items() if row), key=lambda key: found[key]["seconds"])
            for key in measured:
                row, entry = found[key], point["participants"][key]
                yield (
                    f"{call['model']}, {call['call']}",
                    call["participants"][key]["about"]["weights"],
                    f"{point['rows']}",
                    key,
                    entry["best"],
                    f"{row['bytes'] / 1e6:.4g} MB",
                    f"{1e3 * row['seconds']:.4g}",
                    f"{row['bytes_rate'] / 1e9:.2f}",
                    f"{row['read_share']:.0%}",
                    f"{row['flops_rate'] / 1e9:.3g}",
                    f"{row['peak_share']:.0%}",
                    f"{row['lead']:.2f}x" if row["lead"] else "1",
                    f"{entry['error']:.2%}",
                    f"{row['rounds']}",
                )


def notes(result: dict) -> Iterator[str]:
    yield f"{result['machine']['cpu']}, {result['machine']['threads']} threads; {result['date']}"
    yield "our lead: the median of the rounds' own ratios, below 1 is behind; of read: of a participant's own bytes"
    yield "of read, of peak: of limits measured in the same rounds"
    for key, participant in result["participants"].items():
        if participant["failure"]:
            yield f"out: {key}: {participant['failure']}"
    for call in result["calls"]:
        for key, entry in call["participants"].items():
            if entry["failure"]:
                yield f"out: {call['model']}, {call['call']}: {key}: {entry['failure']}"
        for point in call["points"]:
            for key, entry in point["participants"].items():
                if "failure" in entry:
                    yield f"out: {call['model']}, {call['call']}, {point['rows']} rows: {key}: {entry['failure']}"


def wrong(result: dict) -> list[str]:
    """Participants with outputs beyond what rounding explains."""
    return [
        f"{call['model']}, {call['call']}, {point['rows']} rows: {key}"
        for call in result["calls"]
        for point in call["points"]
        for key, entry in point["participants"].items()
        if entry.get("failure", "").startswith("WRONG")
    ]


def published(saved: dict) -> dict:
    """A results file's `linear_peers`. Whoever failed at all points of a call is left out of it."""
    calls = []
    for call in saved["calls"]:
        libraries = []
        for key, participant in call["participants"].items():
            measured = [(point, figures(saved, call, point, key)) for point in call["points"]]
            points = [
                {
                    "rows": point["rows"],
                    "ms": digits(1e3 * found["seconds"]),
                    **({"lead": digits(found["lead"])} if found["lead"] else {}),
                    "of_read": digits(found["read_share"]),
                    "of_peak": digits(found["peak_share"]),
                }
                for point, found in measured
                if found
            ]
            if points:
                errors = [point["participants"][key]["error"] for point, found in measured if found]
                about = participant["about"]
                libraries.append(
                    {
                        "name": key,
                        "version": about["version"],
                        "weights": about["weights"],
                        "activations": saved["participants"][key]["numerics"],
                        "bytes": about["bytes"],
                        "most_error": digits(max(errors)),
                        "point": points,
                    }
                )
        names = ("model", "call", "weights", "shapes", "dispatches", "copies")
        calls.append({**{name: call[name] for name in names}, "library": libraries})
    commit = {"commit": saved["commit"]} if saved["commit"] else {}
    return {"date": datetime.date.fromisoformat(saved["date"]), **commit, "source": "make bench-linear", "call": calls}
