"""A view of a checkpoint: a temporary folder that every tool of transformers loads as a model whose experts ktmoe computes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from ktmoe.errors import CheckpointError
from ktmoe.loaders.safetensors_file import read_json_object
from ktmoe.loaders.tensor_file import open_regular
from ktmoe.transformers.config import Config

CONFIG_NAME = "config.json"
#: What a model on the Hub needs. Copies of the weights in other formats are in its subfolders or have other names.
_NEEDED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_NOT_NEEDED = ("*/*", "consolidated*")


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
    Raises what folder_of() raises, CheckpointError for a config.json that is none, InputError for the options.
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


def folder_of(path: str | os.PathLike) -> Path:
    """A checkpoint's folder; what is no folder here is the id of a model on the Hub, whose files are downloaded if need be.

    Raises CheckpointError if it is neither, for a folder without config.json, and for files that git-lfs has not fetched.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(str(path), allow_patterns=_NEEDED, ignore_patterns=_NOT_NEEDED))
        except HFValidationError:
            raise CheckpointError(f"{path}: expected a folder or the id of a model on the Hub, found neither") from None
        except OSError as error:  # the base of the Hub's own errors
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"{path}: expected a folder or a model that the Hub gives: {reason}") from None
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(f"{folder}: expected a model's folder with {CONFIG_NAME}, found no such file")
    _check_files(folder)
    return folder


def _check_files(folder: Path) -> None:
    """Raise CheckpointError for a git-lfs pointer in the place of a file that transformers would read."""
    for file in (file for pattern in _NEEDED for file in folder.glob(pattern)):
        if file.is_file() and not file.name.startswith("consolidated"):
            os.close(open_regular(file)[0])


def _quantization(config: dict) -> dict | None:
    """The checkpoint's own quantization_config; models of text and images may have it in text_config."""
    nested = config.get("text_config")
    return config.get("quantization_config") or (nested.get("quantization_config") if isinstance(nested, dict) else None)


def _name(path: str | os.PathLike) -> str:
    """The Hub id, or the folder's own name. transformers' server takes what follows an @ for a revision."""
    folder = Path(path).expanduser()
    name = os.path.basename(os.path.abspath(folder)) if folder.is_dir() else str(path)
    return name.replace("@", "-") or "model"
