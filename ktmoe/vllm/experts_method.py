"""Served: what makes a class of vLLM that computes a layer's experts into one that lets ktmoe do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ktmoe.errors import UnavailableError
from ktmoe.experts import ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.vllm import cpus, operator
from ktmoe.vllm.experts_layer import Layer, refusal
from ktmoe.vllm.report import REPORT


@dataclass(frozen=True)
class Format:
    """How experts of one format are read from vLLM's layers.

    method: vLLM's class, whose parameters these are, as its create_weights() makes them and its loaders fill them.
    weights: a Layer -> ExpertWeights, which read its parameters when a matrix is asked for. Raises UnavailableError for those
    that ktmoe does not read, which are then left to vLLM.
    without_kernel: attributes that vLLM's constructor does not get to set where vLLM has no kernel for this CPU.
    once: vLLM cannot load such weights again: it waits for parameters that no checkpoint has, or for fewer than it loads.
    """

    method: type[FusedMoEMethodBase]
    weights: Callable[[Layer], ExpertWeights]
    without_kernel: Mapping[str, object] = field(default_factory=dict)
    once: bool = False

    def served(self) -> type[FusedMoEMethodBase]:
        """vLLM's class with ktmoe in it."""
        return type(f"Ktmoe{self.method.__name__}", (Served, self.method), {"format": self})


class Served:
    """Stands before a method class of vLLM. vLLM makes and loads the parameters; then they are packed, and freed.

    A layer that ktmoe does not compute is vLLM's, as it would be without ktmoe. If vLLM cannot compute it either, its own error
    is raised, after the log has said why ktmoe does not.

    packed: the MoELayer; None before the weights are loaded, and for a layer that is vLLM's. refused: why it is vLLM's, or
    None.
    """

    format: ClassVar[Format]
    packed: MoELayer | None = None
    refused: str | None = None
    _error: Exception | None = None

    def __init__(self, *args, **kwargs):
        try:
            super().__init__(*args, **kwargs)
        except (ValueError, NotImplementedError, AssertionError) as error:
            moe = self.__dict__.get("moe")
            self.refused = "vLLM refuses its configuration" if moe is None else refusal(moe)
            if self.refused:
                REPORT.left(self._class, self.refused, "one that is being made")
                REPORT.say()
                raise
            for name, value in self.format.without_kernel.items():
                setattr(self, name, value)
            self._error = error.with_traceback(None)
        else:
            self.refused = refusal(self.moe)
        REPORT.wait_for(self)

    @property
    def is_monolithic(self) -> bool:
        """Whether the method routes tokens itself. ktmoe is given what the router has chosen."""
        return self.refused is not None and super().is_monolithic

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        try:
            if self.refused is None:
                self._pack(layer)
            if self.refused is not None:
                REPORT.left(self._class, self.refused, layer.layer_name)
                if self._error is not None:
                    raise self._error
                super().process_weights_after_loading(layer)
        except BaseException as error:
            REPORT.failed(error)
            raise
        REPORT.done(self)

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: torch.nn.Module | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """y [tokens, hidden] of this process's experts, or of its part of them: vLLM adds up those of several processes.

        Shared experts are run by vLLM before.
        """
        if self.refused is not None:
            return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        places = layer.expert_map
        if places is not None:
            topk_ids = torch.where(topk_ids < 0, -1, places[topk_ids.clamp(min=0).long()])
        return operator.experts(x, topk_ids, topk_weights, layer.ktmoe)

    @property
    def _class(self) -> str:
        return self.format.method.__name__

    def _pack(self, module: RoutedExperts) -> None:
        """Pack a layer's parameters and free them, or set `refused`. Weights that vLLM loads again are packed again."""
        if self.packed is not None and self.format.once:
            raise UnavailableError(
                f"{module.layer_name}: expected weights that are loaded once, found another load ({self._class})"
            )
        cpus.share()
        layer = Layer.of(module)
        try:
            packed = MoELayer(self.format.weights(layer))
        except UnavailableError as error:
            if self.packed is not None:  # vLLM has no kernel and no room for a layer that it did not compute before
                raise
            self.refused = str(error)
            return
        for parameter in layer.parameters:
            parameter.data = parameter.data.new_empty(0)
        if self.packed is None:
            REPORT.experts(self._class, packed)
        self.packed = packed
        operator.hold(module, packed)
