"""Loader: turns one naming scheme's tensors into ExpertWeights. It knows no backend and no instruction set."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from ktmoe.errors import MissingTensorError, UnavailableError
from ktmoe.experts import ExpertWeights
from ktmoe.loaders import registry
from ktmoe.loaders.checkpoint import Checkpoint

#: What Loader.detect gives for a checkpoint that has its names, and weights that it refuses.
NAMED = 0.1


class Loader(ABC):
    """One checkpoint naming scheme."""

    @abstractmethod
    def detect(self, checkpoint: Checkpoint) -> float:
        """How surely this loader reads that checkpoint, 0 (not at all) to 1.

        By tensor names, dtypes, shapes and config; no tensor is read. NAMED where no other loader's names fit but the weights
        are not what this one reads: unless another one claims the checkpoint, load() then says what is wrong with it.
        May raise MissingTensorError where what would decide has not been downloaded.
        """

    @abstractmethod
    def layers(self, checkpoint: Checkpoint) -> list[int | str]:
        """The layers that have routed experts, in the model's order: ints, and names such as "mtp.0"."""

    @abstractmethod
    def load(self, checkpoint: Checkpoint, layer: int | str) -> ExpertWeights:
        """One layer's experts, read lazily. Raises MissingTensorError for a layer or tensor that does not exist."""


def find_loader(checkpoint: Checkpoint, name: str = "auto") -> Loader:
    """The loader of that name, or the one that is surest of this checkpoint.

    Raises UnavailableError if none is, MissingTensorError if that is for want of a file.
    """
    if name != "auto":
        return registry.get(name)
    scores, absent = {}, None
    for candidate in registry.names():
        try:
            scores[candidate] = registry.get(candidate).detect(checkpoint)
        except MissingTensorError as error:  # a partial download: it may still be another loader's
            scores[candidate], absent = 0.0, absent or error
    best = max(scores, key=scores.__getitem__, default=None)
    if best is None or scores[best] <= 0:
        if absent is not None:
            raise absent
        raise UnavailableError(
            f"{checkpoint.path}: no loader recognises this checkpoint; tried {', '.join(scores)}. "
            "Pass loader=... to choose one, or register one for its naming scheme."
        )
    return registry.get(best)


def load_experts(path: str | os.PathLike, layer: int | str, *, loader: str = "auto") -> ExpertWeights:
    """One layer's experts from a checkpoint folder (or a single .safetensors file); a matrix is read when it is asked for.

    layer: its number, or a name such as "mtp.0". loader: a name, or "auto" to go by the tensors.
    Raises CheckpointError, MissingTensorError, FormatError; UnavailableError if no loader recognises the checkpoint.
    """
    checkpoint = Checkpoint(path)
    return find_loader(checkpoint, loader).load(checkpoint, layer)
