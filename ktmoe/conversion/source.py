"""The checkpoint that is read: its tensors and files, and whether they are still those that were planned with."""

from __future__ import annotations

import os
from pathlib import Path

from ktmoe.errors import CheckpointError, FormatError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.safetensors_file import DTYPE_BITS, TensorInfo
from ktmoe.messages import show

#: config.json, or Mistral's in its place.
CONFIG_NAMES = ("config.json", "params.json")
#: What is not copied: weights of the same model in other files.
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".index.json")
#: What says how it was quantized, beside config.json.
_QUANTIZED = ("quantize_config.json", "hf_quant_config.json", "recipe.yaml")


class Source:
    """An open checkpoint whose headers have all been read.

    infos: of its tensors, in the order of files and of their places in them. others: names of what is copied beside them, such
    as a tokenizer's. quantized: names of what says how the source was quantized, beside config.json. config_name: config.json,
    or Mistral's params.json if that is all there is. files: all of these, by name.
    Raises CheckpointError, FormatError for a file that is not of the safetensors format.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.checkpoint = Checkpoint(path)
        try:
            folder = self.checkpoint.path
            self.folder = folder if folder.is_dir() else folder.parent
            infos = [self.checkpoint.info(name) for name in self.checkpoint.names()]
            self.infos: list[TensorInfo] = sorted(infos, key=lambda info: (info.file.name, info.offset, info.name))
            for info in self.infos:
                if info.file.suffix == ".gguf" or info.dtype not in DTYPE_BITS:
                    raise FormatError(f"{info.file}: expected a safetensors file, found tensor {show(info.name)} {info.dtype}")
            names = self._names() if folder.is_dir() else []
            self.others = [name for name in names if name not in (*CONFIG_NAMES, *_QUANTIZED)]
            self.quantized = [name for name in names if name in _QUANTIZED]
            configs = [name for name in CONFIG_NAMES if (self.folder / name).is_file()]
            self.config_name = (*configs, CONFIG_NAMES[0])[0]
            others = (*self.others, *self.quantized, *configs[:1])
            paths = {info.file for info in self.infos} | {self.folder / name for name in others}
            self.files: dict[str, Path] = {path.name: path for path in sorted(paths)}
            self._found = {name: _status(path) for name, path in self.files.items()}
        except BaseException:
            self.close()
            raise

    @property
    def identity(self) -> dict[str, list[int]]:
        """Size and time of change of each file: what whoever goes on after an interruption must find again."""
        return {name: [size, changed] for name, (size, changed, _) in self._found.items()}

    def check(self) -> None:
        """Raise CheckpointError if a file is not any more what it was at the beginning: another size, time or file."""
        for name, path in self.files.items():
            if (found := _status(path)) != self._found[name]:
                what = "size", "time of change", "inode"
                (label, was, now) = next(
                    each for each in zip(what, self._found[name], found, strict=True) if each[1] != each[2]
                )
                raise CheckpointError(f"{path}: changed while it was read: {label}: expected {was}, found {now}")

    def close(self) -> None:
        self.checkpoint.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _names(self) -> list[str]:
        """Files of the folder that may be copied."""
        with os.scandir(self.folder) as entries:
            names = [entry.name for entry in entries if entry.is_file()]
        return sorted(name for name in names if not name.startswith(".") and not name.endswith(_WEIGHTS))


def _status(path: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"{path}: expected the file that was read, found {error.strerror}") from error
    return status.st_size, status.st_mtime_ns, status.st_ino
