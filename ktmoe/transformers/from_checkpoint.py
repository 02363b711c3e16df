"""Experts that ktmoe's loaders read, in the background, while transformers loads the rest of the model."""

from __future__ import annotations

import os
import re

from transformers import PreTrainedModel

from ktmoe.backends.base import Progress
from ktmoe.errors import UnavailableError
from ktmoe.experts import ExpertWeights
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.model import MoEModel
from ktmoe.transformers.function import adopt, attach
from ktmoe.transformers.modules import Experts
from ktmoe.transformers.options import Options


def readable(path: str | os.PathLike[str], found: list[Experts]) -> list[ExpertWeights]:
    """The weights of these modules, by their layers' numbers; none is read. Raises a KtmoeError if no loader reads them."""
    layers = [experts.layer for experts in found]
    if None in layers or len(set(layers)) < len(layers):
        names = ", ".join(experts.name for experts in found)
        raise UnavailableError(f"{path}: expected one module of experts in each layer, found {names}")
    with Checkpoint(path) as checkpoint:
        return [find_loader(checkpoint, layer=layer).load(checkpoint, layer) for layer in layers]


class FromCheckpoint:
    """found: a model's modules of experts, which readable() reads. Raises what MoEModel.from_checkpoint does."""

    def __init__(self, path: str | os.PathLike[str], found: list[Experts], options: Options, progress: Progress | None):
        self._found = found
        layers = [experts.layer for experts in found]
        self._loading = MoEModel.from_checkpoint(
            path,
            layers,
            **options.packing,
            progress=progress,
            wait=False,
            cache=options.cache,
            distribution=options.distributed,
        )

    def start(self, model: PreTrainedModel) -> None:
        """Take the parameters away: the experts' tensors then fit none, and transformers does not read them."""
        for experts in self._found:
            adopt(experts)
        # nor is it to warn of them
        known = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*known, *(name for experts in self._found for name in _names(experts))}

    def finish(self) -> None:
        """Wait until all experts are packed, and attach them."""
        self._loading.wait()
        for experts in self._found:
            attach(experts, self._loading[experts.layer])


def _names(experts: Experts) -> tuple[str, str]:
    """Regular expressions of the names that these experts' tensors may have, as transformers renames them and as they are."""
    return rf"^{re.escape(experts.name)}\.", rf"(^|\.)layers\.{experts.layer}\.(.*\.)?experts\."
