"""A view of a checkpoint: a temporary folder that every tool of transformers loads as a model whose experts ktmoe computes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ktmoe.loaders.safetensors_file import read_json_object
from ktmoe.transformers.config import Config
from ktmoe.transformers.folder import CONFIG_NAME, folder_of


@dataclass(frozen=True)
class View:
    """root: the temporary folder. name: the model's, which is a folder in there: the checkpoint folder's own, or the Hub id.

    folder: the checkpoint's.
    """

    root: Path
    name: str
    folder: Path

    @property
    def path(self) -> Path:
        return self.root / self.name


@contextmanager
def view(path: str | os.PathLike, *, progress: bool = False, **options) -> Iterator[View]:
    """Make a view of a checkpoint folder, or of a model on the Hub, and remove it afterwards.

    Its files are links to the checkpoint's. Its config.json has the checkpoint's quantization_config within ktmoe's, so
    ktmoe.transformers must have been imported by whoever loads it.
    progress: draw a bar on stderr while the experts load. options: as ktmoe.transformers.Config has them.
    Raises what folder_of() raises, and InputError for the options.
    """
    folder = folder_of(path)
    config = read_json_object(folder / CONFIG_NAME)
    ours = Config(**options, path=folder.absolute(), inner=_quantization(config)).to_dict()
    config["quantization_config"] = ours | {"progress": progress}
    with tempfile.TemporaryDirectory(prefix="ktmoe-view-") as root:
        made = View(Path(root), _name(path), folder)
        made.path.mkdir(parents=True)
        for file in folder.iterdir():
            if file.name != CONFIG_NAME:
                (made.path / file.name).symlink_to(file.absolute())
        (made.path / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
        yield made


def _quantization(config: dict) -> dict | None:
    """The checkpoint's own quantization_config; models of text and images may have it in text_config."""
    nested = config.get("text_config")
    return config.get("quantization_config") or (nested.get("quantization_config") if isinstance(nested, dict) else None)


def _name(path: str | os.PathLike) -> str:
    """The Hub id, or the folder's own name. transformers' server takes what follows an @ for a revision."""
    folder = Path(path).expanduser()
    name = os.path.basename(os.path.abspath(folder)) if folder.is_dir() else str(path)
    return name.replace("@", "-") or "model"
