"""The activation's derivative in the float64 reference: its values, and its bound at clamps, near them and far away."""

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import DEEPSEEK, GPT_OSS
from simulated_training import KINDS, SimulatedTraining

from ktmoe.reference import UNIT, round_bfloat16
from ktmoe.reference.derivative import STEEPEST, derive
from ktmoe.reference.gradients import activate, derivative
from ktmoe.weights.activation import SILU, GatedActivation

ACTIVATIONS = (SILU, DEEPSEEK, GPT_OSS, GatedActivation(alpha=0.25, limit=2.0, up_offset=-1.0))


class OfActivation(SimulatedTraining):
    """Its derivative alone."""

    def __init__(self, activation, kind, rng):
        self.kind, self.rng = kind, rng
        self.alpha, self.limit, self.offset = (np.float32(getattr(activation, v)) for v in ("alpha", "limit", "up_offset"))


def as_float32(activation):
    return GatedActivation(*(float(np.float32(getattr(activation, v))) for v in ("alpha", "limit", "up_offset")))


def points(rng, count=4000):
    """Of all sizes, g and u and t; some at the limits."""
    g, u, t = (rng.standard_normal((3, count)) * 10.0 ** rng.uniform(-6, 4, (3, count))).astype(np.float32)
    g[::50] = np.tile([7.0, 10.0, 2.0, -7.0], count // 200)
    u[::40] = np.tile([7.0, -7.0, 10.0, -10.0, 2.0], count // 200)
    g[:4] = -1e30, 1e30, -3e38, 0.0
    return g, u, t


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_the_slope(activation):
    rng = np.random.default_rng(1)
    g, u = rng.uniform(-20, 20, (2, 2000))
    step = 1e-6
    away = (np.abs(g - activation.limit) > 1e-3) & (np.abs(np.abs(u) - activation.limit) > 1e-3)
    for at, (dg, du) in enumerate([(step, 0.0), (0.0, step)]):
        slope = (activate(activation, g + dg, u + du) - activate(activation, g - dg, u - du)) / (2 * step)
        assert np.allclose(derivative(activation, g, u)[at][away], slope[away], rtol=1e-6, atol=1e-6)


def test_at_a_limit_it_is_the_inner_sides():
    g, u = np.array([7.0, np.nextafter(7.0, 8), 7.0, -9.0]), np.array([7.0, 7.0, -7.0, np.nextafter(7.0, 8)])
    of_g, of_u = derivative(GPT_OSS, g, u)
    assert (of_g != 0).tolist() == [True, False, True, True]
    assert (of_u != 0).tolist() == [True, True, True, False]
    zero, one = np.zeros(4), np.ones(4)
    found = derive(GPT_OSS, g, zero, u, zero, one, zero)
    assert [(value != 0).tolist() for value, _ in found] == [(of_g != 0).tolist(), (of_u != 0).tolist()]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_simulated_backend_stays_within_the_bound(activation, kind):
    rng = np.random.default_rng(2)
    g, u, t = points(rng)
    with np.errstate(all="ignore"):
        actual = OfActivation(activation, kind, rng).derive(g, u, t)
        found = derive(activation, *(v for a in (g, u, t) for v in (a.astype(np.float64), np.zeros(len(g)))))
    exact = derivative(as_float32(activation), g.astype(np.float64), u.astype(np.float64))
    for (value, eps), of_backend, of_exact in zip(found, actual, exact, strict=True):
        with np.errstate(all="ignore"):
            expected = t.astype(np.float64) * of_exact
        finite = np.isfinite(eps)
        assert finite.mean() > 0.99
        assert np.allclose(value[finite], expected[finite], rtol=1e-12, atol=1e-300)
        assert (np.abs(of_backend - value)[finite] <= eps[finite]).all()
        # where nothing cancels, it is tens of roundings
        usual = finite & (np.abs(g) > 0.1) & (np.abs(g) < 1.0) & (value != 0)
        assert np.median(eps[usual] / np.abs(value[usual])) < 100 * UNIT


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_errors_of_g_u_and_t_are_covered_and_nearly_attained(activation):
    """For any g, u, t in their intervals; and some corner is nearly as far away as the bound."""
    rng = np.random.default_rng(3)
    g, u, t = rng.uniform(-6, 6, (3, 3000))
    g[:200] = activation.limit if math.isfinite(activation.limit) else 1.0
    g[200:300] = STEEPEST / activation.alpha
    errors = np.abs(rng.standard_normal((3, 3000))) * 10.0 ** rng.uniform(-4, -0.5, (3, 3000))
    found = derive(activation, g, errors[0], u, errors[1], t, errors[2])
    worst = np.zeros((2, 3000))
    corners = [(a, b, c) for a in (-1, 0, 1) for b in (-1, 1) for c in (-1, 1)]
    for a, b, c in corners + [tuple(rng.uniform(-1, 1, 3)) for _ in range(50)]:
        slopes = derivative(as_float32(activation), g + a * errors[0], u + b * errors[1])
        for at, (value, _) in enumerate(found):
            worst[at] = np.maximum(worst[at], np.abs((t + c * errors[2]) * slopes[at] - value))
    for far, (_, eps) in zip(worst, found, strict=True):
        assert (far <= eps).all()
        assert np.median(far[eps > 0] / eps[eps > 0]) > 0.7


def test_a_gradient_that_a_clamp_may_stop_is_uncertain():
    activation = replace(GPT_OSS, limit=1.0)
    g, u = np.array([1.0, 1.0 + 1e-6, 1.0 - 1e-6, 1.1, 0.9]), np.full(5, 0.5)
    eps, zero = np.full(5, 2e-6), np.zeros(5)
    (value, error), _ = derive(activation, g, eps, u, zero, np.ones(5), zero)
    assert value[1] == value[3] == 0
    inside = derivative(as_float32(activation), np.array([1.0]), u[:1])[0]
    assert (error[:3] >= 0.999 * np.abs(inside)).all()
    assert error[3] == 0
    assert error[4] < 1e-5
    # u: at either end
    u, t = np.array([1.0, -1.0 - 1e-6, 1.1, -0.9]), np.ones(4)
    _, (value, error) = derive(activation, np.full(4, 0.5), zero[:4], u, eps[:4], t, zero[:4])
    assert (value != 0).tolist() == [True, False, False, True]
    assert (error[:2] > 0.1).all()
    assert error[2] == 0
    assert error[3] < 1e-5


def test_one_rounding_to_bfloat16_is_larger_than_all_others():
    rng = np.random.default_rng(4)
    g, u, t = rng.standard_normal((3, 10000))
    zero = np.zeros(10000)
    (value, eps), _ = derive(SILU, g, zero, u, zero, t, zero)
    may_flip = round_bfloat16(value - eps) != round_bfloat16(value + eps)
    assert may_flip.mean() < 0.005
