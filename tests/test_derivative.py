"""The activation's derivative: against float64, at the clamps' edges, at numbers' ends; and g and u as they are kept."""

import itertools

import numpy as np
import pytest
from helpers import BF16, DEEPSEEK, GPT_OSS, bits, same_bits

from ktmoe import GatedActivation
from ktmoe._native import core

EPS, TINY = 2.0**-24, 2.0**-126
NAN, INF = np.nan, np.inf
ACTIVATIONS = {
    "silu": GatedActivation(),
    "deepseek": DEEPSEEK,
    "gpt-oss": GPT_OSS,
    "steep": GatedActivation(alpha=2.0**20),
    "narrow": GatedActivation(limit=0.5, up_offset=-2.0),
}

activations = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())


def values(words):
    return words.view(BF16).astype(float)


def exact(g, u, t, activation):
    """(dg, what its error is a multiple of, du, the value, |z|) in float64, by the definition."""
    alpha, limit, offset = (float(np.float32(v)) for v in (activation.alpha, activation.limit, activation.up_offset))
    gate, up = np.minimum(g, limit), np.clip(u, -limit, limit)
    z = alpha * gate
    with np.errstate(over="ignore"):
        s, other = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
    slope = t * (up + offset) * s
    dg, size = slope * (1 + z * other), np.abs(slope) * (np.abs(1 + z * other) + np.abs(z * other))
    du = t * gate * s
    return (
        np.where(g > limit, 0, dg),
        np.where(g > limit, 0, size),
        np.where(np.abs(u) > limit, 0, du),
        gate * s * (up + offset),
        np.abs(z),
    )


def batch(rng, m=40):
    """g, u, dh [m, 64] of every size from 2^-20 to 2^8, and r."""
    g, u, dh = (rng.choice([-1, 1], (m, 64)) * 2.0 ** rng.uniform(-20, top, (m, 64)) for top in (7, 7, 4))
    return (*(v.astype(np.float32) for v in (g, u, dh)), rng.uniform(0.01, 2, m).astype(np.float32))


@activations
def test_it_is_the_derivative(table, activation):
    """Within the bound that the C file states, and bfloat16's rounding. s may be zero where it is below 2^-126."""
    g, u, dh, r = batch(np.random.default_rng(1))
    for weights in (None, r):
        t = dh * (1.0 if weights is None else r.astype(float)[:, None])
        dg, size, du, _, z = exact(g.astype(float), u.astype(float), t, activation)
        of_g, of_u, _, _ = core.derive(table, g, u, dh, activation, weights)
        smallest = (np.abs(t) + 1) * (np.abs(u) + 3) * (np.abs(g) + z + 1) * TINY
        for found, expected, error in ((of_g, dg, size * (14 + z)), (of_u, du, np.abs(du) * (9 + z))):
            error = error * EPS * 1.001 + smallest
            assert (np.abs(values(found) - expected) <= error + (np.abs(expected) + error) * 2.0**-8).all()


@activations
def test_it_is_the_slope_of_the_value(table, activation):
    """Central differences of float64's own formula, away from the clamps: no factor is missing in both places."""
    rng = np.random.default_rng(2)
    g, u = rng.uniform(-6, 6, (2, 10, 64)).astype(np.float32)
    step = 2.0**-12 / max(activation.alpha, 1)
    near = np.minimum(np.abs(g - activation.limit), np.abs(np.abs(u) - activation.limit)) < 2 * step
    one = np.ones((10, 64), np.float32)
    of_g, of_u, _, _ = core.derive(table, g, u, one, activation)

    g, u = g.astype(float), u.astype(float)

    def value(g, u):
        return exact(g, u, 1.0, activation)[3]

    slope_g = (value(g + step, u) - value(g - step, u)) / (2 * step)
    slope_u = (value(g, u + step) - value(g, u - step)) / (2 * step)
    allowed = 2.0**-7 + 2.0**-8 * (np.abs(u) + 2)
    assert (near | (np.abs(values(of_g) - slope_g) <= allowed)).all()
    assert (near | (np.abs(values(of_u) - slope_u) <= 2.0**-7 * (np.abs(g) + 1))).all()


@activations
def test_h_is_the_activations_own(table, activation):
    g, u, dh, r = batch(np.random.default_rng(3))
    assert same_bits(core.derive(table, g, u, dh, activation, r)[2], core.activate(table, g, u, activation))
    assert same_bits(core.derive(table, g, u, dh, activation, r, True)[2], core.activate(table, g, u, activation, r=r))


@activations
def test_the_router_weights_gradient_sums_over_the_columns(table, activation):
    """Of the rounded h that down takes; by_input, of what r multiplies, before it is rounded."""
    g, u, dh, r = batch(np.random.default_rng(4))
    for by_input, columns in itertools.product((False, True), (64, 63, 17, 1)):
        _, _, h, dr = core.derive(table, g[:, :columns].copy(), u[:, :columns].copy(), dh, activation, r, by_input)
        _, _, _, value, z = exact(*(v[:, :columns].astype(float) for v in (g, u)), 1.0, activation)
        seen = value if by_input else values(h)[:, :columns]
        each = np.abs(dh[:, :columns] * seen)
        error = (each * ((12 + z) * EPS if by_input else 0)).sum(1) + each.sum(1) * 70 * EPS + 2.0**-110
        assert (np.abs(dr - (dh[:, :columns] * seen).sum(1)) <= error).all()


@activations
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 63])
def test_a_panel_that_is_not_full(table, activation, columns):
    """Its other columns are zero, whatever dh has there; the rest has the same bits. NaN behind g and u is not looked at."""
    g, u, dh, r = batch(np.random.default_rng(5), 7)
    whole = core.derive(table, g, u, dh, activation, r)
    dh[:, columns:] = NAN
    dg, du, h, dr = core.derive(table, g[:, :columns].copy(), u[:, :columns].copy(), dh, activation, r)
    for part, full in zip((dg, du, h), whole[:3], strict=True):
        assert same_bits(part[:, :columns], full[:, :columns])
        assert not part[:, columns:].any()
    assert np.isfinite(dr).all()


def test_bits_depend_on_no_other_row(table):
    g, u, dh, r = batch(np.random.default_rng(6), 9)
    whole = core.derive(table, g, u, dh, DEEPSEEK, r, True)
    for row in range(9):
        part = slice(row, row + 1)
        for alone, all_rows in zip(core.derive(table, g[part], u[part], dh[part], DEEPSEEK, r[part], True), whole, strict=True):
            assert same_bits(alone, all_rows[part])


def one(table, g, u, activation, dh=1.0):
    """(dg, du) of one pair, as floats."""
    row = np.zeros((3, 1, 64), np.float32)
    row[:, 0, 5] = g, u, dh
    dg, du, _, _ = core.derive(table, *row, activation)
    return float(dg.view(BF16)[0, 5]), float(du.view(BF16)[0, 5])


def test_at_a_limit_the_gradient_passes_and_beyond_it_stops(table):
    """As torch.clamp has it. The gate's clamp is one-sided."""
    limited = GatedActivation(limit=2.0)
    beyond = float(np.nextafter(np.float32(2), np.float32(3)))
    for u in (2.0, -2.0, 1.0):
        assert one(table, 2.0, u, limited)[0] != 0
        assert one(table, beyond, u, limited)[0] == 0
        assert one(table, -5.0, u, limited)[0] != 0
    for g in (2.0, beyond, -5.0):
        assert one(table, g, 2.0, limited)[1] != 0 != one(table, g, -2.0, limited)[1]
        assert one(table, g, beyond, limited)[1] == 0 == one(table, g, -beyond, limited)[1]
    assert one(table, beyond, 1.0, limited, INF)[0] == 0  # and stops whatever comes


def test_nan_passes(table):
    for activation in ACTIVATIONS.values():
        assert all(np.isnan(one(table, NAN, 0.25, activation)))
        assert np.isnan(one(table, 0.25, NAN, activation)[0])
        assert all(np.isnan(one(table, 0.25, 0.25, activation, NAN)))
    g, u, dh, r = batch(np.random.default_rng(7), 3)
    clean = core.derive(table, g, u, dh, DEEPSEEK, r)
    g[1, 3] = NAN
    for spoiled, full in zip(core.derive(table, g, u, dh, DEEPSEEK, r), clean, strict=True):
        assert same_bits(spoiled[[0, 2]], full[[0, 2]])
    assert np.isnan(core.derive(table, g, u, dh, DEEPSEEK, r)[3][1])


def test_far_from_zero_the_derivative_is_that_of_a_line(table):
    """Where exp is 0 or infinity, or its argument is: 1 on the right, 0 on the left, no NaN in between."""
    for activation in (GatedActivation(), GatedActivation(alpha=1.702), GatedActivation(alpha=2.0**20)):
        for g in (200.0, 1e10, 3e38):
            assert one(table, g, 0.75, activation) == (0.75, float(np.float32(g).astype(BF16)))
            assert one(table, -g, 0.75, activation) == (0, 0)
    assert one(table, 88.0, 1.0, GatedActivation())[0] == 1
    for g in (-86.0, -87.0):  # by denormal numbers
        expected = np.exp(g) * (1 + g)
        assert abs(one(table, g, 1.0, GatedActivation())[0] / expected - 1) < 2.0**-7


def test_at_zero_it_is_one_half(table):
    for zero in (0.0, -0.0):
        assert one(table, zero, 3.0, GatedActivation()) == (1.5, 0)


@pytest.mark.parametrize("columns", [64, 63, 17, 1])
def test_g_and_u_are_kept_as_they_are_before_the_clamps(table, columns):
    """After factor, bias and adapter, and nothing behind their columns; h is as without."""
    rng = np.random.default_rng(8)
    g, u, added = 20 * rng.standard_normal((3, 5, 64)).astype(np.float32)
    factor, bias = rng.uniform(0.5, 3, 64).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    finish = {"factor": factor, "bias": bias, "added": added}
    held = np.full((3, 5, columns), 7, np.float32)
    h = core.activate(table, g, u, DEEPSEEK, finish, {"added": added}, held[:2])
    assert same_bits(held[0], ((g * factor + bias) + added)[:, :columns])
    assert same_bits(held[1], (u + added)[:, :columns])
    assert (held[2] == 7).all()
    plain = core.activate(table, g, u, DEEPSEEK, finish, {"added": added})
    assert same_bits(h[:, :columns], plain[:, :columns])
    assert not bits(h[:, columns:]).any()
