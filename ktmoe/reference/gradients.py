"""Training in plain float64: outputs and gradients of the experts without a rounding, for whoever checks a use of them.

docs/training-numerics.md has the formulas. ktmoe/reference/training.py has the same with every rounding and a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ktmoe.dequantization import dequantize
from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS, ExpertSpec, ExpertWeights, checked_experts, checked_router_weight
from ktmoe.weights.activation import GatedActivation

#: What ReferenceTraining.backward() can give.
WANTED = ("x", "weights", "lora")


@dataclass(frozen=True, eq=False)
class ReferenceSaved:
    """The arguments of a forward pass, float64 but for the ids; active: bool, which slots count."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    active: np.ndarray


@dataclass(frozen=True, eq=False)
class ReferenceGradients:
    """float64. x: [tokens, hidden]. weights: [tokens, top_k], 0 where a slot is skipped. lora: {projection: (da, db)}, of a's
    and b's shapes. None: not wanted, or no adapter."""

    x: np.ndarray | None
    weights: np.ndarray | None
    lora: dict[str, tuple[np.ndarray, np.ndarray]] | None


class ReferenceTraining:
    """Training's two methods in float64 arithmetic, without its roundings: so that numerical differentiation agrees.

    experts: any; their weights are dequantised once and kept, 8 bytes a weight. expert_mask: bool [num_experts], False where an
    expert's slots are skipped. router_weight: as ktmoe.experts has it; None: the experts' own.
    """

    def __init__(self, experts: ExpertWeights, *, expert_mask: Any = None, router_weight: str | None = None):
        self.experts = checked_experts(experts)
        self.router_weight = checked_router_weight(router_weight or experts.router_weight)
        self.expert_mask = np.ones(experts.num_experts, bool) if expert_mask is None else np.asarray(expert_mask, bool)
        if self.expert_mask.shape != (experts.num_experts,):
            raise InputError(f"expert_mask must be [{experts.num_experts}], found {list(self.expert_mask.shape)}")
        self._weights: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}

    @property
    def spec(self) -> ExpertSpec:
        """The spec of the experts."""
        return self.experts.spec

    def forward(
        self, x: Any, expert_ids: Any, expert_weights: Any, lora: Any = None, *, save: bool = True, out: Any = None
    ) -> tuple[np.ndarray, ReferenceSaved | None]:
        """(y, what backward() needs), y float64 [tokens, hidden], written to out if that is given.

        x: [tokens, hidden]; expert_ids, expert_weights: [tokens, top_k]; anything that numpy makes float64, or integers, of.
        lora: a ktmoe.training.Lora, which may be of float64, or what has its pairs and its scale; None: none.
        """
        x, weights, ids = np.array(x, np.float64), np.array(expert_weights, np.float64), np.array(expert_ids)
        fits = ids.ndim == 2 and ids.shape == weights.shape and x.shape == (len(ids), self.experts.hidden)
        if not fits or ids.dtype.kind not in "iu":
            raise InputError(
                f"x must be [tokens, {self.experts.hidden}], expert_ids integers [tokens, top_k] and expert_weights like them,"
                f" found {list(x.shape)}, {ids.dtype} {list(ids.shape)} and {list(weights.shape)}"
            )
        active = (ids >= 0) & (ids < self.experts.num_experts)
        active &= self.expert_mask[np.where(active, ids, 0)]
        saved = ReferenceSaved(x, ids, weights, active)
        y = np.zeros_like(x)
        for one in self._used(saved, lora):
            np.add.at(y, one.token, one.r * one.d if self.router_weight == "down_output" else one.d)
        if out is not None:
            out[...] = y
        return (y if out is None else out), saved if save else None

    def backward(
        self,
        saved: ReferenceSaved,
        grad_y: Any,
        lora: Any = None,
        *,
        into: Mapping[str, tuple[Any, ...]] | None = None,
        add: bool = False,
        scale: float = 1.0,
        wanted: Iterable[str] = WANTED,
    ) -> ReferenceGradients:
        """The gradients of sum(grad_y * y). The arguments are those of ktmoe.training.Training.backward(), in float64."""
        dy = np.asarray(grad_y, np.float64)
        dx, dr = np.zeros_like(saved.x), np.zeros_like(saved.weights)
        sums: Any = {p: tuple(np.zeros(v.shape) for v in pair) for p, pair in lora.pairs.items()} if lora else None
        where = self.router_weight
        for one in self._used(saved, lora):
            token, r, of_y = one.token, one.r, dy[one.token]
            dh, _ = one.down.backward(of_y)
            after = r if where == "down_output" else 1.0
            one.down.add_gradients(after * of_y, sums, scale)
            dg, du = derivative(self.experts.activation, one.g, one.u)
            dact = dh if where == "expert_input" else r * dh
            of_x = 0.0
            for map, grad in ((one.gate, dact * dg), (one.up, dact * du)):
                through, _ = map.backward(grad)
                of_x = of_x + through
                map.add_gradients(grad, sums, scale)
            if where == "expert_input":
                dr[token, one.slot] = (of_x * saved.x[token]).sum(axis=1)
                of_x = of_x * r
            else:
                dr[token, one.slot] = ((of_y * one.d) if where == "down_output" else (dh * one.act)).sum(axis=1)
            np.add.at(dx, token, of_x)
        for projection, pair in (into or {}).items():
            for target, found in zip(pair, sums[projection], strict=True):
                target[...] = target + found if add else found
        wanted = set(wanted)
        return ReferenceGradients(
            dx if "x" in wanted else None,
            dr if "weights" in wanted else None,
            (dict(into) if into else sums) if "lora" in wanted else None,
        )

    def _used(self, saved: ReferenceSaved, lora: Any) -> Any:
        """Each expert that has rows, with its forward pass."""
        for expert in np.unique(saved.ids[saved.active]).tolist():
            token, slot = np.nonzero(saved.active & (saved.ids == expert))
            yield _Expert(self, expert, token, slot, saved, lora)

    def weights(self, expert: int, projection: str) -> tuple[np.ndarray, np.ndarray]:
        """(weights with their factor, bias), float64."""
        key = expert, projection
        if key not in self._weights:
            matrix = self.experts.matrix(expert, projection)
            bias = np.zeros(matrix.shape[0]) if matrix.bias is None else matrix.bias.astype(np.float64)
            self._weights[key] = dequantize(matrix), bias
        return self._weights[key]


class _Expert:
    """The forward pass of one expert's rows. r: [rows, 1]."""

    def __init__(self, training: ReferenceTraining, expert: int, token: Any, slot: Any, saved: ReferenceSaved, lora: Any):
        self.token, self.slot, self.r = token, slot, saved.weights[token, slot][:, None]
        where = training.router_weight
        self.gate, self.up, self.down = (_Map(training, expert, projection, lora) for projection in PROJECTIONS)
        a = saved.x[token] * (self.r if where == "expert_input" else 1.0)
        self.g, self.u = self.gate(a), self.up(a)
        self.act = activate(training.experts.activation, self.g, self.u)
        self.d = self.down(self.act * (self.r if where == "down_input" else 1.0))


class _Map:
    """One linear map with its pair of the adapter."""

    def __init__(self, training: ReferenceTraining, expert: int, projection: str, lora: Any):
        self.expert, self.projection = expert, projection
        self.weights, self.bias = training.weights(expert, projection)
        self.pair = pair_of(lora, projection, expert)
        self.scale = lora.scale if lora else 0.0

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        self.rows = rows
        result = rows @ self.weights.T + self.bias
        if self.pair:
            a, b = self.pair
            result = result + self.scale * (rows @ a.T) @ b.T
        return result

    def backward(self, grad: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The gradients with respect to the rows and to what A gives, times the scale."""
        if not self.pair:
            return grad @ self.weights, None
        a, b = self.pair
        inner = self.scale * (grad @ b)
        return grad @ self.weights + inner @ a, inner

    def add_gradients(self, grad: np.ndarray, sums: Any, scale: float) -> None:
        if self.pair:
            a, b = self.pair
            da, db = sums[self.projection]
            da[self.expert] += scale * (self.scale * (grad @ b)).T @ self.rows
            db[self.expert] += scale * grad.T @ (self.scale * self.rows @ a.T)


def pair_of(lora: Any, projection: str, expert: int) -> tuple[np.ndarray, np.ndarray] | None:
    """One expert's (a, b) in float64; None without one."""
    if lora is None or projection not in lora.pairs:
        return None
    a, b = lora.pairs[projection]
    return _numbers(a[expert]), _numbers(b[expert])


def _numbers(array: Any) -> np.ndarray:
    """float64; uint16 holds bfloat16 bits."""
    array = np.asarray(array)
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def activate(activation: GatedActivation, g: np.ndarray, u: np.ndarray) -> np.ndarray:
    """(u' + up_offset) * g' * sigmoid(alpha * g'), as GatedActivation has it."""
    gate = np.minimum(g, activation.limit)
    return (np.clip(u, -activation.limit, activation.limit) + activation.up_offset) * gate * sigmoid(activation.alpha * gate)


def derivative(activation: GatedActivation, g: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The derivatives of activate() with respect to g and to u; at a limit, those of the inner side, as torch.clamp's."""
    gate = np.minimum(g, activation.limit)
    s = sigmoid(activation.alpha * gate)
    by_gate = s * (1 + activation.alpha * gate * (1 - s))
    up = np.clip(u, -activation.limit, activation.limit) + activation.up_offset
    return np.where(g > activation.limit, 0.0, up * by_gate), np.where(np.abs(u) > activation.limit, 0.0, gate * s)


def sigmoid(v: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-v))
