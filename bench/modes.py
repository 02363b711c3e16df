"""Activation modes side by side, as test_modes.py measures them: a results file's `modes`, and its table."""

from __future__ import annotations

from bench.results_file import Results, digits

NONE = "-"
#: The `beside` of what two stages compute: the same layer's forward().
FORWARD = "forward()"
#: What tells lines of the table apart. beside: what the same calls took turns with.
NAMES = ("backend", "isa", "form", "activations", "beside")


def part(made: dict, rows: list[dict]) -> dict:
    """A results file's `modes`, empty without rows. made: date, commit and source. rows: what was recorded."""
    found: dict[tuple, dict] = {}
    for row in rows:
        mode = found.setdefault(tuple(row[name] for name in NAMES), {name: row[name] for name in NAMES} | {"call": []})
        mode["call"].append(
            {"work": row["work"], "tokens": row["tokens"], "ms": digits(row["ms"]), "ratio": digits(row["ratio"])}
        )
    if not found:
        return {}
    return {**made, "model": rows[0]["model"], "experts": rows[0]["num_experts"], "mode": list(found.values())}


def table(found: list[Results]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A line for each mode and kernels; columns for the numbers of tokens."""
    parts = [(results.label, results.data["modes"]) for results in found if "modes" in results.data]
    works = list(dict.fromkeys(call["work"] for _, modes in parts for mode in modes["mode"] for call in mode["call"]))
    rows = []
    for label, modes in parts:
        for mode in modes["mode"]:
            calls = {call["work"]: call for call in mode["call"]}
            cells = (f"{calls[w]['ms']:.3g} ms, {calls[w]['ratio']:.2f} x" if w in calls else NONE for w in works)
            activations = f"`{mode['activations']}`" + (", two stages" if mode["beside"] == FORWARD else "")
            names = f"`{mode['backend']}`", mode["isa"], mode["form"], activations, mode["beside"]
            rows.append((*names, label, *cells))
    return ("backend", "instruction set", "rows", "activations", "beside", "CPU", *works), rows
