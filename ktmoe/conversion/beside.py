"""What lies beside a checkpoint's weights: which files are copied, where they are, and what is left out."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ktmoe.errors import CheckpointError
from ktmoe.files.inside import Inside, find
from ktmoe.messages import show

#: What is not copied: weights of the same model in other files.
_WEIGHTS = (
    *(".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".npz", ".onnx", ".onnx_data", ".tflite"),
    ".index.json",
)


class Beside:
    """Files beside a checkpoint's weights, in its folder and in those within it.

    A link to a file is followed if that lies in the folder, or in the Hub's cache if the folder is a snapshot there. What is
    hidden is left out without a word.
    folder: of the checkpoint. without: a folder that is left out, too, if it is there.
    files: where each one is, by its name in the folder. left_out: names of weights, of folders with weights in them, and of
    what is no file; a folder's end in "/".
    Raises CheckpointError for a folder that cannot be read, and for a link to a file elsewhere that has no name of weights.
    """

    def __init__(self, folder: Path, without: Path):
        self.files: dict[str, Inside] = {}
        self.left_out: list[str] = []
        self._folder, self._places = folder, places(folder)
        pending = [""]
        while pending:
            pending += self._enter(pending.pop(), without)
        self.left_out.sort()

    def _enter(self, within: str, without: Path) -> list[str]:
        """Look at one folder. within: its name in the whole, "" or with a "/" in the end. Returns those in it."""
        try:
            with os.scandir(self._folder / within) as entries:
                found = sorted((each for each in entries if not each.name.startswith(".")), key=lambda each: each.name)
        except OSError as error:
            raise CheckpointError(f"{self._folder / within}: expected a folder to read, found {error.strerror}") from error
        if within and any(each.name.endswith(_WEIGHTS) for each in found):
            self.left_out.append(within)
            return []
        folders = []
        for entry in found:
            name = within + entry.name
            if not entry.is_dir(follow_symlinks=False):
                self._add(name)
            elif not _same(entry, without):
                folders.append(f"{name}/")
        return folders

    def _add(self, name: str) -> None:
        """Add a file, or what stands in the place of one, to the files or to what is left out."""
        place = None if name.endswith(_WEIGHTS) else located(self._folder / name, self._places)
        if place:
            self.files[name] = place
        else:
            self.left_out.append(name)


def places(folder: Path) -> tuple[Path, ...]:
    """Folders in which files of a checkpoint's folder may lie, as paths without links."""
    real = Path(os.path.realpath(folder))
    caches = [parent.parent for parent in real.parents if parent.name == "snapshots"]  # models--OWNER--NAME/snapshots/REVISION
    return (real, *(cache / "blobs" for cache in caches[:1]))


def located(path: Path, folders: tuple[Path, ...]) -> Inside | None:
    """Where a file is; None if there is none. Raises CheckpointError where a link leads to a file in none of the folders, or
    where the system cannot say what is there."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        place = find(path, folders)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # it leads to nothing
            return None
        raise CheckpointError(f"{path}: expected a readable file, found {error.strerror}") from error
    if place is None:
        raise CheckpointError(
            f"{path}: expected a file of this checkpoint, found a link to {show(os.path.realpath(path))}, which is not in its "
            "folder; put a copy in the place of the link"
        )
    return place


def _same(entry: os.DirEntry[str], folder: Path) -> bool:
    try:
        return os.path.samestat(entry.stat(follow_symlinks=False), os.stat(folder))
    except (OSError, ValueError):  # ValueError: a name with a NUL
        return False
