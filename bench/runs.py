"""The runs that pytest-benchmark saved."""

from __future__ import annotations

import re
from pathlib import Path

STORAGE = Path(".benchmarks")


class NoRunError(ValueError):
    """There is no such run; the message is for a person."""


def saved() -> list[Path]:
    """All of them, the last one first."""
    return sorted(STORAGE.glob("*/[0-9]*.json"), key=lambda path: path.stat().st_mtime, reverse=True)


def last() -> Path:
    """Raises NoRunError if there is none."""
    for path in saved():
        return path
    raise NoRunError(f"{STORAGE}: expected a saved run, found none; make bench saves one")


def before(run: Path) -> Path:
    """The last one that was saved before that run. Raises NoRunError if there is none."""
    time = run.stat().st_mtime if run.exists() else float("inf")
    for path in saved():
        if path != run and path.stat().st_mtime <= time:
            return path
    raise NoRunError(f"{STORAGE}: expected a run that was saved before {run}, found none; make bench saves one")


def named(name: str) -> Path:
    """A file, or the last run whose name begins with that number. Raises NoRunError if no run has the number."""
    if not name.isdigit():
        return Path(name)
    for path in saved():
        if int(re.match(r"\d+", path.name)[0]) == int(name):
            return path
    raise NoRunError(f"no saved run has the number {name}; there are {', '.join(p.name for p in saved()) or 'none'}")
