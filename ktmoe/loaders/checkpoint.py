"""Checkpoint: a folder of safetensors or GGUF files, opened once; tensors come out as raw bytes, read with pread.

Index, headers and config are treated as hostile. Nothing is memory-mapped, so a file that shrinks while it is read raises
CheckpointError instead of killing the process.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import KeysView
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ktmoe import forks
from ktmoe.errors import CheckpointError, ClosedError, InputError, MissingTensorError
from ktmoe.loaders import gguf_model, unchanged
from ktmoe.loaders.gguf_file import GgufFile
from ktmoe.loaders.safetensors_file import SafetensorsFile, read_json_object
from ktmoe.loaders.staging import Staging
from ktmoe.loaders.tensor_file import TensorFile, TensorInfo, new_bytes
from ktmoe.loaders.unchanged import FileStatus
from ktmoe.messages import show

INDEX_NAME = "model.safetensors.index.json"
#: The index of Mistral's own files, which count where there is no other index.
MISTRAL_INDEX_NAME = "consolidated.safetensors.index.json"
_PICKLED = "torch's pickled files are not read, convert them to safetensors"
#: Files that other engines read, by their ending, and what to say of them.
_OTHER_FILES = {".bin": _PICKLED, ".pt": _PICKLED, ".pth": _PICKLED}
#: Files that stand beside a model's, by their ending, and what to say of them.
_BESIDE = dict.fromkeys((".json", ".txt", ".md"), "it has no weights, name the folder")
_EXPECTED = "a folder, a .safetensors file or a .gguf file"


class Checkpoint:
    """The tensors of a folder with *.safetensors files, or else *.gguf files, or of one such file, by name.

    path: a folder with model.safetensors.index.json, or else consolidated.safetensors.index.json, whose weight_map then decides
    which file holds which tensor; or a folder without them, whose *.safetensors files must not share a tensor name; or one
    .safetensors file. Or a folder whose *.gguf files are one model, or a .gguf file, beside which its model's others lie.
    config: the folder's config.json as a dict, or else Mistral's params.json with the keys that config.json would have; empty
    if there is neither. Where it has no quantization_config, the object in quantize_config.json, which AutoGPTQ writes, takes
    that place. Of GGUF files, it is their metadata, with keys that config.json would have.
    folder: where its files are.

    With an index, a file is opened and its header checked when one of its tensors is first asked for, so a partial download
    serves what it has. One descriptor is kept per opened file until close() or garbage collection.
    A file that is written while it is open, and one that is replaced before it is opened, is refused. One that is replaced or
    removed later is read as it was.
    Reads may come from several threads, and from a forked child. Raises CheckpointError, which names the file or the tensor.
    """

    config: dict[str, Any]
    folder: Path

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.after_fork()
        self._closed = False
        self._staging = Staging()
        self._index_name = INDEX_NAME
        self._open_files: dict[str, TensorFile] = {}
        self._file_of: dict[str, str] = {}
        self._there: dict[str, FileStatus] = {}  # of files that an index names, when it was read
        forks.watch(self)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def names(self) -> KeysView[str]:
        """The names of all tensors."""
        return self._file_of.keys()

    @property
    def files(self) -> list[Path]:
        """The files of its tensors and of GGUF's metadata, sorted; an index may name some that are not there."""
        return sorted(self.folder / name for name in {*self._file_of.values(), *self._open_files})

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __len__(self) -> int:
        return len(self._file_of)

    def info(self, name: str) -> TensorInfo:
        """What the header says about a tensor. Raises MissingTensorError if there is none of that name."""
        return self._find(name)[1]

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor; an index may name one that is not there. Raises MissingTensorError like info()."""
        return self.folder / self._file_name(name)

    def read(
        self, name: str, out: np.ndarray | None = None, *, byte_range: tuple[int, int] | None = None, release: bool = False
    ) -> np.ndarray:
        """A tensor's bytes as they are in the file: uint8 [nbytes].

        out: C-contiguous, writable uint8 array of exactly as many bytes, of any shape, to read into; it is returned.
        byte_range: (start, stop), to read only the tensor's bytes [start, stop).
        release: let the kernel drop the pages of what was read from its file cache afterwards. Without `out`, what is not there
        yet is then read past it.
        Raises CheckpointError if the file ends early or cannot be read, InputError for an `out` or a `byte_range` that does not
        fit.
        """
        file, info = self._find(name)
        start, stop = _range(info, byte_range)
        if out is None and release:
            return file.take(info, start, stop, self._staging)
        if out is None:
            out = new_bytes(stop - start, f"{self.path}: tensor {show(name)}")
        elif not isinstance(out, np.ndarray) or out.dtype != np.uint8 or out.nbytes != stop - start:
            found = f"{out.dtype} {list(out.shape)}" if isinstance(out, np.ndarray) else type(out).__name__
            raise InputError(f"{name}: out: expected a uint8 array of {stop - start} bytes, found {found}")
        elif not out.flags.carray:
            found = f"strides {out.strides}, writable {out.flags.writeable}"
            raise InputError(f"{name}: out: expected a C-contiguous, writable array, found {found}")
        file.read_into(out, info, start=start, release=release)
        return out

    def release(self, name: str, *, byte_range: tuple[int, int] | None = None) -> None:
        """Let the kernel drop a tensor's pages, or a range's, from its file cache (posix_fadvise); only ever a hint."""
        file, info = self._find(name)
        file.release(info, *_range(info, byte_range))

    def close(self) -> None:
        """Close all files, each as soon as no thread reads from it. Reading afterwards raises ClosedError."""
        with self._lock:
            self._closed = True
            for file in self._open_files.values():
                file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self)} tensors)"

    def _open(self) -> None:
        files = self._open_files
        if os.path.isdir(self.path):
            self.folder = self.path
            self._open_folder(self.path)
        elif os.path.exists(self.path):
            self.folder = self.path.parent
            if about := (_OTHER_FILES | _BESIDE).get(self.path.suffix):
                raise CheckpointError(f"{self.path}: expected {_EXPECTED}, found {self.path.suffix}: {about}")
            if self.path.suffix.lower() == ".gguf":
                gguf_model.open_file(self.path, files)
            else:
                files[self.path.name] = SafetensorsFile(self.path)
        else:
            raise CheckpointError(f"{self.path}: expected {_EXPECTED}, found {_why_absent(self.path)}")
        for name, file in files.items():
            if len(files) > 1:  # opened one after the other: they belong together if all of them are there now
                unchanged.check(file.path, file.status, unchanged.look(file.path))
            for tensor in file.tensors:
                other = self._file_of.setdefault(tensor, name)
                if other != name:
                    found = f"{other}, {name}"
                    raise CheckpointError(f"{self.folder}: tensor {show(tensor)}: expected in one file, found in {found}")
        of_gguf = any(isinstance(file, GgufFile) for file in files.values())
        self.config = gguf_model.config(files) if of_gguf else _read_config(self.folder)

    def _open_folder(self, folder: Path) -> None:
        """Read the folder's index, or else open its files."""
        index = next((name for name in (INDEX_NAME, MISTRAL_INDEX_NAME) if _is_there(folder / name)), None)
        if index:
            self._index_name, self._file_of = index, parse_index(folder / index)
            self._there = _statuses(folder, set(self._file_of.values()))
        elif names := _list_files(folder, ".safetensors"):
            for name in names:
                self._open_files[name] = SafetensorsFile(folder / name)
        elif names := _list_files(folder, ".gguf"):
            gguf_model.open_folder(folder, names, self._open_files)
        else:
            expected = f"{INDEX_NAME}, *.safetensors or *.gguf files in this folder"
            raise CheckpointError(f"{folder}: expected {expected}, found {_instead(folder)}")

    def _file_name(self, name: str) -> str:
        found = self._file_of.get(name)
        if found is None:
            raise MissingTensorError(f"{self.path}: tensor {show(name)}: expected in this checkpoint, found {len(self)} others")
        return found

    def _find(self, name: str) -> tuple[TensorFile, TensorInfo]:
        file_name = self._file_name(name)
        file = self._opened(file_name, name)
        if file is None:
            file = self._keep(file_name, name, self._open_indexed(file_name, name))  # its large header takes seconds
        info = file.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"{file.path}: tensor {show(name)}: expected here by {self._index_name}, found no such tensor"
            )
        return file, info

    def _opened(self, file_name: str, wanted: str) -> TensorFile | None:
        """The open file of that name, or None. wanted: the tensor, for messages."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.path}: tensor {show(wanted)} was asked for after close()")
            return self._open_files.get(file_name)

    def _keep(self, file_name: str, wanted: str, fresh: TensorFile) -> TensorFile:
        """The open file of that name: `fresh`, if there is no other; else `fresh` is closed."""
        kept = None
        try:
            with self._lock:
                if self._closed:
                    raise ClosedError(f"{self.path}: tensor {show(wanted)} was asked for after close()")
                kept = self._open_files.setdefault(file_name, fresh)
        finally:
            if kept is not fresh:
                fresh.close()
        return kept

    def _open_indexed(self, file_name: str, wanted: str) -> SafetensorsFile:
        path = self.folder / file_name
        if not os.path.exists(path):
            raise MissingTensorError(f"{path}: expected by {self._index_name} for tensor {show(wanted)}, found no such file")
        file = SafetensorsFile(path)
        try:
            was = self._there.get(file_name, file.status)
            unchanged.check(path, was._replace(inode=file.status.inode), file.status)  # some remote disks number files anew
            for tensor in file.tensors:
                owner = self._file_of.get(tensor, file_name)  # a tensor that the index leaves out is not the checkpoint's
                if owner != file_name:
                    found = f"expected in {owner} by {self._index_name}, found here"
                    raise CheckpointError(f"{path}: tensor {show(tensor)}: {found}")
        except BaseException:
            file.close()
            raise
        return file


def _is_there(path: Path) -> bool:
    """Whether there is something of that name. Raises CheckpointError if the system cannot say: it may be there."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, found {error.strerror}") from error
    return True


def _statuses(folder: Path, names: set[str]) -> dict[str, FileStatus]:
    """Those of files of these names that are there. What cannot be looked at is refused when it is opened."""
    found: dict[str, FileStatus] = {}
    with suppress(OSError):
        for name in names.intersection(os.listdir(folder)):  # a hostile index names many files
            with suppress(OSError):
                found[name] = unchanged.of(os.stat(folder / name))
    return found


def _why_absent(path: Path) -> str:
    try:
        os.stat(path)
    except PermissionError as error:
        return error.strerror or str(error)
    except (OSError, ValueError):  # ValueError: a name with a NUL or a lone surrogate
        pass
    return "nothing of that name"


def _range(info: TensorInfo, byte_range: tuple[int, int] | None) -> tuple[int, int]:
    """(start, stop) within a tensor's bytes."""
    if byte_range is None:
        return 0, info.nbytes
    start, stop = map(operator.index, byte_range)
    if not 0 <= start <= stop <= info.nbytes:
        raise InputError(f"{info.name}: byte_range: expected 0 <= start <= stop <= {info.nbytes} bytes, found {(start, stop)}")
    return start, stop


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json, or else params.json; with quantize_config.json in the place of a quantization_config that is not there."""
    found = _read_main_config(folder)
    if "quantization_config" not in found and _is_there(folder / "quantize_config.json"):
        found["quantization_config"] = read_json_object(folder / "quantize_config.json")
    return found


def _read_main_config(folder: Path) -> dict[str, Any]:
    """config.json, or else params.json, of which the numbers of experts and the quantization get the names of config.json."""
    if _is_there(folder / "config.json"):
        return read_json_object(folder / "config.json")
    if not _is_there(folder / "params.json"):
        return {}
    params = read_json_object(folder / "params.json")
    experts = params.get("moe")
    names = {"hidden_act": params.get("activation"), "quantization_config": params.get("quantization")}
    names["num_experts"] = experts.get("num_experts") if isinstance(experts, dict) else None
    return {key: value for key, value in names.items() if value is not None} | params


def _list_files(folder: Path, ending: str) -> list[str]:
    try:
        files = [name for name in os.listdir(folder) if name.endswith(ending)]
    except OSError as error:
        raise CheckpointError(f"{folder}: expected a readable folder, found {error.strerror}") from error
    return sorted(name for name in files if not name.startswith("."))  # macOS leaves "._model.safetensors" on foreign disks


def _instead(folder: Path) -> str:
    """What a folder has in the place of files that are read, for messages."""
    for ending, about in _OTHER_FILES.items():
        if name := next((name for name in sorted(os.listdir(folder)) if name.endswith(ending)), None):
            return f"{show(name)}: {about}"
    return "none"


def parse_index(path: Path) -> dict[str, str]:
    """weight_map of an index: tensor name -> file name in the same folder."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: weight_map: expected an object, found {show(weight_map)}")
    good: set[str] = set()
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{path}: weight_map: tensor {show(tensor)}: expected a file name, found {show(file)}")
        if file not in good and (file in ("", ".", "..") or "/" in file or "\\" in file):
            raise CheckpointError(f"{path}: weight_map: tensor {show(tensor)}: expected a bare file name, found {show(file)}")
        good.add(file)
    return weight_map
