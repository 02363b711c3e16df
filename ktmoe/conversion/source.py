"""The checkpoint that is read: its tensors and files, and whether they are still those that were planned with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ktmoe.conversion.beside import Beside, located, places
from ktmoe.errors import CheckpointError, FormatError, KtmoeError
from ktmoe.files.inside import Inside
from ktmoe.loaders import unchanged
from ktmoe.loaders.checkpoint import INDEX_NAME, MISTRAL_INDEX_NAME, Checkpoint
from ktmoe.loaders.safetensors_file import DTYPE_BITS
from ktmoe.loaders.tensor_file import TensorInfo
from ktmoe.messages import show

#: config.json, or Mistral's in its place.
CONFIG_NAMES = ("config.json", "params.json")
#: What says how it was quantized, beside config.json.
_QUANTIZED = ("quantize_config.json", "hf_quant_config.json", "recipe.yaml")


class Source:
    """An open checkpoint whose headers have all been read.

    path: a folder, or a .safetensors file, beside which nothing is copied. out: where the result will be, which is not copied.
    infos: of its tensors, in the order of files and of their places in them. others: names of what is copied beside them, such
    as a tokenizer's. quantized: names of what says how the source was quantized, beside config.json. config_name: config.json,
    or Mistral's params.json if that is all there is. left_out: Beside's, but for the checkpoint's own weights.
    files: of weights and of all that may be copied, by name.
    Raises CheckpointError, FormatError for a file that is not of the safetensors format.
    """

    def __init__(self, path: str | os.PathLike[str], out: Path):
        self.checkpoint = Checkpoint(path)
        try:
            folder = self.checkpoint.path
            self.folder = self.checkpoint.folder
            infos = [self.checkpoint.info(name) for name in self.checkpoint.names()]
            self.infos: list[TensorInfo] = sorted(infos, key=lambda info: (info.file.name, info.offset, info.name))
            for info in self.infos:
                if info.file.suffix == ".gguf" or info.dtype not in DTYPE_BITS:
                    raise FormatError(f"{info.file}: expected a safetensors file, found tensor {show(info.name)} {info.dtype}")
            weights = {info.file.name: info.file for info in self.infos}
            beside = Beside(folder, out) if folder == self.folder else None
            self._where = beside.files if beside else _configs(self.folder)
            self.left_out = [
                name for name in (beside.left_out if beside else ()) if name not in (*weights, INDEX_NAME, MISTRAL_INDEX_NAME)
            ]
            self.others = sorted(name for name in self._where if name not in (*CONFIG_NAMES, *_QUANTIZED))
            self.quantized = sorted(name for name in self._where if name in _QUANTIZED)
            configs = [name for name in CONFIG_NAMES if name in self._where]
            self.config_name = (*configs, CONFIG_NAMES[0])[0]
            others = (*self.others, *self.quantized, *configs[:1])
            files = weights | {name: self.folder / name for name in others}
            self.files: dict[str, Path] = dict(sorted(files.items()))
            self._found = {name: unchanged.look(path) for name, path in self.files.items()}
        except BaseException:
            self.close()
            raise

    @property
    def identity(self) -> dict[str, list[int]]:
        """Size and time of change of each file: what whoever goes on after an interruption must find again."""
        return {name: [found.nbytes, found.changed] for name, found in self._found.items()}

    def check(self) -> None:
        """Raise CheckpointError if a file is not any more what it was at the beginning: another size, time or file."""
        for name, path in self.files.items():
            unchanged.check(path, self._found[name], unchanged.look(path))

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open a file of `others` or `quantized`. Raises CheckpointError if it is another one than at the beginning."""
        try:
            with open(self._where[name].open(), "rb", buffering=0) as file:
                unchanged.check(self.files[name], self._found[name], unchanged.of(os.fstat(file.fileno())))
                yield file
        except KtmoeError:
            raise
        except OSError as error:
            raise CheckpointError(f"{self.files[name]}: expected a readable file, found {error.strerror}") from error

    def close(self) -> None:
        self.checkpoint.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _configs(folder: Path) -> dict[str, Inside]:
    """The places of the configs that count for a file of that folder, by name."""
    found = {name: located(folder / name, places(folder)) for name in CONFIG_NAMES}
    return {name: place for name, place in found.items() if place}
