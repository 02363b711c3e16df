"""Dense matrices in a results file and on the page: of test_linear.py, and of make bench-linear."""

from __future__ import annotations

from bench.linear.calls import calls
from bench.results_file import Results, digits

NONE = "-"
#: What tells lines of the first table apart, and what else is kept of them.
NAMES = ("model", "call", "weights", "backend", "isa", "activations")
KEPT = ("shapes", "dispatches", "copies", "cached", "nbytes")
CALL = {
    "ms": "ms",
    "gb_s": "read_gb_s",
    "of_read": "share_of_read_bandwidth",
    "gflop_s": "gflop_s",
    "of_peak": "share_of_multiply_peak",
}
#: The most rows that are shown by what they read.
FEW_ROWS = 16


def section(made: dict, rows: list[dict]) -> dict:
    """A results file's `linear`, empty without rows. made: date, commit and source. rows: what was recorded."""
    found: dict[tuple, dict] = {}
    for row in ordered(rows):
        names = {name: row[name] for name in (*NAMES, *KEPT)}
        call = found.setdefault(
            tuple(row[name] for name in NAMES), names | {"bound": digits(row["bound_of_output"]), "point": []}
        )
        call["point"].append({"rows": row["rows"], **{name: digits(row[key]) for name, key in CALL.items()}})
    return {**made, "call": list(found.values())} if found else {}


def ordered(rows: list[dict]) -> list[dict]:
    """As matrices.toml has the calls, and by the number of rows; a run may have another order."""
    known = {(call.model, call.call): number for number, call in enumerate(calls())}
    return sorted(rows, key=lambda row: (known.get((row["model"], row["call"]), len(known)), row["rows"]))


def table(found: list[Results]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A line for each call; columns for the numbers of rows."""
    calls = [(results.label, call) for results in found for call in results.data.get("linear", {}).get("call", ())]
    numbers = sorted({point["rows"] for _, call in calls for point in call["point"]})
    rows = []
    for label, call in calls:
        points = {point["rows"]: point for point in call["point"]}
        cells = (_point(points[number], call["cached"]) if number in points else NONE for number in numbers)
        dispatches = f", {call['dispatches']} dispatches" if call["dispatches"] > 1 else ""
        name = f"{call['model']}, {call['call']}{dispatches}"
        rows.append((name, call["weights"], megabytes(call["nbytes"]), f"`{call['backend']}`", label, *cells))
    return ("call", "weights", "bytes", "backend", "CPU", *map(_rows, numbers)), rows


def _point(point: dict, cached: bool) -> str:
    if cached:
        return f"{_digits(1e3 * point['ms'])} µs"
    if point["rows"] > FEW_ROWS:
        return f"{point['gflop_s']:.0f} GFLOP/s, {100 * point['of_peak']:.0f} %"
    return f"{_digits(point['ms'])} ms, {point['gb_s']:.1f} GB/s, {100 * point['of_read']:.0f} %"


def peers_table(found: list[Results]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A line for each library and call; columns for the numbers of rows."""
    entries = [
        (results.label, call, library)
        for results in found
        for call in results.data.get("linear_peers", {}).get("call", ())
        for library in call["library"]
    ]
    numbers = sorted({point["rows"] for *_, library in entries for point in library["point"]})
    rows = []
    for label, call, library in entries:
        points = {point["rows"]: point for point in library["point"]}
        cells = (_beside(points[number]) if number in points else NONE for number in numbers)
        own = "equal" if library["weights"] == call["weights"] else library["weights"]
        name = f"{call['model']}, {call['call']}"
        error = f"{100 * library['most_error']:.2g} %"
        of_library = library["name"], library["activations"], own, megabytes(library["bytes"])
        rows.append((name, call["weights"], label, *of_library, *cells, error))
    heads = ("call", "weights", "CPU", "library", "x", "weights held", "bytes", *map(_rows, numbers), "distance from float64")
    return heads, rows


def _beside(point: dict) -> str:
    share = (
        f"{100 * point['of_read']:.0f} % of read" if point["rows"] <= FEW_ROWS else f"{100 * point['of_peak']:.0f} % of peak"
    )
    return f"{_digits(point['ms'])} ms, {share}" + (f", {point['lead']:.2f} x" if "lead" in point else "")


def megabytes(nbytes: int) -> str:
    return f"{_digits(nbytes / 1e6)} MB"


def _rows(number: int) -> str:
    return f"{number:,} row{'s' * (number > 1)}"


def _digits(value: float) -> str:
    """Three digits or all before the point, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{float(f'{value:.3g}'):g}"
