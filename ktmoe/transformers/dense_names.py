"""What a model's dense matrices are called in its checkpoint, by the renamings that transformers itself reads it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from ktmoe.loaders import one_matrix
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.dense import find_matrix
from ktmoe.loaders.one_matrix import StoredMatrix


@dataclass(frozen=True)
class StoredParameter:
    """A model's matrix as a checkpoint has it.

    bases: what the names of its tensors begin with; empty for parts of stored matrices. plain: whether transformers reads it by
    itself. find: gives the stored matrices whose rows, one after another, are its rows. It raises a KtmoeError.
    order: which of these rows each row of the parameter is; None: they are in order.
    """

    bases: tuple[str, ...]
    plain: bool
    find: Callable[[], list[StoredMatrix]]
    order: np.ndarray | None = None


def stored_parameters(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, StoredParameter]:
    """By the parameter's name, the matrices that a parameter takes as they are.

    Those that transformers splits, joins or transposes are left out. A matrix of any scheme counts as its weight.
    """
    bases = set(one_matrix.bases(checkpoint))
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    parameters, prefix = model.state_dict(), model.base_model_prefix
    found = {}
    # all names in this order, since a renaming may wait for one that comes before
    for weight in sorted({_weight(name, bases) for name in checkpoint.names()}, key=dot_natural_key):
        renamed, converter = rename_source_key(weight, renamings, converters, prefix, parameters)
        if renamed not in parameters and weight in parameters:
            renamed, converter = rename_source_key(weight, [], [], prefix, parameters)
        base = weight.removesuffix(".weight")
        if converter is None and renamed in parameters and base in bases:
            found[renamed] = StoredParameter((base,), is_plain(checkpoint, base), _finder(checkpoint, base))
    return found


def _finder(checkpoint: Checkpoint, base: str) -> Callable[[], list[StoredMatrix]]:
    return lambda: [find_matrix(checkpoint, base)]


def is_plain(checkpoint: Checkpoint, base: str) -> bool:
    """Whether a matrix is stored as one tensor of numbers, which transformers reads by itself.

    A module may have more tensors, such as a router's e_score_correction_bias, if none says what the numbers mean.
    """
    there = set(one_matrix.endings(checkpoint, base))
    if ".weight" not in there or checkpoint.info(f"{base}.weight").dtype not in ("BF16", "F16", "F32"):
        return False
    return not any(ending.startswith(".weight_") or "scale" in ending or "zero" in ending for ending in there)


def _weight(name: str, bases: set[str]) -> str:
    base = name.rpartition(".")[0]
    return f"{base}.weight" if base in bases and not name.endswith(".bias") else name
