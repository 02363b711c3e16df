"""What reads each kind of header, given as bytes: it raises a KtmoeError, or the header is good."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

import checkpoints

from ktmoe.adapters.config import CONFIG_NAME, AdapterConfig
from ktmoe.adapters.places import Places
from ktmoe.cache import manifest
from ktmoe.conversion import stated
from ktmoe.conversion.journal import Journal
from ktmoe.conversion.storage import storage
from ktmoe.loaders import model_config
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import INDEX_NAME, Checkpoint, parse_index
from ktmoe.loaders.gguf_file import GgufFile, read_metadata
from ktmoe.loaders.safetensors_file import SafetensorsFile
from ktmoe.weights.formats import MXFP4, int4

#: Whose config.json says something that a loader looks at, of tests/checkpoints.py.
SCHEMES = ("gptq", "awq", "int4", "int4 zero points", "fp8", "nvfp4", "gpt_oss", "llama4", "deepseek_v4", "mxfp8")
#: What a journal must say of the source and the options.
IDENTITY = {"source": {"model.safetensors": [1, 2]}, "options": ["mxfp4", 1], "version of ktmoe": "0"}


class Parser(ABC):
    """Reads one kind of header. folder: for its files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._fd = os.memfd_create("header")  # a file that costs no disk
        #: The file that has the bytes; messages name it.
        self.path = Path(f"/proc/self/fd/{self._fd}")

    def __call__(self, data: bytes) -> None:
        os.ftruncate(self._fd, len(data))
        os.pwrite(self._fd, data, 0)
        self.read()

    @abstractmethod
    def read(self) -> None:
        """Read what the file has now."""


class Safetensors(Parser):
    def read(self) -> None:
        SafetensorsFile(self.path).close()


class Gguf(Parser):
    """Also all of its metadata, as they are read for text."""

    def read(self) -> None:
        try:
            GgufFile(self.path).close()
        finally:
            read_metadata(self.path)


class Index(Parser):
    def read(self) -> None:
        parse_index(self.path)


class Config(Parser):
    """config.json of a checkpoint, whose scheme `which` says: as loaders, dense matrices, adapters and conversion see it."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._folders = []
        for number, scheme in enumerate(SCHEMES):
            self._folders.append(folder / f"config-{number}")
            self._folders[-1].mkdir()
            made = checkpoints.SCHEMES[scheme]
            checkpoints.write(self._folders[-1], made.layer("model.layers.0", hidden=32, intermediate=32)).close()
            (self._folders[-1] / "config.json").symlink_to(self.path)
        self.which = 0

    def __call__(self, data: bytes) -> None:
        self.which, data = data[0] % len(SCHEMES), data[1:]
        super().__call__(data)

    def read(self) -> None:
        with Checkpoint(self._folders[self.which]) as checkpoint:
            config = checkpoint.config
            infos = [checkpoint.info(name) for name in checkpoint.names()]
            for stored in (storage(MXFP4), storage(int4(32, "bf16")), None):
                stated.config(config, stored, [0], True, infos)
            stated.without(config)
            find_loader(checkpoint, layer=0).load(checkpoint, 0)
            if SCHEMES[self.which] not in ("gpt_oss", "llama4"):  # whose dense MLPs and adapters are refused for good reasons
                model_config.dense_activation(checkpoint)
                Places(config)


class Adapter(Parser):
    """adapter_config.json of PEFT."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        (folder / CONFIG_NAME).symlink_to(self.path)

    def read(self) -> None:
        config = AdapterConfig(self.folder)
        for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.10.mlp.experts.3.up_proj"):
            config.rank_and_scale(name)
        config.targets("model.layers.0.mlp.experts", "down_proj")
        config.check_version()


class Cache(Parser):
    """The manifest of a packed cache."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        (folder / manifest.NAME).symlink_to(self.path)

    def read(self) -> None:
        manifest.read(self.folder).of_checkpoint("layer")


class JournalOfConvert(Parser):
    def __init__(self, folder: Path):
        super().__init__(folder)
        self._folder = folder / "journal"
        self._folder.mkdir()
        (self._folder / INDEX_NAME).symlink_to(self.path)

    def read(self) -> None:
        journal = Journal(self._folder, IDENTITY, "convert", "conversion")
        for file in journal.finished:
            journal.keep(self._folder, file, {})


PARSERS: dict[str, type[Parser]] = {
    "safetensors": Safetensors,
    "gguf": Gguf,
    "index": Index,
    "config": Config,
    "adapter": Adapter,
    "cache": Cache,
    "journal": JournalOfConvert,
}
