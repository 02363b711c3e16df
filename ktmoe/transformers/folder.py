"""A model's folder: which path is one, which is an id of the Hugging Face Hub, and whether its config.json can be built."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ktmoe.errors import CheckpointError, KtmoeError
from ktmoe.loaders.checkpoint import INDEX_NAME, Checkpoint
from ktmoe.loaders.safetensors_file import read_json_object
from ktmoe.loaders.tensor_file import open_regular
from ktmoe.messages import printable, show
from ktmoe.transformers.gguf.folder import gguf_folder

CONFIG_NAME = "config.json"
#: What a model on the Hub needs. Copies of the weights in other formats are in its subfolders or have other names.
_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_NEEDED = ("*.safetensors", *_BESIDE)
_NOT_NEEDED = ("*/*", "consolidated*")
#: torch's own files, which transformers reads where there is neither the usual file of safetensors nor an index.
_PICKLED = "pytorch_model*.bin"
_GGUF = ".gguf"

#: Numbers of config.json that transformers counts up to, in Python, before a weight is read; and the most of them. The deepest
#: model known has 126 layers.
_MOST_LAYERS = 1000
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "encoder_layers", "decoder_layers", "depth")
_MORE_LAYERS = ("num_encoder_layers", "num_decoder_layers", "num_nextn_predict_layers", "num_mtp_layers")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_MOST = dict.fromkeys((*_LAYERS, *_MORE_LAYERS), _MOST_LAYERS) | dict.fromkeys((*_EXPERTS, "num_labels"), 100_000)
#: The sizes by which transformers makes buffers, before a weight is read: endings of their keys, and the most of them.
_SIZES, _MOST_OF_SIZE = ("_dim", "hidden_size", "d_model", "n_embd"), 2**24

logger = logging.getLogger(__name__)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder. If not, it is the id of a model on the Hub, and a line of the log says who is asked for it.

    Raises CheckpointError if it cannot be an id either, as a file, or what ends in .gguf or .safetensors.
    """
    name = os.fspath(path)
    if os.path.isdir(os.path.expanduser(name)):
        return True
    ending = os.path.splitext(name)[1].lower()
    if os.path.lexists(os.path.expanduser(name)) or ending in (_GGUF, ".safetensors"):
        found = "another file" if os.path.isfile(os.path.expanduser(name)) else "neither"
        raise CheckpointError(f"{name}: expected a .gguf file, or a model's folder with {CONFIG_NAME}, found {found}")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise CheckpointError(f"{name}: expected a folder or the id of a model on the Hub, found neither") from None
    logger.warning("%s is no folder here: asking the Hugging Face Hub for it", printable(name))
    return False


def is_gguf_model(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a .gguf file, or a folder whose weights are in such files alone."""
    place = Path(path).expanduser()
    if not place.is_dir():
        return place.suffix.lower() == _GGUF and place.exists()
    return any(place.glob(f"*{_GGUF}")) and not any(any(place.glob(other)) for other in ("*.safetensors", _PICKLED))


@contextmanager
def model_folder(path: str | os.PathLike[str], *, everything: bool = False) -> Iterator[Path]:
    """A model's folder, as transformers reads it; for GGUF a temporary one, which is removed afterwards.

    path: a folder, a .gguf file, or the id of a model on the Hub. everything: gguf_folder()'s.
    Raises what folder_of() and gguf_folder() raise.
    """
    if is_gguf_model(path):
        with gguf_folder(Path(path).expanduser(), everything) as folder:
            yield folder
    else:
        yield folder_of(path)


def folder_of(path: str | os.PathLike[str]) -> Path:
    """A checkpoint's folder; what is no folder here is the id of a model on the Hub, whose files are downloaded if need be.

    Raises what is_folder() and read_config() raise, and CheckpointError for a model that the Hub does not give, and for files
    beside the weights that git-lfs has not fetched.
    """
    folder = Path(path).expanduser()
    if not is_folder(path):
        try:
            folder = Path(snapshot_download(str(path), allow_patterns=_NEEDED, ignore_patterns=_NOT_NEEDED))
        except Exception as error:  # the Hub's own errors, and those of its HTTP client
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"{path}: expected a folder or a model that the Hub gives: {reason}") from None
    read_config(folder)
    _check_fetched(file for pattern in _BESIDE for file in folder.glob(pattern))
    return folder


def _check_fetched(files: Iterable[Path]) -> None:
    """Raise CheckpointError for a git-lfs pointer in the place of one that is there."""
    for file in files:
        if file.is_file() and not file.name.startswith("consolidated"):
            os.close(open_regular(file)[0])


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json.

    Raises CheckpointError if there is none, if a model of it would take minutes to build, and for weights that git-lfs has not
    fetched.
    """
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise CheckpointError(f"{folder}: expected a model's folder with {CONFIG_NAME}, found no such file")
    config = read_json_object(file)
    files, layers = _weights(folder)
    _check_fetched(files)
    check_numbers(config, str(file), layers)
    return config


def check_numbers(config: dict[str, Any], name: str, layers: int = _MOST_LAYERS) -> None:
    """Raise CheckpointError for a config's numbers that no model has. name: the config's, in messages.

    layers: the most that its text model may have.
    """
    tables = [("", config)]
    while tables:
        where, table = tables.pop()
        for key, value in table.items():
            if isinstance(value, dict):
                tables.append((key, value))
            elif isinstance(key, str) and isinstance(value, int) and value > (most := _most(where, key, layers)):
                raise CheckpointError(f"{name}: {key}: expected at most {most}, found {show(value)}")


def _most(where: str, key: str, layers: int) -> float:
    """The most that may be under a key of the object `where`, which is "" for the whole config."""
    if key == "num_hidden_layers" and where in ("", "text_config"):
        return layers
    return _MOST.get(key, _MOST_OF_SIZE if key.endswith(_SIZES) else math.inf)


def _weights(folder: Path) -> tuple[list[Path], int]:
    """The files of weights that transformers reads, and the most layers that their tensors can be of.

    Every layer has a tensor, whose name has its number.
    """
    usual = any(os.path.lexists(folder / name) for name in ("model.safetensors", INDEX_NAME))
    if not usual and (pickled := list(folder.glob(_PICKLED))):
        return pickled, _MOST_LAYERS
    try:
        with Checkpoint(folder) as checkpoint:
            files, segments = checkpoint.files, {segment for name in checkpoint.names() for segment in name.split(".")}
    except KtmoeError:  # whoever reads the weights says what is wrong with them
        return [folder / INDEX_NAME, *folder.glob("*.safetensors")], _MOST_LAYERS
    numbers = [int(segment) for segment in segments if segment.isascii() and segment.isdecimal() and len(segment) < 7]
    return files, min(max(numbers) + 1, _MOST_LAYERS) if numbers else _MOST_LAYERS
