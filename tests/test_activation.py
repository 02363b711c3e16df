"""The activation's exponential, swept; and the activation through a layer at its extremes."""

import numpy as np
import pytest
from helpers import BF16, bits, pack_nibbles, same_bits

from ktmoe import ExpertWeights, GatedActivation, MoELayer, reference
from ktmoe._native import core
from ktmoe.errors import InputError
from ktmoe.reference import EXP_RELATIVE_ERROR

BOUND = 2.0**-22
TINY, LARGEST = 2.0**-126, float(np.finfo(np.float32).max)
LN2 = np.log(2)


def check_exp(table, x):
    """Within BOUND of float64's where the result is normal; within TINY below; infinite only where that is nearest."""
    y = core.exp(table, x).astype(np.float64)
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.float64))
    normal = (exact >= TINY) & (exact <= LARGEST)
    assert (np.abs(y[normal] / exact[normal] - 1) < BOUND).all()
    assert (np.abs(y - exact)[exact < TINY] <= TINY * BOUND + 2.0**-149).all()
    assert (y[exact > LARGEST * (1 + BOUND)] == np.inf).all()
    assert (y >= 0).all()
    return y


def test_exp_over_its_whole_range(table):
    """3 million arguments: every 331st float of either sign, denser by value in the middle, and beyond both ends."""
    for low, high in ((2.0**-30, 90), (2.0**-30, 105)):
        patterns = np.arange(np.float32(low).view(np.uint32), np.float32(high).view(np.uint32), 331, dtype=np.uint32)
        check_exp(table, patterns.view(np.float32) * np.float32(1 if high == 90 else -1))
    check_exp(table, np.linspace(-104, 89, 1_000_003).astype(np.float32))
    check_exp(table, np.linspace(-1, 1, 300_007).astype(np.float32))


def test_exp_where_its_parts_meet(table):
    """Around every multiple of ln 2 and every midpoint between two, where the rounding to a power of two turns."""
    centers = np.concatenate([np.arange(-151, 130) * LN2, (np.arange(-151, 130) + 0.5) * LN2]).astype(np.float32)
    neighbours = centers.view(np.int32)[:, None] + np.arange(-200, 201, dtype=np.int32)
    x = neighbours.view(np.float32)
    check_exp(table, x[np.abs(x) > 1e-30])


def test_exp_is_monotone_where_it_is_not_flat(table):
    x = np.linspace(-80, 80, 400_001).astype(np.float32)
    assert (np.diff(core.exp(table, x)) > 0).all()


def test_exp_of_special_numbers(table):
    tiny, largest, inf = np.float32(2.0**-149), np.finfo(np.float32).max, np.inf
    x = np.array([0, -0.0, tiny, -tiny, TINY, inf, -inf, largest, -largest, 89, 1000, -104, -1000], np.float32)
    expected = np.array([1, 1, 1, 1, 1, inf, 0, inf, 0, inf, inf, 0, 0], np.float32)
    assert same_bits(core.exp(table, x), expected)
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(core.exp(table, nans)).all()


@pytest.mark.parametrize("divides", [False, True])
def test_what_becomes_of_a_product_before_the_activation(table, divides):
    """A factor, a bias, and what an adapter adds, in this order, each rounded once to float32: bit for bit. The gate is
    saturated, so that h is u; or u is 1, so that h is the gate."""
    rng = np.random.default_rng(3)
    product, added = (rng.standard_normal((5, 64)).astype(np.float32) for _ in range(2))
    factor, bias = rng.uniform(0.5, 3, 64).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    scaled = product / factor if divides else product * factor
    steps = {"factor": factor, "divides": divides, "bias": bias, "added": added}
    ones, linear = np.ones((5, 64), np.float32), GatedActivation(alpha=2.0**30)
    for names, expected in (
        ((), product),
        (("factor", "divides"), scaled),
        (("bias",), product + bias),
        (("added",), product + added),
        (("factor", "divides", "bias", "added"), (scaled + bias) + added),
    ):
        finish = {name: steps[name] for name in names}
        assert same_bits(core.activate(table, ones, product, linear, finish_u=finish).view(BF16), expected.astype(BF16))
        positive = np.where(expected > 0, expected, 0).astype(BF16)
        assert np.array_equal(core.activate(table, product, ones, linear, finish_g=finish).view(BF16), positive)


def test_exp_reaches_the_denormals_and_the_largest_numbers(table):
    y = check_exp(table, np.array([-87.4, -90, -100, -103, 88.0, 88.5, 88.7], np.float32))
    assert ((y[:4] > 0) & (y[:4] < TINY)).all()
    assert (y[4:] > 2.0**126).all()


def test_exp_has_the_same_bits_at_every_place_of_every_length(table):
    """Full vectors, tails, and any alignment."""
    x = np.random.default_rng(1).uniform(-100, 90, 200).astype(np.float32)
    x[[3, 50, 77]] = np.nan, np.inf, -np.inf
    whole = core.exp(table, x)
    for length in range(50):
        for first in range(17):
            part = slice(first, first + length)
            assert same_bits(core.exp(table, x[part]), whole[part])


def test_the_reference_counts_on_no_less():
    assert EXP_RELATIVE_ERROR >= BOUND


# Through a layer: gate and up have one weight a row, x is a unit vector, down an identity.

POINTS = 64


def activate(backend, activation, g, u):
    """What a layer makes of these g and u [n], by way of biases; n at most POINTS."""
    n = len(g)
    zero = np.zeros((1, POINTS, POINTS // 2), np.uint8), np.full((1, POINTS, 2), 127, np.uint8)
    identity = pack_nibbles(2 * np.eye(POINTS, dtype=np.uint8))[None], zero[1]
    biases = {p: np.pad(v, (0, POINTS - n))[None].astype(np.float32) for p, v in (("gate", g), ("up", u))}
    experts = ExpertWeights.from_arrays(zero, zero, identity, biases=biases, activation=activation)
    with MoELayer(experts, backend, "bf16") as layer:
        y = layer.forward(np.zeros((1, POINTS), np.float32), np.zeros((1, 1), int), np.ones((1, 1), np.float32))
    return y[0, :n]


ACTIVATIONS = {
    "silu": GatedActivation(),
    "deepseek": GatedActivation(limit=10.0),
    "gpt-oss": GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0),
    "steep": GatedActivation(alpha=2.0**20),
    "narrow": GatedActivation(limit=0.5, up_offset=-2.0),
}


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
def test_the_formula(backend, activation):
    """(clamp(u) + offset) * g' * sigmoid(alpha * g'), g' = min(g, limit): within bfloat16's rounding and some of float32's."""
    values = np.array([-200, -88, -11, -10, -7.5, -7, -1.25, -0.5, -1e-3, 0, 1e-3, 0.25, 0.5, 1, 6.9, 7, 9, 10, 88, 200, 1e6])
    rng = np.random.default_rng(2)
    for _ in range(4):
        g, u = rng.permutation(values).astype(np.float32), rng.permutation(values).astype(np.float32)
        y = activate(backend, activation, g, u)
        alpha, limit, offset = (float(np.float32(v)) for v in (activation.alpha, activation.limit, activation.up_offset))
        gate, up = np.minimum(g.astype(float), limit), np.clip(u.astype(float), -limit, limit)
        with np.errstate(over="ignore"):
            exact = (up + offset) * gate / (1 + np.exp(-alpha * gate))
        assert (np.abs(y - exact) <= np.abs(exact) * (2.0**-8 + 2.0**-15) + 2.0**-126).all()
        assert np.array_equal(y, y.astype(BF16).astype(np.float32))


def test_the_gates_clamp_is_one_sided(backend):
    """And up's is not."""
    limited = GatedActivation(limit=2.0)
    one = np.ones(1, np.float32)
    assert activate(backend, limited, -3 * one, one) != activate(backend, limited, -2 * one, one)
    assert activate(backend, limited, 3 * one, one) == activate(backend, limited, 2 * one, one)
    assert activate(backend, limited, one, -3 * one) == activate(backend, limited, one, -2 * one)
    assert activate(backend, limited, one, 3 * one) == activate(backend, limited, one, 2 * one)


def test_columns_do_not_depend_on_their_place(backend):
    g, u = np.random.default_rng(3).standard_normal((2, POINTS)).astype(np.float32)
    y = activate(backend, GatedActivation(), g, u)
    for shift in (1, 5, 16, 33):
        assert same_bits(activate(backend, GatedActivation(), np.roll(g, shift), np.roll(u, shift)), np.roll(y, shift))
    for n in (1, 15, 17, 63):
        assert same_bits(activate(backend, GatedActivation(), g[:n], u[:n]), y[:n])


def test_silu_of_minus_zero_and_zero_is_zero(backend):
    y = activate(backend, GatedActivation(), np.array([0.0, -0.0]), np.array([3.0, 3.0]))
    assert not (bits(y) & 0x7FFFFFFF).any()


@pytest.mark.parametrize("parameters", [{"alpha": "1"}, {"limit": None}])
def test_parameters_are_numbers(parameters):
    with pytest.raises((InputError, TypeError)):
        GatedActivation(**parameters)


def test_the_defaults_are_swiglu():
    """silu(g) * u, as Shazeer's paper has it, written out: no alpha, no clamp, nothing added to u."""
    g, u = np.meshgrid(np.linspace(-30, 60, 207), np.linspace(-1000, 1000, 41))
    found, _ = reference.activate(GatedActivation(), g, 0 * g, u, 0 * u)
    np.testing.assert_allclose(found, g / (1 + np.exp(-g)) * u, rtol=1e-12)
