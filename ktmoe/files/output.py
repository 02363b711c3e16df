"""The folder that a command writes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ktmoe.errors import OutputError


def output_folder(path: str | os.PathLike[str]) -> Path:
    """Raises OutputError for an empty path: pathlib would make the current folder of it."""
    if not os.fspath(path):
        raise OutputError("expected a folder to write into, found an empty path")
    return Path(path)


def free_bytes(folder: Path) -> int:
    """The free space of a folder's disk. Raises OutputError."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise OutputError(f"{folder}: expected a folder that can be written, found {error.strerror}") from error


def names_in(folder: Path) -> list[str]:
    """The names in a folder. Raises OutputError."""
    try:
        return os.listdir(folder)
    except OSError as error:
        raise OutputError(f"{folder}: expected a folder that can be read, found {error.strerror}") from error
