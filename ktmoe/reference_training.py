"""Training in float64 with a rigorous bound on a backend's error: the forward pass with an adapter, and the backward pass.

docs/numerics.md ("Training") has the steps and every rounding, as ktmoe/reference.py has those of MoELayer.forward().
ReferenceTraining is the same without roundings. Names: g, u, h and d are as there; T is what an adapter's A gives, times the
scale; dV is the gradient of the loss with respect to V. Every `eps_v` bounds |what a backend has for v - v|, elementwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS, ExpertWeights, checked_router_weight
from ktmoe.reference import (
    BLOCK,
    ROUNDING,
    TUNED_FOR,
    Reference,
    activate,
    bfloat16_rows,
    checked_batch,
    checked_cuts,
    linear,
)
from ktmoe.reference_derivative import derive
from ktmoe.reference_errors import MAX_FLOAT32, after_rounding, gamma
from ktmoe.reference_gradients import ReferenceTraining, pair_of
from ktmoe.reference_operands import flush_to_zero, operand
from ktmoe.reference_transposed import Sum, gradient_rows, product, together, transposed
from ktmoe.reference_weights import TINY, folds, part, round_bfloat16, splits

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


def training_forward(experts: ExpertWeights, x, expert_ids, expert_weights, lora=None, **options) -> Forward:
    """The forward pass, and the bound on the error of a backend that rounds y to out_dtype.

    x, expert_ids, expert_weights and the options expert_mask, router_weight, out_dtype, rounding, tuned_for and shards are as
    reference.forward() has them. lora: a ktmoe.training.Lora, or what has its pairs and its scale; None: none. Without an
    adapter, y and its bound are reference.forward()'s. Raises InputError.
    """
    call = _Call(experts, x, expert_ids, expert_weights, lora, **options)
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
            call.added_up(y, eps, size, exact_parts=not call.adapts("down")),
            *(Reference(value, _bound(value, error)) for value, error in kept.values()),
            Reference(t[0], _bound(*t)) if lora else None,
        )


def training_backward(
    experts: ExpertWeights, x, expert_ids, expert_weights, grad_y, lora=None, *, scale: float = 1.0, **options
) -> Backward:
    """The gradients, and the bounds on the errors of a backend that rounds that of x to out_dtype.

    grad_y: like x, the gradient of the loss with respect to y. scale: multiplies the adapter's gradients. All else is as for
    training_forward(), whose g, u and t a backend has kept or computes again.
    """
    call = _Call(experts, x, expert_ids, expert_weights, lora, **options)
    dy = bfloat16_rows(grad_y)
    if dy.shape != call.x.shape:
        raise InputError(f"grad_y must be {list(call.x.shape)}, found {list(dy.shape)}")
    dx, eps, size = np.zeros((3, len(call.cuts), *call.x.shape))
    dr = np.zeros((2, *call.ids.shape))
    sums = {p: [np.zeros((2, *array.shape)) for array in pair] for p, pair in lora.pairs.items()} if lora else {}
    with np.errstate(all="ignore"):
        for rows in call.rows():
            back = _BackwardRows(rows, dy[rows.token], float(np.float32(scale)))
            dr[:, rows.token, rows.slot] = back.dr
            r = rows.r if call.router_weight == "expert_input" else np.ones_like(rows.r)
            for shard, (of_x, eps_x, size_x) in enumerate(back.dx):
                np.add.at(dx[shard], rows.token, r * of_x)
                np.add.at(eps[shard], rows.token, np.abs(r) * eps_x)
                np.add.at(size[shard], rows.token, np.abs(r) * size_x)
            for projection, found in back.lora():
                for target, one in zip(sums[projection], found, strict=True):
                    target[:, rows.expert] = one.value, np.where(one.size + one.eps < MAX_FLOAT32, one.eps, np.inf)
        return Backward(
            call.added_up(dx, eps, size, exact_parts=False),  # shards may be added up in each slot, or in all
            Reference(dr[0], _bound(*dr)),
            {p: tuple(Reference(value, _bound(value, error)) for value, error in pair) for p, pair in sums.items()},
        )


def _bound(value: np.ndarray, eps: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(value) & np.isfinite(eps), eps, np.inf)


class _Call:
    """A batch, checked, and what is asked for."""

    def __init__(
        self,
        experts: ExpertWeights,
        x,
        expert_ids,
        expert_weights,
        lora,
        *,
        expert_mask: np.ndarray | None = None,
        router_weight: str = "down_output",
        out_dtype: str = "bfloat16",
        rounding: str = "exact",
        tuned_for: str = "decode",
        shards: Sequence[tuple[int, int]] | None = None,
    ):
        self.experts, self.lora = experts, lora
        self.x, self.ids, self.weights, self.active = checked_batch(experts, x, expert_ids, expert_weights, expert_mask)
        self.router_weight = checked_router_weight(router_weight)
        if out_dtype not in ("bfloat16", "float32"):
            raise InputError(f"out_dtype must be 'bfloat16' or 'float32', found {out_dtype!r}")
        if rounding not in ROUNDING or tuned_for not in TUNED_FOR:
            raise InputError(f"rounding and tuned_for must be of {ROUNDING} and {TUNED_FOR}, found {rounding!r}, {tuned_for!r}")
        self.out_dtype, self.rounding, self.tuned_for = out_dtype, rounding, tuned_for
        self.cuts = checked_cuts(experts, shards)
        self.scale = float(np.float32(lora.scale)) if lora else 0.0
        self.rank = next(iter(lora.pairs.values()))[0].shape[1] if lora else 0

    def adapts(self, projection: str) -> bool:
        return self.lora is not None and projection in self.lora.pairs

    def rows(self) -> Iterator[_Rows]:
        """Of each expert that has some."""
        for expert in np.unique(self.ids[self.active]).tolist():
            yield _Rows(self, expert, *np.nonzero(self.active & (self.ids == expert)))

    def added_up(self, parts, eps, size, exact_parts: bool) -> Reference:
        """Sums over slots, of each shard, in any order; then those over shards, and the rounding to out_dtype.

        exact_parts: whether a shard's part is what its k give. An adapter's contribution may be in any of the shards.
        """
        slots = self.active.sum(axis=1, keepdims=True)
        eps = eps + gamma(slots + 1) * size + (slots + 1) * (slots > 0) * TINY
        eps = np.where(size + eps < MAX_FLOAT32, eps, np.inf)
        (total, *others), (of_total, *eps_others) = parts, eps
        for other, eps_other in zip(others, eps_others, strict=True):
            total = total + other
            of_total = np.where(slots > 0, after_rounding(total, of_total + eps_other), 0.0)
        if others and not exact_parts:
            sizes = (size + eps).sum(axis=0)
            of_total = eps.sum(axis=0) + gamma(len(others)) * sizes + len(others) * (slots > 0) * TINY
            of_total = np.where(sizes < MAX_FLOAT32, of_total, np.inf)
        if self.out_dtype == "bfloat16":
            ends = round_bfloat16(total + of_total) - total, total - round_bfloat16(total - of_total)
            of_total = np.maximum(*ends) + flush_to_zero(total, of_total)
        return Reference(total, _bound(total, of_total))


class _Rows:
    """The forward pass of one expert's rows, up to h. pair: their numbers among all slots. r: [rows, 1]."""

    def __init__(self, call: _Call, expert: int, token: np.ndarray, slot: np.ndarray):
        self.call, self.expert, self.token, self.slot = call, expert, token, slot
        self.pair = token * call.ids.shape[1] + slot
        self.r = call.weights[token, slot][:, None]
        experts, a = call.experts, call.x[token]
        if call.router_weight == "expert_input":
            a = round_bfloat16((a * self.r).astype(np.float32))
        self.a, self.eps_a = operand(a, a, a, "bf16")
        self.pairs = {p: pair for p in PROJECTIONS if (pair := pair_of(call.lora, p, expert))}
        self.inner: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.matrices = {p: experts.matrix(expert, p) for p in PROJECTIONS}
        self.g, self.u = (self._outer(projection) for projection in ("gate", "up"))
        self.act = activate(experts.activation, *self.g, *self.u)
        h, eps_h = self.act
        if call.router_weight == "down_input":
            h, eps_h = h * self.r, after_rounding(h * self.r, np.abs(self.r) * eps_h)
        # rounding is monotone: a backend's h lies between the roundings of h - eps_h and h + eps_h
        self.h, self.eps_h = operand(*(round_bfloat16(v) for v in (h, h - eps_h, h + eps_h)), "bf16")
        if "down" in self.pairs:
            self._of_a("down", self.h, self.eps_h)

    def _of_a(self, projection: str, rows, eps) -> None:
        """T: on shards a sum of theirs."""
        found = product(rows, eps, self.pairs[projection][0].T, factor=self.call.scale, more=len(self.call.cuts) - 1)
        self.inner[projection] = together([found])

    def _outer(self, projection: str) -> tuple[np.ndarray, np.ndarray]:
        call = self.call
        total, eps = linear(self.matrices[projection], self.a, self.eps_a, BLOCK, "bf16", call.rounding, call.tuned_for)
        if projection not in self.pairs:
            return total, eps
        self._of_a(projection, self.a, self.eps_a)
        added, eps_added = together([self._added(projection)])
        return total + added, after_rounding(total + added, eps + eps_added)

    def _added(self, projection: str) -> Sum:
        return product(*self.inner[projection], self.pairs[projection][1].T)

    def down(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Each shard's d, its error, and its size."""
        call, down = self.call, self.matrices["down"]
        # the whole matrix folds or does not, whatever one of its parts might do
        how = (
            "folded" if call.rounding == "folded" and folds(down) else "exact",
            "prefill" if call.tuned_for == "prefill" and splits(down) else "decode",
        )
        added = self._added("down") if "down" in self.pairs else None
        for first, last in call.cuts:
            k = slice(first, last)
            d, eps = linear(part(down, first, last), self.h[:, k], self.eps_h[:, k], BLOCK, "bf16", *how)
            if added is None:
                yield d, eps, np.abs(d) + eps
                continue
            own, eps_own = together([added])
            of_this = own if first == 0 else 0.0
            if len(call.cuts) == 1:
                eps = after_rounding(d + own, eps + eps_own)
                yield d + own, eps, np.abs(d + own) + eps
            else:  # shards may have parts of it, of which none is larger than its size
                size = np.abs(d) + eps + added.size + eps_own
                yield d + of_this, eps + (eps_own if first == 0 else 0.0) + gamma(1) * size + TINY, size


class _BackwardRows:
    """The backward pass of one expert's rows, dy [rows, hidden] of bfloat16 numbers."""

    def __init__(self, rows: _Rows, dy: np.ndarray, scale: float):
        self.rows, self.call, self.scale = rows, rows.call, scale
        self.dy, self.eps_dy = operand(dy, dy, dy, "bf16")
        where, r = self.call.router_weight, rows.r
        down = rows.matrices["down"]
        of_h = [transposed(down, *gradient_rows(down, dy, dy, dy), self.call.rounding)]
        self.inner = {}
        if "down" in rows.pairs:
            self._through("down", self.dy, self.eps_dy, of_h)
        self.dh = together(of_h)
        t = self.dh
        if where != "expert_input":
            t = t[0] * r, after_rounding(t[0] * r, np.abs(r) * t[1])
        grads = derive(self.call.experts.activation, *rows.g, *rows.u, *t)
        #: projection: (dG or dU, the least and the largest that a backend may have)
        self.grads = {
            p: tuple(round_bfloat16(v) for v in (value, value - eps, value + eps))
            for p, (value, eps) in zip(("gate", "up"), grads, strict=True)
        }

    def _through(self, projection: str, dv, eps_dv, sums: list[Sum]) -> None:
        """dT, and what it adds to the sums."""
        a, b = self.rows.pairs[projection]
        inner = product(dv, eps_dv, b, factor=self.call.scale, more=len(self.call.cuts) - 1)
        self.inner[projection] = together([inner])
        sums.append(product(*self.inner[projection], a))

    @cached_property
    def dx(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Each shard's gradient of the rows that enter gate and up, its error, and its size."""
        adapted: list[Sum] = []
        for projection, ends in self.grads.items():
            if projection in self.rows.pairs:
                self._through(projection, *operand(*ends, "bf16"), adapted)
        found = []
        for first, last in self.call.cuts:
            n = slice(first, last)
            sums = []
            for projection, ends in self.grads.items():
                matrix = self.rows.matrices[projection]
                of_rows = gradient_rows(matrix, *(v[:, n] for v in ends), n)
                sums.append(transposed(matrix, *of_rows, self.call.rounding, n))
            value, eps = together(sums + adapted)
            size = np.abs(value) + eps
            if len(self.call.cuts) > 1 and adapted:
                # which shard has how much of the adapter's is open, and no part is larger than its size
                own = sum(one.value for one in adapted)
                size = np.abs(value - own) + eps + sum(one.size + one.eps for one in adapted)
                if first:
                    value = value - own
            found.append((value, eps, size))
        return found

    @property
    def dr(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the router weights, [rows]."""
        rows, where = self.rows, self.call.router_weight
        if where == "expert_input":
            shards = len(self.dx)
            value = sum(value for value, _, _ in self.dx)
            eps = sum(eps + gamma(shards) * size for _, eps, size in self.dx)
            # x, not x times r
            x = self.call.x[rows.token]
            return together([_rows_product(x, flush_to_zero(x, 0.0), value, eps)])
        if where == "down_input":
            return together([_rows_product(*self.dh, *rows.act)])
        sums = [_rows_product(*self.dh, rows.h, rows.eps_h)]
        bias = rows.matrices["down"].bias
        if bias is not None:
            sums.append(_rows_product(self.dy, self.eps_dy, np.broadcast_to(bias.astype(np.float64), self.dy.shape), 0.0))
        return together(sums)

    def lora(self) -> Iterator[tuple[str, tuple[Sum, Sum]]]:
        """projection: (dA, dB) of this expert."""
        rows, scale = self.rows, self.scale
        _ = self.dx  # which has dT of gate and up
        for projection in rows.pairs:
            (t, eps_t), (dt, eps_dt) = rows.inner[projection], self.inner[projection]
            more = int(scale != 1)
            if projection == "down":
                dv, eps_dv, a, eps_a = self.dy, self.eps_dy, rows.h, rows.eps_h
                if self.call.router_weight == "down_output":
                    more += 1  # the product with r
                    dv, dt = dv * rows.r, dt * rows.r
                    eps_dv, eps_dt = eps_dv * np.abs(rows.r), eps_dt * np.abs(rows.r)
            else:
                (dv, eps_dv), a, eps_a = operand(*self.grads[projection], "bf16"), rows.a, rows.eps_a
            of_a, of_b = product(dt.T, eps_dt.T, a, eps_a, scale, more), product(dv.T, eps_dv.T, t, eps_t, scale, more)
            yield projection, (of_a, of_b)


def _rows_product(a: np.ndarray, eps_a, b: np.ndarray, eps_b) -> Sum:
    """For each row, the sum of a * b over it, in any order."""
    size_a, size_b = np.abs(a) + eps_a, np.abs(b) + eps_b
    size, roundings = (size_a * size_b).sum(axis=1), gamma(a.shape[1] + 1)
    spread = (eps_a * size_b + np.abs(a) * eps_b).sum(axis=1)
    return Sum((a * b).sum(axis=1), spread + roundings * size + (a.shape[1] + 1) * TINY, size, roundings)
