"""What `make soak` saved, what a results file keeps of it, and its table."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from bench import runs
from bench.results_file import Results, ResultsError, digits

#: A file for each test. tests/repeating.py writes them.
SAVED = runs.STORAGE / "soak"
Row = tuple[str, ...]
#: How rows begin whose largest numbers are parts of an error's bound, by term.
TERMS = "error as a share of its bound: "


def saved(folder: Path = SAVED) -> list[dict]:
    """What each test saved last. Raises ResultsError where none did."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise ResultsError("nothing of make soak: expected what it saves")
    return found


def published(tests: list[dict]) -> dict:
    """A results file's `soak`. Rows of one kind, which the name has before a colon, are one. commit: of what ran last."""
    last = max(tests, key=lambda test: test["date"])
    rows: dict[str, list[dict]] = {}
    for row in (row for test in tests for row in test["rows"]):
        name = row["what"] if row["what"].startswith(TERMS) else row["what"].partition(": ")[0]
        rows.setdefault(name, []).append(row)
    return {
        "date": datetime.date.fromisoformat(last["date"]),
        "commit": last["commit"],
        "source": "make soak",
        "row": [_row(what, same) for what, same in rows.items()],
    }


def _row(what: str, rows: list[dict]) -> dict:
    most: dict[str, float] = {}
    for label, value in (pair for row in rows for pair in row["most"].items()):
        most[label] = digits(max(value, most.get(label, value)))
    done, of, seconds = (sum(row[name] for row in rows) for name in ("done", "of", "seconds"))
    return {"what": what, "done": done, "of": of, "seconds": digits(seconds), "most": most}


def terms(found: list[Results]) -> tuple[Row, list[Row]]:
    """The largest error of each backend over its bound, by term."""
    kept = [(label, row) for label, row in _rows(found) if row["what"].startswith(TERMS)]
    names = list(dict.fromkeys(name for _, row in kept for name in row["most"]))
    made = []
    for label, row in kept:
        cells = (f"{row['most'][name]:.2f}" if name in row["most"] else "-" for name in names)
        made.append((label, (row["what"].removeprefix(TERMS), *cells, f"{row['done']:,}")))
    return _of_cpus(("backend", *names, "cases"), made)


def table(found: list[Results]) -> tuple[Row, list[Row]]:
    """What was tried, how many cases of how many, and the largest numbers that were seen."""
    made = []
    for label, row in _rows(found):
        if not row["what"].startswith(TERMS):
            cases = f"{row['done']:,}" + f" of {row['of']:,}" * (row["done"] < row["of"])
            most = "; ".join(f"{name} {value:g}" for name, value in row["most"].items())
            made.append((label, (row["what"], cases, most or "-")))
    return _of_cpus(("what", "cases", "most"), made)


def _rows(found: list[Results]) -> list[tuple[str, dict]]:
    """Each with its CPU."""
    return [(results.label, row) for results in found for row in results.data.get("soak", {}).get("row", [])]


def _of_cpus(heads: Row, made: list[tuple[str, Row]]) -> tuple[Row, list[Row]]:
    """A table with a column for the CPU, or with its name in the heading where all rows have one."""
    labels = {label for label, _ in made}
    if len(labels) == 1:
        return (f"{heads[0]}, on {labels.pop()}", *heads[1:]), [cells for _, cells in made]
    return (*heads, "CPU"), [(*cells, label) for label, cells in made]
