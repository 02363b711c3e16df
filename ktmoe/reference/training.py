"""Training in float64 with a rigorous bound on a backend's error: the forward pass with an adapter, and the backward pass.

docs/training-numerics.md has the steps and every rounding, as ktmoe/reference has those of MoELayer.forward().
ReferenceTraining is the same without roundings. Names: g, u, h and d are as there; T is what an adapter's A gives, times the
scale; dV is the gradient of the loss with respect to V. Every `eps_v` bounds |what a backend has for v - v|, elementwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.reference.errors import MAX_FLOAT32
from ktmoe.reference.gradients import ReferenceTraining
from ktmoe.reference.moe import Reference, bfloat16_rows
from ktmoe.reference.passes import BackwardRows, TrainingCall, bound

__all__ = ["Backward", "Forward", "ReferenceTraining", "training_backward", "training_forward"]


@dataclass(frozen=True)
class Forward:
    """What a forward pass that trains gives: y [tokens, hidden]; g and u after factor, bias and adapter [tokens * top_k,
    intermediate]; t [tokens * top_k, 3, rank], zeros for projections without a pair, None without an adapter. The rows of
    slots that are skipped are not compared."""

    y: Reference
    g: Reference
    u: Reference
    t: Reference | None


@dataclass(frozen=True)
class Backward:
    """Gradients: x [tokens, hidden]; weights [tokens, top_k], 0 where a slot is skipped; lora {projection: (da, db)}."""

    x: Reference
    weights: Reference
    lora: dict[str, tuple[Reference, Reference]]


def training_forward(
    experts: ExpertWeights, x: Any, expert_ids: Any, expert_weights: Any, lora: Any = None, **options: Any
) -> Forward:
    """The forward pass, and the bound on the error of a backend that rounds y to out_dtype.

    x, expert_ids, expert_weights and the options expert_mask, router_weight, out_dtype, rounding, tuned_for and shards are as
    reference.forward() has them. lora: a ktmoe.training.Lora, or what has its pairs and its scale; None: none. Without an
    adapter, y and its bound are reference.forward()'s. Raises InputError.
    """
    call = TrainingCall(experts, x, expert_ids, expert_weights, lora, **options)
    pairs, tokens = call.ids.size, len(call.x)
    kept = {name: np.zeros((2, pairs, experts.intermediate)) for name in "gu"}
    t = np.zeros((2, pairs, len(PROJECTIONS), call.rank))
    for values in (*kept.values(), t):
        values[1] = np.inf
    y, eps, size = np.zeros((3, len(call.cuts), tokens, experts.hidden))
    with np.errstate(all="ignore"):
        for rows in call.rows():
            for name, found in (("g", rows.g), ("u", rows.u)):
                kept[name][:, rows.pair] = found
            for at, projection in enumerate(PROJECTIONS):
                t[:, rows.pair, at] = rows.inner.get(projection, 0.0)
            r = rows.r if call.router_weight == "down_output" else np.ones_like(rows.r)
            for shard, (d, eps_d, size_d) in enumerate(rows.down()):
                np.add.at(y[shard], rows.token, r * d)
                np.add.at(eps[shard], rows.token, np.abs(r) * eps_d)
                np.add.at(size[shard], rows.token, np.abs(r) * size_d)
        return Forward(
            call.added_up(y, eps, size), _reference(kept["g"]), _reference(kept["u"]), _reference(t) if lora else None
        )


def training_backward(
    experts: ExpertWeights,
    x: Any,
    expert_ids: Any,
    expert_weights: Any,
    grad_y: Any,
    lora: Any = None,
    *,
    scale: float = 1.0,
    **options: Any,
) -> Backward:
    """The gradients, and the bounds on the errors of a backend that rounds that of x to out_dtype.

    grad_y: like x, the gradient of the loss with respect to y. scale: multiplies the adapter's gradients. All else is as for
    training_forward(), whose g, u and t a backend has kept or computes again.
    """
    call = TrainingCall(experts, x, expert_ids, expert_weights, lora, **options)
    dy = bfloat16_rows(grad_y)
    if dy.shape != call.x.shape:
        raise InputError(f"grad_y must be {list(call.x.shape)}, found {list(dy.shape)}")
    dx, eps, size = np.zeros((3, 1, *call.x.shape))
    dr = np.zeros((2, *call.ids.shape))
    sums = {p: [np.zeros((2, *array.shape)) for array in pair] for p, pair in lora.pairs.items()} if lora else {}
    with np.errstate(all="ignore"):
        for rows in call.rows():
            back = BackwardRows(rows, dy[rows.token], float(np.float32(scale)))
            dr[:, rows.token, rows.slot] = back.dr
            r = rows.r if call.router_weight == "expert_input" else np.ones_like(rows.r)
            of_x, eps_x = back.dx
            np.add.at(dx[0], rows.token, r * of_x)
            np.add.at(eps[0], rows.token, np.abs(r) * eps_x)
            np.add.at(size[0], rows.token, np.abs(r) * (np.abs(of_x) + eps_x))
            for projection, found in back.lora():
                for target, one in zip(sums[projection], found, strict=True):
                    target[:, rows.expert] = one.value, np.where(one.size + one.eps < MAX_FLOAT32, one.eps, np.inf)
        return Backward(
            call.added_up(dx, eps, size),
            _reference(dr),
            {p: (_reference(da), _reference(db)) for p, (da, db) in sums.items()},
        )


def _reference(found: np.ndarray) -> Reference:
    """found: the value and its error."""
    value, error = found
    return Reference(value, bound(value, error))
