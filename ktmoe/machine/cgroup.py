"""The control groups that limit this process: where their files are, in version 2 of the interface and in version 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ktmoe.machine.system_root import under

#: Where control groups are mounted, and where Linux says which ones this process is in; tests put files of their own here.
ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def folders(controller: str, root: Path | None = None) -> Iterator[tuple[int, Path]]:
    """Version (2 or 1) and folder of each group that limits what a controller gives out: our own and all around it.

    Not every folder exists: a container may see its own group as the root, and yet be told the path that it has outside.
    root: the folder that stands for /; None for this system's own.
    """
    try:
        lines = under(root, OWN).read_text().splitlines()
    except OSError:
        lines = []
    mounted = under(root, ROOT)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from ((2, folder) for folder in _levels(mounted, path))
        elif controller in controllers.split(","):
            for mount in dict.fromkeys((controller, controllers)):
                yield from ((1, folder) for folder in _levels(mounted / mount, path))


def _levels(root: Path, path: str) -> Iterator[Path]:
    """The folder of a path below root, its parent, and so on up to root."""
    folder = root / path.lstrip("/")
    yield folder
    for parent in folder.parents if folder != root else ():
        yield parent
        if parent == root:
            return
