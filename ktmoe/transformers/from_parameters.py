"""Experts that transformers reads: ktmoe packs each layer's parameters while the model is loaded."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps

from ktmoe.distributed.layer import DistributedLayer
from ktmoe.errors import CheckpointError, KtmoeError
from ktmoe.layer import MoELayer
from ktmoe.transformers.function import adopt, attach, check_packable, pack_tensors
from ktmoe.transformers.modules import Experts
from ktmoe.transformers.options import Options


class FromParameters(ConversionOps):
    """Packs a layer's experts as soon as transformers has read its last parameter, and keeps no parameter.

    refused: why ktmoe's loaders do not read these experts; None if they were not asked to. Raises what check_packable() does.
    """

    def __init__(self, found: list[Experts], options: Options, refused: KtmoeError | None):
        check_packable(found, options)
        self._options = options
        self._refused = refused
        self._experts = {experts.name: experts for experts in found}
        self._resources = ExitStack()
        self._report = self._resources.enter_context(options.reporting(sum(experts.nbytes for experts in found)))
        self._read: dict[str, dict[str, torch.Tensor]] = {experts.name: {} for experts in found}
        self._packed: list[tuple[Experts, MoELayer | DistributedLayer]] = []
        self._error: Exception | None = None

    def wants(self, parameter: str) -> bool:
        """Whether this is the name of an expert's parameter in the model."""
        module, _, name = parameter.rpartition(".")
        return module in self._experts and name in self._experts[module].parameters

    def convert(self, input_dict: dict[str, Any], *, missing_keys: set[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        for parameter, tensor in input_dict.items():
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            if missing_keys is not None:
                missing_keys.discard(parameter)
            if self._error is None:
                try:
                    self._take(parameter, tensor)
                except Exception as error:  # transformers would only log it
                    self._error = error
                    self._read.clear()
        return {}

    def _take(self, parameter: str, tensor: torch.Tensor) -> None:
        name, _, own = parameter.rpartition(".")
        experts = self._experts[name]
        expected, found = experts.parameters[own], tuple(tensor.shape)
        if found != expected:
            raise CheckpointError(f"{experts.title}: {own}: expected shape {list(expected)}, found {list(found)}")
        self._read[name][own] = tensor
        if self._read[name].keys() == experts.parameters.keys():
            layer = pack_tensors(experts, self._read.pop(name), self._options, self._report)
            adopt(experts)
            self._packed.append((experts, layer))

    def finish(self) -> None:
        """Attach what was packed. Raises what went wrong, and CheckpointError if a parameter was not in the checkpoint."""
        self._resources.close()
        if self._error is not None:
            raise self._error from self._refused
        for name, read in self._read.items():
            experts = self._experts[name]
            missing = [parameter for parameter in experts.parameters if parameter not in read]
            raise CheckpointError(
                f"{experts.title}: expected {', '.join(missing)} in the checkpoint, found no such tensor"
            ) from self._refused
        # not before: transformers would clear the buffers of modules that come while it loads
        for packed in self._packed:
            attach(*packed)
