"""Which .gguf files make up a model, and what their metadata says in the words of config.json."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktmoe.errors import CheckpointError
from ktmoe.loaders.gguf_file import GgufFile
from ktmoe.loaders.tensor_file import TensorFile
from ktmoe.messages import show

#: model-00001-of-00003.gguf: what the names of a split model's files begin with, the file's number, and how many there are.
_SPLIT_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")
#: Keys of metadata, and config.json's for the same; {} is general.architecture.
_KEYS = {
    "{}.expert_count": "num_experts",
    "{}.expert_used_count": "num_experts_per_tok",
    "{}.embedding_length": "hidden_size",
    "{}.expert_feed_forward_length": "moe_intermediate_size",
}
ARCHITECTURE = "general.architecture"


def open_file(path: Path, opened: dict[str, TensorFile]) -> None:
    """Open a model by one of its files: the others, if it is split, lie beside it. opened: gets the files by name.

    Raises CheckpointError also for a file of the model that is missing, or that is another model's.
    """
    _open_all(GgufFile(path), opened)


def open_folder(folder: Path, names: list[str], opened: dict[str, TensorFile]) -> None:
    """Open the one model of a folder. names: of its .gguf files. opened: gets the model's files by name.

    Files that go with a model and are none, such as a vision tower (mmproj) or an adapter, are left out. Files that are not
    split are one model if they have one architecture and no tensor in common: kt-kernel takes a file for each layer.
    Raises CheckpointError for more than one model, which names two files.
    """
    owners: dict[str, str] = {}
    for name in names:
        if name in opened:
            continue
        file = GgufFile(folder / name)
        if file.metadata.get("general.type", "model") != "model" or file.metadata.get(ARCHITECTURE) == "clip":
            file.close()
            continue
        try:
            if other := _other_model(file, opened, owners):
                found = f"{show(other)} and {show(name)}"
                raise CheckpointError(f"{folder}: expected one model, found {found}; give the path of one of the files")
        except BaseException:
            file.close()  # which `opened` lacks yet
            raise
        _open_all(file, opened)
        owners |= dict.fromkeys(file.tensors, name)
    if not opened:
        raise CheckpointError(f"{folder}: expected a GGUF model, found {show(names[0])}, which is none by its general.type")


def config(files: Mapping[str, TensorFile]) -> dict[str, Any]:
    """The files' metadata, the first file's before the others'; with what config.json calls otherwise, by its keys, too."""
    metadata: dict[str, object] = {}
    for file in files.values():
        metadata = {**file.metadata, **metadata}
    architecture = metadata.get(ARCHITECTURE)
    found = {to: metadata.get(key.format(architecture)) for key, to in _KEYS.items()}
    layers = metadata.get(f"{architecture}.block_count")
    extra = metadata.get(f"{architecture}.nextn_predict_layers", 0)  # block_count has them, num_hidden_layers has not
    if type(layers) is int and type(extra) is int:
        found["num_hidden_layers"] = layers - extra
    return metadata | {"model_type": architecture} | {key: value for key, value in found.items() if type(value) is int}


def is_gguf(config: Mapping[str, object]) -> bool:
    """Whether a checkpoint is of GGUF files, by its config."""
    return ARCHITECTURE in config


def key(name: str, found: Mapping[str, object]) -> str:
    """The key of metadata that config() calls `name`. found: what it gave."""
    return next((key.format(found.get(ARCHITECTURE)) for key, to in _KEYS.items() if to == name), name)


def _other_model(file: GgufFile, opened: Mapping[str, TensorFile], owners: Mapping[str, str]) -> str | None:
    """The name of an open file that belongs to another model than this one does; None if there is none."""
    for name, first in opened.items():
        apart = _split(first, "count", 1) > 1 or _split(file, "count", 1) > 1
        if apart or first.metadata.get(ARCHITECTURE) != file.metadata.get(ARCHITECTURE):
            return name
        break
    return next((owners[tensor] for tensor in file.tensors if tensor in owners), None)


def _open_all(file: GgufFile, opened: dict[str, TensorFile]) -> None:
    """A file that is open, and the others of its split model, in their order."""
    path = file.path
    try:
        count = _split(file, "count", 1)
        if count <= 1:
            opened[path.name] = file
            return
        match = _SPLIT_NAME.fullmatch(path.name)
        if not match or int(match[3]) != count:
            expected = f"a name that ends in -00001-of-{count:05}.gguf"
            raise CheckpointError(f"{path}: expected {expected}, as split.count is {count}")
        paths = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
        for number, each in enumerate(paths):
            if not os.path.exists(each):
                raise CheckpointError(f"{each}: expected file {number + 1} of {count} of a split model, found none")
            opened[each.name] = file if each == path else GgufFile(each)
            _check_split(opened[each.name], number, count)
    except BaseException:
        file.close()  # which `opened` may lack yet
        raise
    found = sum(len(opened[each.name].tensors) for each in paths)
    if (stated := _split(opened[paths[0].name], "tensors.count", found)) != found:
        raise CheckpointError(f"{paths[0]}: expected {stated} tensors in all files by split.tensors.count, found {found}")


def _check_split(file: TensorFile, number: int, count: int) -> None:
    for key, expected in (("no", number), ("count", count)):
        if (found := _split(file, key, -1)) != expected:
            raise CheckpointError(f"{file.path}: split.{key}: expected {expected} by its name, found {found}")


def _split(file: TensorFile, key: str, default: int) -> int:
    found = file.metadata.get(f"split.{key}", default)
    if type(found) is not int:
        raise CheckpointError(f"{file.path}: split.{key}: expected a number, found {show(found)}")
    return found
