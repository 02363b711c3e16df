"""Files that must lie in a folder: links may lead to them, and none is followed when they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: The flags that open the last name. It need not be a file any more: opening neither waits nor gives this process a terminal.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True)
class Inside:
    """folder: a path without links. parts: the names of folders in it, then the file's."""

    folder: Path
    parts: tuple[str, ...]

    def open(self) -> int:
        """A descriptor, for reading. Raises OSError, also where there is a link by now."""
        at = os.open(self.folder, _FOLDER)
        try:
            for name in self.parts[:-1]:
                inner = os.open(name, _FOLDER, dir_fd=at)
                os.close(at)
                at = inner
            return os.open(self.parts[-1], _FILE, dir_fd=at)
        finally:
            os.close(at)


def find(path: str | os.PathLike[str], folders: Iterable[Path]) -> Inside | None:
    """Where a path leads in the first of these folders that has it, links followed; None: to elsewhere.

    folders: paths without links. Raises OSError where it leads to nothing.
    """
    real = Path(os.path.realpath(path, strict=True))
    folder = next((folder for folder in folders if folder in real.parents), None)
    return Inside(folder, real.relative_to(folder).parts) if folder else None
