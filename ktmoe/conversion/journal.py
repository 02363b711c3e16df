"""Journal: what is finished of a result. It stands where the index will be, so that nothing reads the folder earlier."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from ktmoe.errors import CheckpointError, OutputError
from ktmoe.files.atomic import unfinished, write_json
from ktmoe.files.lock import LOCK_NAME
from ktmoe.files.output import names_in
from ktmoe.loaders.checkpoint import INDEX_NAME
from ktmoe.loaders.safetensors_file import SafetensorsFile, read_json_object
from ktmoe.quantization import Error


class Journal:
    """The journal of a folder that a command writes, and that this process has locked.

    command: its name. noun: what messages call what it does. identity: what the source, the options and ktmoe are, as JSON has
    it. finished: by file, the errors of layers in it. resumed: whether another process began it.
    Raises OutputError for a folder with other files, or with the journal of other options.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], command: str, noun: str):
        self._path = folder / INDEX_NAME
        self._key, self._noun = f"ktmoe_{command}", noun
        # in the place of an index's weight_map, which readers name when they refuse it
        self._not_yet = f"ktmoe {command} has not finished: run the same command again, or remove this folder"
        self._identity = identity
        self.finished: dict[str, dict[int | str, Error]] = {}
        self.resumed = os.path.lexists(self._path)
        if self.resumed:
            self._read(folder)
            return
        others = set(names_in(folder)) - {LOCK_NAME, unfinished(self._path).name}
        if others:
            raise OutputError(f"{folder}: expected a new or an empty folder, found {min(others)}")

    def begin(self) -> None:
        """Write the journal: from now on the folder is this command's."""
        if not self.resumed:
            self._write()

    def add(self, file: str, errors: dict[int | str, Error]) -> None:
        """Note that a file is finished: it has its name now."""
        self.finished[file] = errors
        self._write()

    def keep(self, folder: Path, file: str, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bool:
        """Whether a file is finished, and still has these tensors: (dtype, shape) by name."""
        if file not in self.finished:
            return False
        try:
            opened = SafetensorsFile(folder / file)
        except CheckpointError:
            return False
        with_tensors = {name: (info.dtype, info.shape) for name, info in opened.tensors.items()}
        opened.close()
        return with_tensors == tensors

    def close(self, weight_map: dict[str, str], total: int) -> None:
        """Put the index in the journal's place: the result is whole."""
        write_json(self._path, {"metadata": {"total_size": total}, "weight_map": weight_map}, overwrite=True)

    def _read(self, folder: Path) -> None:
        found = read_json_object(self._path).get(self._key)
        if not isinstance(found, dict):
            raise OutputError(f"{folder}: expected a new or an empty folder, found a model")
        if (before := found.get("identity")) != self._identity:
            before = before if isinstance(before, dict) else {}
            labels = [label for label in self._identity if before.get(label) != self._identity[label]]
            labels += ["identity"]  # of a journal that says more
            raise OutputError(
                f"{folder}: holds an unfinished {self._noun} with another {labels[0]}; choose another folder, or remove this "
                "one"
            )
        try:
            self.finished = {
                file: {layer: _error(*numbers) for layer, numbers in errors} for file, errors in found["finished"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError):
            raise OutputError(f"{self._path}: expected the journal of a {self._noun}, found another content") from None

    def _write(self) -> None:
        finished = {
            file: [[layer, [error.weights, error.error]] for layer, error in errors.items()]
            for file, errors in self.finished.items()
        }
        value = {"weight_map": self._not_yet, self._key: {"identity": self._identity, "finished": finished}}
        write_json(self._path, value, overwrite=True)


def _error(weights: Any, error: Any) -> Error:
    """Raises ValueError for what no sums of squares are."""
    if not all(type(number) is float and 0 <= number < math.inf for number in (weights, error)):
        raise ValueError("no sums of squares")
    return Error(weights, error)
