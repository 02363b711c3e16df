"""A layer's routed experts as vLLM has them: sizes, activation, parameters, and why ktmoe leaves some to vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from vllm.distributed.parallel_state import get_dp_group
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ktmoe.errors import InputError
from ktmoe.experts import ExpertWeights
from ktmoe.matrix import Matrix
from ktmoe.vllm.communicator import UnevenCommunicator
from ktmoe.weights.activation import GatedActivation
from ktmoe.weights.formats import WeightFormat

#: Why no layer of a model is ktmoe's.
LORA = "LoRA adapters are enabled"
#: What vLLM's kernels of gpt-oss's activation have built in.
_GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)


def refusal(moe: FusedMoEConfig) -> str | None:
    """Why ktmoe leaves such a layer to vLLM, or None if it computes it, as far as its configuration says."""
    parallel = moe.moe_parallel_config
    if activation_of(moe) is None:
        return f"expected SwiGLU as activation, found {moe.activation.value}"
    if moe.is_lora_enabled:
        return LORA
    if parallel.enable_eplb:
        return "experts move between processes (EPLB)"
    if parallel.use_all2all_kernels and not _tokens_are_exchanged(parallel):
        return "tokens are sent between processes"
    return None


def _tokens_are_exchanged(parallel: FusedMoEParallelConfig) -> bool:
    """Whether processes get each other's tokens, and add up what comes of them, outside of a layer's method."""
    return not (parallel.is_sequence_parallel or parallel.pcp_size > 1) and isinstance(
        get_dp_group().device_communicator, UnevenCommunicator
    )


def activation_of(moe: FusedMoEConfig) -> GatedActivation | None:
    """What is between gate/up and down, or None if ktmoe does not compute it."""
    limit = math.inf if moe.swiglu_limit is None else moe.swiglu_limit
    alpha = 1.0 if moe.swiglu_alpha is None else moe.swiglu_alpha
    offset = 0.0 if moe.swiglu_beta is None else moe.swiglu_beta
    try:
        return {
            MoEActivation.SILU: GatedActivation(limit=limit),
            MoEActivation.SWIGLUOAI: _GPT_OSS,
            MoEActivation.SWIGLUOAI_UNINTERLEAVE: GatedActivation(alpha, limit, offset),
        }.get(moe.activation)
    except InputError:  # a number that no activation has
        return None


@dataclass(frozen=True)
class Layer:
    """The part of a layer's routed experts that is in this process.

    module: vLLM's, with the parameters w13_* (gate and up) and w2_* (down), whose first dimension is the expert.
    name: its name in the model. num_experts, hidden, intermediate, activation, router_weight: as ExpertWeights has them.
    interleaved: whether w13's rows are gate, up, gate, up and so on; else gate's come first.
    """

    module: RoutedExperts
    name: str
    num_experts: int
    hidden: int
    intermediate: int
    activation: GatedActivation
    router_weight: str
    interleaved: bool

    @classmethod
    def of(cls, module: RoutedExperts) -> Layer:
        """The layer of a module whose configuration refusal() lets pass."""
        moe = module.moe_config
        return cls(
            module,
            module.layer_name,
            moe.num_local_experts,
            moe.hidden_dim,
            moe.intermediate_size_per_partition,
            activation_of(moe),
            "expert_input" if module.apply_router_weight_on_input else "down_output",
            moe.activation == MoEActivation.SWIGLUOAI,
        )

    def weights(self, read: Callable[[int, str], Matrix], formats: WeightFormat | Mapping[str, WeightFormat]) -> ExpertWeights:
        """read: (expert, projection) -> Matrix."""
        return ExpertWeights(
            self.num_experts, self.hidden, self.intermediate, read, formats, self.activation, self.name, self.router_weight
        )

    def rows(self, suffix: str, expert: int, projection: str) -> torch.Tensor | None:
        """What belongs to a projection of an expert in w13_{suffix} or w2_{suffix}, as a view; None if the layer has none.

        Of w13 these are half of the rows, so what has no dimension of rows is not for this.
        """
        whole = getattr(self.module, f"{'w2' if projection == 'down' else 'w13'}_{suffix}", None)
        if whole is None:
            return None
        whole = whole.detach()[expert]
        if projection == "down":
            return whole
        half = len(whole) // 2
        second = projection == "up"
        if self.interleaved:
            return whole[int(second) :: 2]
        return whole[half:] if second else whole[:half]

    def bias(self, expert: int, projection: str) -> np.ndarray | None:
        """The bias of an expert's matrix, float32 [n], or None."""
        bias = self.rows("bias", expert, projection)
        return None if bias is None else bias.float().contiguous().numpy()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of the experts. The module may have others, which it shares with the router."""
        named = self.module.named_parameters(recurse=False)
        return [parameter for name, parameter in named if name.startswith(("w13_", "w2_"))]
