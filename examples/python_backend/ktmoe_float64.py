"""Backend float64: the forward pass in numpy, nearly without rounding. Slow: an expert is decoded each time it is used."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ktmoe import ExpertWeights, reference
from ktmoe.backends.base import Backend, Packed, Plan, Progress
from ktmoe.experts import PROJECTIONS


class Float64(Backend):
    """Below every built-in backend, so that "auto" never takes it; KTMOE_BACKEND=float64 or backend="float64" does."""

    rank = 1

    def pack(self, experts: ExpertWeights, plan: Plan, progress: Progress | None = None) -> Packed:
        matrices = {}
        for expert in range(experts.num_experts):
            for projection in PROJECTIONS:
                matrix = matrices[expert, projection] = experts.matrix(expert, projection)
                matrix.refuse()
            if progress:
                progress(experts.nbytes * (expert + 1) // experts.num_experts, experts.nbytes)
        return PackedFloat64(experts, matrices, plan.router_weight)


class PackedFloat64(Packed):
    """Keeps the checkpoint's own bytes; nbytes is theirs. No weight is rounded, even if that is allowed."""

    def __init__(self, experts: ExpertWeights, matrices: dict, router_weight: str):
        self.nbytes = experts.nbytes
        self._matrices = matrices
        self._router_weight = router_weight
        act = experts.activation
        self._act = tuple(float(np.float32(value)) for value in (act.alpha, act.limit, act.up_offset))

    def forward(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
        matrices = self._matrices  # once: close() may come from another thread
        active = (ids >= 0) & (ids < len(mask))
        active[active] = mask[ids[active]] != 0
        y = np.zeros(x.shape)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity stay with their token
            given = x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x
            given = _bfloat16(given)
            for expert in np.unique(ids[active]).tolist():
                token, slot = np.nonzero(active & (ids == expert))
                d = self._expert(matrices, expert, given[token], weights[token, slot, None].astype(np.float64))
                np.add.at(y, token, d)  # a token may have the expert twice
            y = y.astype(np.float32)
            out[...] = y.astype(ml_dtypes.bfloat16).view(np.uint16) if out.dtype == np.uint16 else y

    def close(self) -> None:
        self._matrices = None

    def _expert(self, matrices: dict, expert: int, a: np.ndarray, r: np.ndarray) -> np.ndarray:
        """One expert's output for rows a [m, hidden] with router weights r [m, 1], float64 [m, hidden]."""
        alpha, limit, up_offset = self._act
        if self._router_weight == "expert_input":
            a = _bfloat16(a * r)
        g = np.minimum(_linear(matrices[expert, "gate"], a), limit)
        u = np.clip(_linear(matrices[expert, "up"], a), -limit, limit)
        h = (u + up_offset) * g / (1 + np.exp(-alpha * g))
        if self._router_weight == "down_input":
            h = h * r
        d = _linear(matrices[expert, "down"], _bfloat16(h))
        return d * r if self._router_weight == "down_output" else d


def _linear(matrix, a: np.ndarray) -> np.ndarray:
    """a @ W.T + bias. Row by row, so that a token's bits do not depend on the batch, as they would with one matrix product."""
    w = reference.dequantize(matrix)
    y = np.array([w @ row for row in a])
    return y if matrix.bias is None else y + matrix.bias


def _bfloat16(a: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 numbers, as float64."""
    return a.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


backend = Float64()
