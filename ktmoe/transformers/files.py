"""The files that transformers reads of a model, beside those that ktmoe reads: what has to be in them."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from ktmoe.errors import CheckpointError, MissingTensorError, UnavailableError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.transformers.folder import is_gguf_model
from ktmoe.transformers.modules import Experts

#: The most parameters in a byte: where each has 2 bits.
_MOST_IN_A_BYTE = 4


def folder_of_files(checkpoint_files: Sequence[str] | None) -> str:
    """Where transformers found the checkpoint."""
    if not checkpoint_files:
        raise UnavailableError("expected a checkpoint's files, found a state_dict or none")
    return os.path.dirname(checkpoint_files[0])


def gguf_files(path: str | os.PathLike[str] | None) -> list[Path]:
    """The files of a GGUF checkpoint; none of another one."""
    if path is None or not is_gguf_model(path):
        return []
    with Checkpoint(path) as checkpoint:
        return checkpoint.files


def has_files(path: str | os.PathLike[str], files: Sequence[str] | None) -> bool:
    """Whether a folder has these very files, which may be links to it, as a view's are."""
    try:
        return all(os.path.samefile(os.path.join(path, os.path.basename(file)), file) for file in files or ())
    except OSError:
        return False


def check_size(model: PreTrainedModel, found_experts: Sequence[Experts], files: Sequence[str] | None) -> None:
    """Raise CheckpointError for a model that is larger than all its files can be.

    transformers would make such parameters, at random, before it says that their sizes are not those of the checkpoint. Experts
    do not count: other files may have them.
    """
    experts = {f"{each.name}.{name}" for each in found_experts for name in each.parameters}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if name not in experts}
    nbytes = sum(os.path.getsize(file) for file in files or ())
    if files and (found := sum(sizes.values())) > _MOST_IN_A_BYTE * nbytes:
        largest = max(sizes, key=sizes.__getitem__)
        shape = list(model.get_parameter(largest).shape)
        raise CheckpointError(
            f"{folder_of_files(files)}: expected at most {_MOST_IN_A_BYTE} parameters for each of {nbytes} bytes, found "
            f"{found} by config.json, such as {largest} {shape}"
        )


def check_parameters(
    path: str | os.PathLike[str], model: PreTrainedModel, files: Sequence[str], taken: Collection[str]
) -> None:
    """Check that the files have each parameter of a model, in its shape, and no others.

    transformers would draw a missing one at random, and leave out another one. path: of the model, for messages. taken: modules
    that ktmoe fills. Raises MissingTensorError, CheckpointError.
    """
    name = type(model).__name__
    with Checkpoint(folder_of_files(files)) as written:
        shapes = {each: written.info(each).shape for each in written.names()}
    for key, source in model.all_tied_weights_keys.items():
        if source in shapes:
            shapes[key] = shapes[source]
    others, expected = tuple(f"{each}." for each in taken), model.state_dict()
    for parameter, tensor in expected.items():
        if parameter.startswith(others):
            continue
        if parameter not in shapes:
            raise MissingTensorError(f"{path}: expected a tensor for {parameter} of {name}, found none")
        if shapes[parameter] != tuple(tensor.shape):
            found = f"{list(tensor.shape)}, found {list(shapes[parameter])}"
            raise CheckpointError(f"{path}: the tensor for {parameter} of {name}: expected {found}")
    if other := min(shapes.keys() - expected.keys(), default=None):
        raise CheckpointError(f"{path}: expected tensors for the parameters of {name}, found one for {other}")
