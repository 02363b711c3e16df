"""The folder that a command writes."""

from __future__ import annotations

import os
from pathlib import Path

from ktmoe.errors import OutputError


def output_folder(path: str | os.PathLike[str]) -> Path:
    """Raises OutputError for an empty path: pathlib would make the current folder of it."""
    if not os.fspath(path):
        raise OutputError("expected a folder to write into, found an empty path")
    return Path(path)
