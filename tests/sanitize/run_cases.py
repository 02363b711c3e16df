"""run_cases.py MODULE FIRST END [SUBJECT]: cases of sanitizer_cases.py in this process.

MODULE: a copy of ktmoe._native.core that takes its place, or "-". Prints a line of JSON before and after each case: its number
and what it is, then a digest of all results. SUBJECT: of tests/ways.py. On this one a few small calls run before, the same
ones each time.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path


class Instead:
    """Finds one module of another file."""

    def __init__(self, name: str, file: str):
        self.name, self.file = name, file

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.file) if name == self.name else None


def run(module: str, first: int, end: int, subject: str | None = None) -> None:
    tests = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(tests), str(tests.parent)]
    if module != "-":
        sys.meta_path.insert(0, Instead("ktmoe._native.core", module))
    import sanitizer_cases  # which imports ktmoe

    if subject:
        with tempfile.TemporaryDirectory() as own:
            sanitizer_cases.plain(subject, Path(own))
    sanitizer_cases.main(first, end)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
