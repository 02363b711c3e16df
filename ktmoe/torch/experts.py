"""MoEExperts: the routed experts of one layer as a module, with adapters that can be trained."""

from __future__ import annotations

import numpy as np
import torch

from ktmoe.errors import InputError
from ktmoe.experts import ExpertSpec
from ktmoe.layer import MoELayer
from ktmoe.torch.counting import count
from ktmoe.torch.function import differentiable
from ktmoe.training import Lora, Training


class MoEExperts(torch.nn.Module):
    """The routed experts of a layer, frozen and packed, and LoRA beside them. It is called as the experts of transformers are.

    layer: a MoELayer with activations="bf16", which a deep copy of the module shares; or what has the methods of
    ktmoe.training.Training, such as that class itself. lora: the adapter that training begins with, whose numbers are copied;
    None: no adapter. recompute: keep the arguments alone between forward and backward, and compute g and u again.

    Parameters, on the CPU: lora_gate_a, lora_gate_b and so on, for the projections that the adapter has. state_dict() has these
    alone. Attributes: passes: the Training. alpha: of the adapter; the rank is that of the parameters.

    Raises what Training raises; InputError for an adapter of other shapes.

    Examples:
        >>> module = MoEExperts(layer, ktmoe.training.Lora.initial(layer.spec, rank=4, alpha=8))
        >>> y = module(torch.ones(1, layer.hidden), torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]))
        >>> y.sum().backward()
        >>> sorted(module.state_dict())
        ['lora_down_a', 'lora_down_b', 'lora_gate_a', 'lora_gate_b', 'lora_up_a', 'lora_up_b']
    """

    def __init__(self, layer: MoELayer | Training, lora: Lora | None = None, *, recompute: bool = False):
        super().__init__()
        if isinstance(layer, MoELayer):
            layer = Training(layer, recompute)
        elif recompute or not all(hasattr(layer, name) for name in ("spec", "forward", "backward")):
            found = "recompute, which is the Training's own" if recompute else type(layer).__name__
            raise InputError(f"layer must be a MoELayer, or a ktmoe.training.Training alone, found {found}")
        self.passes = layer
        if lora is not None:
            if not isinstance(lora, Lora):
                raise InputError(f"lora must be a ktmoe.training.Lora or None, found {type(lora).__name__}")
            lora.check(self.spec)
        self.alpha = lora.alpha if lora else 1.0
        self.projections = lora.projections if lora else ()
        pairs = lora.pairs if lora else {}
        for projection in self.projections:
            for name, array in zip("ab", pairs[projection], strict=True):
                self.register_parameter(f"lora_{projection}_{name}", torch.nn.Parameter(_copied(array)))

    @property
    def spec(self) -> ExpertSpec:
        """The spec of the experts."""
        return self.passes.spec

    @property
    def pairs(self) -> dict[str, tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """{projection: (a, b)}."""
        return {p: (getattr(self, f"lora_{p}_a"), getattr(self, f"lora_{p}_b")) for p in self.projections}

    @property
    def lora(self) -> Lora | None:
        """The adapter as it is now, which shares the parameters' memory. Raises InputError for a number that is not finite."""
        pairs = {p: tuple(tensor.detach() for tensor in pair) for p, pair in self.pairs.items()}
        return Lora(pairs, self.alpha) if pairs else None

    @torch.compiler.disable
    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        shared_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[tokens, hidden] of hidden_states' dtype and device.

        hidden_states: [tokens, hidden], bfloat16 or float32, or float16, which goes by way of float32. What is on a GPU is
        copied to the CPU and back. top_k_index, top_k_weights: [tokens, top_k]; an id outside the experts adds zero.
        shared_weights: [tokens, num_shared], for a layer with shared experts; None: 1. Raises InputError.
        """
        count(self, top_k_index)
        return differentiable(self.passes, hidden_states, top_k_index, top_k_weights, self.pairs, self.alpha, shared_weights)

    def extra_repr(self) -> str:
        spec = self.spec
        sizes = f"{spec.num_experts} experts, hidden={spec.hidden}, intermediate={spec.intermediate}"
        if not self.projections:
            return sizes
        rank = getattr(self, f"lora_{self.projections[0]}_a").shape[1]
        return f"{sizes}, rank={rank}, alpha={self.alpha:g}"


def _copied(array: np.ndarray) -> torch.Tensor:
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
