"""The two passes of training for one expert's rows, in float64 with bounds: what ktmoe/reference/training.py adds up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS, ExpertWeights, checked_router_weight
from ktmoe.forks import cached_property
from ktmoe.reference.activation import activate
from ktmoe.reference.derivative import derive
from ktmoe.reference.errors import MAX_FLOAT32, after_rounding, gamma
from ktmoe.reference.gradients import pair_of
from ktmoe.reference.linear_map import linear
from ktmoe.reference.moe import ROUNDING, TUNED_FOR, Reference, checked_batch, checked_cuts
from ktmoe.reference.operands import flush_to_zero, operand
from ktmoe.reference.transposed import Sum, gradient_rows, product, rows_product, together, transposed
from ktmoe.reference.weights import BLOCK, TINY, columns_of, folds, round_bfloat16, splits


class TrainingCall:
    """A batch, checked, and what is asked for."""

    def __init__(
        self,
        experts: ExpertWeights,
        x: Any,
        expert_ids: Any,
        expert_weights: Any,
        lora: Any,
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
        self.sharded = len(self.cuts) > 1  # sums over intermediate go from shard to shard
        self.scale = float(np.float32(lora.scale)) if lora else 0.0
        self.rank = next(iter(lora.pairs.values()))[0].shape[1] if lora else 0

    def adapts(self, projection: str) -> bool:
        return self.lora is not None and projection in self.lora.pairs

    def rows(self) -> Iterator[Rows]:
        """The rows of each expert that has some."""
        for expert in np.unique(self.ids[self.active]).tolist():
            yield Rows(self, expert, *np.nonzero(self.active & (self.ids == expert)))

    def added_up(self, of_shards: Any, eps: Any, size: Any) -> Reference:
        """Sums over slots, of each shard, in any order; then those over shards, and the rounding to out_dtype."""
        slots = self.active.sum(axis=1, keepdims=True)
        eps = eps + gamma(slots + 1) * size + (slots + 1) * (slots > 0) * TINY
        eps = np.where(size + eps < MAX_FLOAT32, eps, np.inf)
        (total, *others), (of_total, *eps_others) = of_shards, eps
        for other, eps_other in zip(others, eps_others, strict=True):
            total = total + other
            of_total = np.where(slots > 0, after_rounding(total, of_total + eps_other), 0.0)
        if others and self.adapts("down"):  # which of them has how much of what it adds is open
            sizes = (size + eps).sum(axis=0)
            of_total = eps.sum(axis=0) + gamma(len(others)) * sizes + len(others) * (slots > 0) * TINY
            of_total = np.where(sizes < MAX_FLOAT32, of_total, np.inf)
        if self.out_dtype == "bfloat16":
            ends = round_bfloat16(total + of_total) - total, total - round_bfloat16(total - of_total)
            of_total = np.maximum(*ends) + flush_to_zero(total, of_total)
        return Reference(total, bound(total, of_total))


class Rows:
    """The forward pass of one expert's rows, up to h. pair: their numbers among all slots. r: [rows, 1]."""

    def __init__(self, call: TrainingCall, expert: int, token: np.ndarray, slot: np.ndarray):
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
        h, low, high = (round_bfloat16(v) for v in (h, h - eps_h, h + eps_h))
        self.h, self.eps_h = operand(h, low, high, "bf16")
        if "down" in self.pairs:
            self._of_a("down", self.h, self.eps_h)

    def _of_a(self, projection: str, rows: Any, eps: Any) -> None:
        """Compute T; that of down goes from shard to shard."""
        found = product(rows, eps, self.pairs[projection][0].T, factor=self.call.scale, any_order=self.call.sharded)
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
            d, eps = linear(columns_of(down, first, last), self.h[:, k], self.eps_h[:, k], BLOCK, "bf16", *how)
            if added is None:
                yield d, eps, np.abs(d) + eps
                continue
            own, eps_own = together([added])
            of_this = own if first == 0 else 0.0
            if not call.sharded:
                eps = after_rounding(d + own, eps + eps_own)
                yield d + own, eps, np.abs(d + own) + eps
            else:  # shards may have parts of it, of which none is larger than its size
                size = np.abs(d) + eps + added.size + eps_own
                yield d + of_this, eps + (eps_own if first == 0 else 0.0) + gamma(1) * size + TINY, size


class BackwardRows:
    """The backward pass of one expert's rows, dy [rows, hidden] of bfloat16 numbers."""

    def __init__(self, rows: Rows, dy: np.ndarray, scale: float):
        self.rows, self.call, self.scale = rows, rows.call, scale
        self.dy, self.eps_dy = operand(dy, dy, dy, "bf16")
        where, r = self.call.router_weight, rows.r
        down = rows.matrices["down"]
        of_h = [transposed(down, *gradient_rows(down, dy, dy, dy), self.call.rounding)]
        self.inner: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        if "down" in rows.pairs:
            self._through("down", self.dy, self.eps_dy, of_h)
        self.dh = together(of_h)
        t = self.dh
        if where != "expert_input":
            t = t[0] * r, after_rounding(t[0] * r, np.abs(r) * t[1])
        grads = derive(self.call.experts.activation, *rows.g, *rows.u, *t)
        #: projection: (dG or dU, the least and the largest that a backend may have)
        self.grads = {
            p: (round_bfloat16(value), round_bfloat16(value - eps), round_bfloat16(value + eps))
            for p, (value, eps) in zip(("gate", "up"), grads, strict=True)
        }

    def _through(self, projection: str, dv: Any, eps_dv: Any, sums: list[Sum]) -> None:
        """Compute dT, and add to the sums what it gives."""
        a, b = self.rows.pairs[projection]
        inner = product(dv, eps_dv, b, factor=self.call.scale, any_order=self.call.sharded)
        self.inner[projection] = together([inner])
        sums.append(product(*self.inner[projection], a))

    @cached_property
    def dx(self) -> tuple[np.ndarray, np.ndarray]:
        """The gradient of the rows that enter gate and up: of each shard, added up in their order."""
        adapted: list[Sum] = []
        for projection, ends in self.grads.items():
            if projection in self.rows.pairs:
                self._through(projection, *operand(*ends, "bf16"), adapted)
        value, eps, size = [], [], 0.0
        for first, last in self.call.cuts:
            n = slice(first, last)
            sums = [] if first else adapted.copy()
            for projection, ends in self.grads.items():
                matrix = self.rows.matrices[projection]
                v, low, high = (end[:, n] for end in ends)
                of_rows = gradient_rows(matrix, v, low, high, n)
                sums.append(transposed(matrix, *of_rows, self.call.rounding, n))
            of_shard, eps_shard = together(sums)
            value.append(of_shard)
            eps.append(eps_shard)
            size = size + np.abs(of_shard) + eps_shard
        of_all: Any = sum(value)
        return of_all, np.where(size < MAX_FLOAT32, sum(eps) + gamma(len(eps) - 1) * size, np.inf)

    @property
    def dr(self) -> tuple[np.ndarray, np.ndarray]:
        """The gradient of the router weights, and its error, [rows] each."""
        rows, where = self.rows, self.call.router_weight
        if where == "expert_input":
            x = self.call.x[rows.token]  # not times r
            return together([rows_product(x, flush_to_zero(x, 0.0), *self.dx)])
        if where == "down_input":
            return together([rows_product(*self.dh, *rows.act, self.call.sharded)])
        sums = [rows_product(*self.dh, rows.h, rows.eps_h, self.call.sharded)]
        bias = rows.matrices["down"].bias
        if bias is not None:
            sums.append(rows_product(self.dy, self.eps_dy, np.broadcast_to(bias.astype(np.float64), self.dy.shape), 0.0))
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


def bound(value: np.ndarray, eps: np.ndarray) -> np.ndarray:
    """The error, infinite where there is nothing to compare."""
    return np.where(np.isfinite(value) & np.isfinite(eps), eps, np.inf)
