"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WRONG, BETTER, GOOD, NOT_KNOWN = "wrong", "could be better", "good", "not known"
#: What a check can find, the worst first.
STATES = (WRONG, BETTER, NOT_KNOWN, GOOD)


@dataclass(frozen=True)
class Diagnosis:
    """state: one of STATES. found: what was found, a sentence. remedy: what to type or to set; empty where nothing is to do."""

    state: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class DoctorCheck:
    """why: a sentence that says why it matters. look: takes the folder that stands for /."""

    name: str
    why: str
    look: Callable[[Path], Diagnosis]


def first_line(root: Path, name: str) -> str | None:
    """The first line of a file, such as "proc/loadavg"; None where it cannot be read, empty where the file is empty."""
    try:
        return (root / name).read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        return None


def unreadable(root: Path, name: str) -> Diagnosis:
    """What a check finds where a file is absent or not as Linux writes it."""
    return Diagnosis(NOT_KNOWN, f"{root / name} does not say it")
