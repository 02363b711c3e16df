"""The routed experts of a layer in plain PyTorch, on dequantised weights, with LoRA: autograd's gradients as an oracle.

It shares no code with ktmoe.torch. docs/training-numerics.md has the formulas and the roundings.
"""

from __future__ import annotations

import torch

from ktmoe.dequantization import dequantize
from ktmoe.experts import PROJECTIONS, ExpertWeights


class _Rounded(torch.autograd.Function):
    """Rounds to bfloat16 the value, the gradient or both, as told; each counts as identity for the other."""

    @staticmethod
    def forward(ctx, value, of_value, of_gradient):
        ctx.of_gradient = of_gradient
        return value.bfloat16().to(value.dtype) if of_value else value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().to(gradient.dtype) if ctx.of_gradient else gradient, None, None


class EagerExperts(torch.nn.Module):
    """Called as the experts of transformers are; it computes in dtype and returns hidden_states' dtype.

    weights: frozen and dequantised. lora: the adapter that training begins with, or None; its Parameters have the names that
    ktmoe's have. rounded: whether bfloat16 roundings are where ktmoe has them, once each: x, h, what comes back to y, g and u.
    """

    def __init__(self, weights: ExpertWeights, lora=None, *, dtype=torch.float64, rounded=True, router_weight="down_output"):
        super().__init__()
        self.dtype, self.rounded, self.router_weight, self.activation = dtype, rounded, router_weight, weights.activation
        self.num_experts = weights.num_experts
        self.weights, self.biases = {}, {}
        for projection in PROJECTIONS:
            matrices = [weights.matrix(expert, projection) for expert in range(weights.num_experts)]
            self.weights[projection] = torch.stack([torch.from_numpy(dequantize(m)) for m in matrices]).to(dtype)
            biases = [m.bias for m in matrices]
            given = biases[0] is not None
            self.biases[projection] = torch.stack([torch.from_numpy(bias) for bias in biases]).to(dtype) if given else None
        self.scale = lora.scale if lora else 0.0
        for projection, pair in (lora.pairs if lora else {}).items():
            for name, array in zip("ab", pair, strict=True):
                tensor = torch.from_numpy(array.copy())
                self.register_parameter(f"lora_{projection}_{name}", torch.nn.Parameter(tensor))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        x = self._round(hidden_states.to(self.dtype), gradient=False)
        y = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = (top_k_index == expert).nonzero(as_tuple=True)
            if len(token):
                r = top_k_weights[token, slot, None].to(self.dtype)
                y = y.index_add(0, token, self._expert(expert, x[token], r))
        # what comes back is rounded once
        return self._round(y, value=False).to(hidden_states.dtype)

    def _expert(self, expert, x, r):
        if self.router_weight == "expert_input":
            x = self._round(x * r, gradient=False)
        # only what enters the transposed products, and the adapters, is rounded
        g, u = (self._round(self._linear(expert, projection, x), value=False) for projection in ("gate", "up"))
        limit, alpha = self.activation.limit, self.activation.alpha
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        h = (u + self.activation.up_offset) * g * torch.sigmoid(alpha * g)
        h = self._round(h * r if self.router_weight == "down_input" else h, gradient=False)
        d = self._linear(expert, "down", h)
        return d * r if self.router_weight == "down_output" else d

    def _linear(self, expert, projection, x):
        y = x @ self.weights[projection][expert].T
        if self.biases[projection] is not None:
            y = y + self.biases[projection][expert]
        if hasattr(self, f"lora_{projection}_a"):
            a, b = (getattr(self, f"lora_{projection}_{name}")[expert].to(self.dtype) for name in "ab")
            y = y + self.scale * (x @ a.T) @ b.T
        return y

    def _round(self, tensor, value=True, gradient=True):
        return _Rounded.apply(tensor, value, gradient) if self.rounded else tensor
