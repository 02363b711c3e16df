"""What `make soak` saved, what a results file keeps of it, and its table."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path

from bench import runs
from bench.results_file import Results, ResultsError, digits

#: A file for each test. tests/repeating.py writes them.
SAVED = runs.STORAGE / "soak"
Row = tuple[str, ...]


def saved(folder: Path = SAVED) -> list[dict]:
    """What each test saved last. Raises ResultsError where none did."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise ResultsError("nothing of make soak: expected what it saves")
    return found


def published(tests: list[dict]) -> dict:
    """A results file's `soak`. commit: of what ran last."""
    last = max(tests, key=lambda test: test["date"])
    return {
        "date": datetime.date.fromisoformat(last["date"]),
        "commit": last["commit"],
        "source": "make soak",
        "test": [{"test": test["test"], "row": [_row(row) for row in test["rows"]]} for test in tests],
    }


def _row(row: dict) -> dict:
    most = {label: digits(value) for label, value in row["most"].items()}
    return {"what": row["what"], "done": row["done"], "of": row["of"], "seconds": digits(row["seconds"]), "most": most}


def table(found: list[Results]) -> tuple[Row, list[Row]]:
    """Rows of one name, as parametrised tests have them, are one."""
    heads = ("what", "cases", "of", "minutes", "most", "CPU")
    rows = []
    for results in found:
        tests = results.data.get("soak", {}).get("test", [])
        by_name: dict[str, list[dict]] = {}
        for row in (row for test in tests for row in test["row"]):
            by_name.setdefault(row["what"], []).append(row)
        rows += [(name, *_cells(same), results.label) for name, same in by_name.items()]
    return heads, rows


def _cells(rows: list[dict]) -> Iterable[str]:
    done, of = (sum(row[name] for row in rows) for name in ("done", "of"))
    most: dict[str, float] = {}
    for label, value in (pair for row in rows for pair in row["most"].items()):
        most[label] = max(value, most.get(label, value))
    minutes = sum(row["seconds"] for row in rows) / 60
    return f"{done:,}", f"{of:,}", f"{minutes:.1f}", "; ".join(f"{label} {value:g}" for label, value in most.items()) or "-"
