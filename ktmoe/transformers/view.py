"""A view of a checkpoint: a temporary folder that every tool of transformers loads as a model whose experts ktmoe computes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktmoe.loaders.safetensors_file import read_json_object
from ktmoe.transformers.config import Config, stated
from ktmoe.transformers.folder import CONFIG_NAME, model_folder
from ktmoe.transformers.gguf.folder import model_name


@dataclass(frozen=True)
class View:
    """root: the temporary folder. name: the model's, which is a folder in there: after the checkpoint's own, or the Hub id.

    folder: the checkpoint's; for GGUF, a temporary one, too.
    """

    root: Path
    name: str
    folder: Path

    @property
    def path(self) -> Path:
        return self.root / self.name


@contextmanager
def view(path: str | os.PathLike[str], *, progress: bool = False, **options: Any) -> Iterator[View]:
    """Make a view of a checkpoint folder, a .gguf file, or a model on the Hub, and remove it afterwards.

    Its files are links to the checkpoint's. Its config.json has the checkpoint's quantization_config within ktmoe's, so
    ktmoe.transformers must have been imported by whoever loads it.
    progress: draw a bar on stderr while the experts load. options: as ktmoe.transformers.Config has them.
    Raises what model_folder() raises, and InputError for the options.
    """
    everything = options.get("dense") == "torch"
    with model_folder(path, everything=everything) as folder, tempfile.TemporaryDirectory(prefix="ktmoe-view-") as root:
        config = read_json_object(folder / CONFIG_NAME)
        of = stated(config)
        ours = Config(**options, path=of["path"] or folder.absolute(), inner=of["inner"]).to_dict()
        config["quantization_config"] = ours | {"progress": progress}
        made = View(Path(root), _name(path), folder)
        made.path.mkdir(parents=True)
        for file in folder.iterdir():
            if file.name != CONFIG_NAME:
                (made.path / file.name).symlink_to(file.absolute())
        (made.path / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
        yield made


def _name(path: str | os.PathLike[str]) -> str:
    """The Hub id, or a name after the folder or the file."""
    return model_name(path) if Path(path).expanduser().exists() else str(path).replace("@", "-")
