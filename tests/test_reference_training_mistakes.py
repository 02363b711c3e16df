"""No mistake hides in the bound of training's float64 reference: one in any step of the backward pass leaves it."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import GPT_OSS
from reference_experts import random_batch, random_experts
from simulated import label
from simulated_training import Lora, SimulatedTraining, bfloat16, ratios

from ktmoe.weights.formats import BF16, FP8_PER_ROW, MXFP4, fp8, int4, nvfp4

ACTIVATION = replace(GPT_OSS, limit=0.5)  # of which both clamps hold many


class NoGradientScale(SimulatedTraining):
    """dT without alpha / r."""

    def through(self, projection, expert, dv, of_inner, products):
        self.scale, kept = np.float32(1), self.scale
        super().through(projection, expert, dv, of_inner, products)
        self.scale = kept


class NoInnerScale(SimulatedTraining):
    """T without alpha / r."""

    def inner(self, rows, projection, expert):
        return super().inner(rows, projection, expert) / self.scale


class NoRouterWeight(SimulatedTraining):
    """dact without r, or with one where it has none."""

    def by_down(self, dh, r):
        return r * dh if self.where == "expert_input" else dh


class NotRounded(SimulatedTraining):
    """dG and dU in float32."""

    def rounded(self, v):
        return v


class Truncated(SimulatedTraining):
    """dG and dU cut off after 8 bits."""

    def rounded(self, v):
        return (v.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


class NoClamps(SimulatedTraining):
    """A gradient beyond the limits."""

    def derive(self, g, u, t):
        limit, self.limit = self.limit, np.float32(np.inf)
        found = super().derive(np.minimum(g, limit), np.clip(u, -limit, limit), t)
        self.limit = limit
        return found


class OneSidedUp(SimulatedTraining):
    """The gradient of u beyond -limit."""

    def derive(self, g, u, t):
        return super().derive(g, np.maximum(u, -self.limit), t)


class GateOnBothSides(SimulatedTraining):
    """No gradient of g below -limit."""

    def derive(self, g, u, t):
        dg, du = super().derive(g, u, t)
        return np.where(g < -self.limit, np.float32(0), dg), du


class NoOffset(SimulatedTraining):
    def derive(self, g, u, t):
        self.offset, kept = np.float32(0), self.offset
        found = super().derive(g, u, t)
        self.offset = kept
        return found


class NoAlpha(SimulatedTraining):
    """The derivative of silu."""

    def derive(self, g, u, t):
        self.alpha, kept = np.float32(1), self.alpha
        found = super().derive(g, u, t)
        self.alpha = kept
        return found


class Exchanged(SimulatedTraining):
    """dG for dU."""

    def derive(self, g, u, t):
        return super().derive(g, u, t)[::-1]


class ScalesBeside(SimulatedTraining):
    """Each weight with the scale of 32 k further on, where it is used transposed."""

    def transposed(self, rows, weights, total):
        return super().transposed(rows, np.roll(weights, 32, axis=1), total)


class RowsBeside(SimulatedTraining):
    """Two blocks of n exchanged."""

    def transposed(self, rows, weights, total):
        return super().transposed(np.roll(rows, 32, axis=1), weights, total)


class OneRowLess(SimulatedTraining):
    def transposed(self, rows, weights, total):
        return super().transposed(rows[:, :-1], weights[:-1], total)


class NoFactor(SimulatedTraining):
    def rows(self, matrix, dv, rows=slice(None)):
        return dv


class FactorNotRounded(SimulatedTraining):
    """dV times the factor in float32, not in bfloat16."""

    def rows(self, matrix, dv, rows=slice(None)):
        return (dv * np.broadcast_to(matrix.factor, matrix.shape[:1])[rows]).astype(np.float32)


class FactorDivides(SimulatedTraining):
    def rows(self, matrix, dv, rows=slice(None)):
        return bfloat16(dv / np.broadcast_to(matrix.factor, matrix.shape[:1])[rows])


class RoundedInner(SimulatedTraining):
    """T in bfloat16."""

    def inner(self, rows, projection, expert):
        return bfloat16(super().inner(rows, projection, expert))


class NoBias(SimulatedTraining):
    """dr_w without down's bias."""

    def of_weights(self, x, of_x, dh, act, h, dy, expert):
        return (dh * h).sum(axis=1)


class ActForH(SimulatedTraining):
    """dr_w from h where act is meant."""

    def of_weights(self, x, of_x, dh, act, h, dy, expert):
        return (dh * h).sum(axis=1)


class RoundedWeights(SimulatedTraining):
    """Weights rounded to bfloat16, where they are used transposed."""

    def transposed(self, rows, weights, total):
        return super().transposed(rows, bfloat16(weights), total)


def leaves(backend, format=MXFP4, router_weight="down_output", activation=ACTIVATION, tokens=8):
    """The names of what leaves its bound, and how far the worst does."""
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 1, 128, 96, format=format, activation=activation, bias=True)
    x, ids, weights = random_batch(rng, experts, tokens, top_k=1)
    dy = rng.standard_normal(x.shape).astype(x.dtype)
    found, references = ratios(experts, Lora(rng, experts), router_weight, "fma", rng, x, ids, weights, dy, backend=backend)
    return {name for name, ratio in found.items() if ratio > 1}, references


OF_GATE_AND_UP = {f"d{name} of {projection}" for name in "ab" for projection in ("gate", "up")}


@pytest.mark.parametrize("format", [MXFP4, int4(32), fp8(), nvfp4(), FP8_PER_ROW, BF16], ids=label)
def test_nothing_leaves_it_without_a_mistake(format):
    assert leaves(SimulatedTraining, format)[0] == set()


@pytest.mark.parametrize(
    ("backend", "options", "expected"),
    [
        (NoGradientScale, {}, {"dx", "dr", "da of down", *OF_GATE_AND_UP}),
        (NoInnerScale, {}, {"y", "g", "u", "t", "db of gate", "db of up", "db of down"}),
        (NoRouterWeight, {}, {"dx", *OF_GATE_AND_UP}),
        (NoRouterWeight, {"router_weight": "down_input"}, {"dx", *OF_GATE_AND_UP}),
        (NoRouterWeight, {"router_weight": "expert_input"}, {"dx", "dr", *OF_GATE_AND_UP}),
        (NotRounded, {}, {"dx", *OF_GATE_AND_UP}),
        (Truncated, {}, {"dx", *OF_GATE_AND_UP}),
        (NoClamps, {}, {"dx", *OF_GATE_AND_UP}),
        (OneSidedUp, {}, {"dx", "da of up", "db of up"}),
        (GateOnBothSides, {}, {"dx", "da of gate", "db of gate"}),
        (NoOffset, {}, {"dx", "da of gate", "db of gate"}),
        (NoAlpha, {}, {"dx", *OF_GATE_AND_UP}),
        (Exchanged, {}, {"dx", *OF_GATE_AND_UP}),
        (ScalesBeside, {}, {"dx", "dr", *OF_GATE_AND_UP}),
        (RowsBeside, {}, {"dx", "dr", *OF_GATE_AND_UP}),
        (OneRowLess, {}, {"dx", "dr", *OF_GATE_AND_UP}),
        (NoFactor, {"format": nvfp4()}, {"dx", "dr", *OF_GATE_AND_UP}),
        (FactorNotRounded, {"format": nvfp4()}, {"dx", "dr"}),
        (FactorDivides, {"format": FP8_PER_ROW}, {"dx", "dr", *OF_GATE_AND_UP}),
        (RoundedInner, {}, {"t", "db of gate", "db of up", "db of down"}),
        (NoBias, {}, {"dr"}),
        (ActForH, {"router_weight": "down_input"}, {"dr"}),
        (RoundedWeights, {"format": fp8()}, {"dx", *OF_GATE_AND_UP}),
    ],
)
def test_a_mistake_leaves_it(backend, options, expected):
    found, references = leaves(backend, **options)
    assert found >= expected
    assert max(reference.worst(actual) for reference, actual in references.values()) > 2
