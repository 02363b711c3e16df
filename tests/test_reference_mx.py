"""MXFP4 and MXFP8 of the float64 reference: numbers against rational arithmetic, ends of the range, an uncertain h."""

from fractions import Fraction

import numpy as np
import pytest
from rationals import bfloat16s, mx_step, naive_forward, quantised_by_rationals
from reference_experts import BFLOAT16, from_codes, random_batch, random_experts

from ktmoe.errors import InputError
from ktmoe.modes import mode_of
from ktmoe.quantization.rules import RULES
from ktmoe.reference import ROUTER_WEIGHTS, TINY, forward, operand, round_bfloat16
from ktmoe.weights.formats import BF16, MXFP4, fp8, int4, nvfp4

MX_RULES = [rule for rule in RULES.values() if rule.target in ("mxfp4", "mxfp8")]
every_rule = pytest.mark.parametrize("rule", MX_RULES, ids=lambda rule: f"{rule.target}-{rule.name}")


def quantised(x, rule):
    return operand(x, x, x, rule)[0]


def of(*values):
    """One row, a whole number of blocks."""
    return np.array([values + (0.0,) * (-len(values) % 32)])


def float_or_infinity(number: Fraction) -> float:
    """2**128 is no bfloat16 number."""
    return float(number) if abs(number) < 2**128 else float("inf" if number > 0 else "-inf")


def assert_quantised(bits, rule):
    """Rows of bfloat16, by their bits."""
    rows = [bfloat16s(row) for row in bits]
    expected = np.array([[float_or_infinity(v) for v in quantised_by_rationals(row, rule)] for row in rows])
    found = quantised(bits.view(BFLOAT16).astype(np.float64), rule)
    assert np.array_equal(found, expected)
    assert np.array_equal(round_bfloat16(found), found)  # each is a bfloat16 number, or infinite


# numbers


@every_rule
def test_blocks_equal_rational_arithmetic_at_every_exponent(rule):
    """Each row: a largest number of one exponent, the rest from 14 exponents below up to it: ties, zeros, denormals."""
    rng = np.random.default_rng(0)
    exponent = np.arange(255)[:, None]
    bits = np.maximum(exponent - rng.integers(0, 14, (255, 13)), 0) << 7 | rng.integers(0, 128, (255, 13))
    bits[:, 1:8] &= 0xFFF0  # few bits, so that many are ties
    bits[:, :1] = exponent << 7 | 127 - exponent % 32
    assert_quantised((bits | rng.integers(0, 2, bits.shape) << 15).astype(np.uint16), rule)


@every_rule
def test_blocks_equal_rational_arithmetic_at_every_largest_magnitude(rule):
    """Each row: one of the 128 numbers of a binade, which decides the scale, and numbers of the binades below."""
    for exponent in (0, 9, 254):
        bits = np.tile(np.maximum(exponent - np.arange(8) // 2, 0) << 7 | np.arange(8) % 2 << 6, (128, 1))
        bits[:, 0] |= np.arange(128)
        bits[:, 1:] = np.minimum(bits[:, 1:], bits[:, :1])
        assert_quantised(bits.astype(np.uint16), rule)


@every_rule
def test_each_block_of_32_has_a_scale_of_its_own(rule):
    bits = np.random.default_rng(1).integers(100, 150, (2, 70)) << 7
    assert_quantised((bits | np.arange(70) % 128).astype(np.uint16), rule)


@pytest.mark.parametrize("shift", [-124, -30, 0, 125])
def test_ties_of_mxfp4(shift):
    x = of(6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0, 0.251953125, 4.96875, 0.0)
    even = of(6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -4.0, 0.5, 4.0, 0.0)
    down = of(6.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 0.0, -0.5, -4.0, 0.5, 4.0, 0.0)
    for rule in MX_RULES:
        if rule.target == "mxfp4":
            expected = down if rule.name in ("modelopt", "gguf") else even
            assert np.array_equal(quantised(np.ldexp(x, shift), rule), np.ldexp(expected, shift)), rule.name


@pytest.mark.parametrize("shift", [-118, 0, 118])
def test_ties_of_mxfp8(shift):
    x = of(440.0, 17 / 16, 19 / 16, 0.75 * 2.0**-6, 2.0**-10, 3 * 2.0**-10, 5 * 2.0**-10, 15.5 * 2.0**-9, -432.0, 200.0)
    expected = of(448.0, 1.0, 1.25, 0.75 * 2.0**-6, 0.0, 2.0**-8, 2.0**-8, 2.0**-5, -448.0, 208.0)
    expected[0, [8, 9]] = -448.0, 192.0  # 432 is half-way between 416 and 448, whose codes are odd and even
    for rule in MX_RULES:
        if rule.target == "mxfp8":
            assert np.array_equal(quantised(np.ldexp(x, shift), rule), np.ldexp(expected, shift)), rule.name


#: (target, rule): the last bfloat16 number that gives a block the scale 1, and the first that gives it 2.
DOUBLES = {
    ("mxfp4", "ceil"): (6.0, 6.03125),
    ("mxfp4", "modelopt"): (6.0, 6.03125),
    ("mxfp4", "round"): (8.4375, 8.5),
    ("mxfp4", "floor"): (7.96875, 8.0),
    ("mxfp4", "gguf"): (7.96875, 8.0),
    ("mxfp4", "even"): (6.96875, 7.0),
    ("mxfp4", "quark"): (6.96875, 7.0),
    ("mxfp8", "ceil"): (448.0, 450.0),
    ("mxfp8", "round"): (632.0, 636.0),
    ("mxfp8", "floor"): (510.0, 512.0),
    ("mxfp8", "even"): (494.0, 496.0),
    ("mxfp8", "compressed-tensors"): (446.0, 448.0),
}


@every_rule
def test_the_largest_magnitude_at_which_the_scale_doubles(rule):
    finest = 0.5 if rule.target == "mxfp4" else 2.0**-9
    last, first = DOUBLES[rule.target, rule.name]
    assert round_bfloat16(last) == last < first == round_bfloat16(first)
    for shift in (-117, 0, 118):
        assert quantised(np.ldexp(of(last, finest), shift), rule)[0, 1] == np.ldexp(finest, shift)
        assert quantised(np.ldexp(of(first, finest), shift), rule)[0, 1] == 0


#: How far an element of size 1, or far below, may move in the table of docs/numerics.md: a share of it, or of the scale.
MOVES = {
    "mxfp4": ({"floor": 1 / 4, "gguf": 1 / 4, "round": 1 - 2**-0.5}, 1 / 5, 1 / 4),
    "mxfp8": ({"floor": 1 / 8, "even": 3 / 31, "round": 1 - 2**-0.5}, 1 / 17, 2.0**-10),
}


@every_rule
def test_an_element_moves_as_the_table_says(rule):
    rng = np.random.default_rng(4)
    x = np.ldexp(rng.uniform(1, 2, (500, 32)), rng.integers(-18, 1, (500, 32)) * (np.arange(32) > 0))
    x = round_bfloat16(x * rng.choice([-1, 1], x.shape))
    shares, share, of_scale = MOVES[rule.target]
    share = shares.get(rule.name, share)
    scales = np.array([[float(mx_step(Fraction(largest), rule))] for largest in np.abs(x).max(axis=1)])
    moved = np.abs(quantised(x, rule) - x)
    assert (moved <= np.maximum(share * np.abs(x), of_scale * scales)).all()
    assert (moved / np.abs(x))[np.abs(x) >= 2 * scales].max() > 0.96 * share
    assert (moved / scales)[np.abs(x) < scales / 64 if rule.target == "mxfp8" else np.abs(x) < scales].max() > 0.96 * of_scale


# ends of the range


@pytest.mark.parametrize(
    ("target", "least", "overflowing"),
    [("mxfp4", 3.5, ("ceil", "even", "quark", "modelopt")), ("mxfp8", 3.875, ("ceil", "even", "compressed-tensors"))],
)
def test_what_becomes_2_to_the_128_is_infinite(target, least, overflowing):
    for rule in MX_RULES:
        if rule.target == target:
            below, first, most = (np.ldexp(v, 126) for v in (least - 2.0**-6, least, 2 - 2.0**-7 + 2))
            if rule.name == "modelopt":  # a tie becomes 3 * 2**126
                below, first = first, np.ldexp(least + 2.0**-6, 126)
            values, eps = operand(*(of(-first, below, most, 1.0),) * 3, rule)
            assert np.isinf(values[0, [0, 2]]).all() == (rule.name in overflowing), rule.name
            assert np.isinf(eps[0, [0, 2]]).all() == (rule.name in overflowing)
            assert np.isfinite(values[0, [1, 3]]).all()
            assert not eps[0, 1]


def test_a_layer_whose_x_or_h_overflows_has_no_bound():
    # h = 64 u, or 0; u is the second element of x
    experts = from_codes([[2, 0], [0, 0]], [[0, 2], [0, 0]], [[1, 0], [0, 0]])
    arguments = np.zeros((3, 1), int), np.ones((3, 1), np.float32)
    x = np.array([[2.0**-10, 3.5 * 2.0**126], [64.0, 3.5 * 2.0**120], [64.0, 3.46875 * 2.0**120]])
    bounded = {"bf16": [True, True, True], "mxfp4/bf16": [False, True, True], "bf16/mxfp4": [True, False, True]}
    for mode, expected in bounded.items():
        reference = forward(experts, x, *arguments, out_dtype="float32", activations=mode)
        assert np.isfinite(reference.bound[:, 0]).tolist() == expected, mode
    assert reference.y[2, 0] == 0.5 * 3 * 2.0**126


def test_denormal_numbers_may_count_as_zero():
    for rule in MX_RULES:
        x = of(*(np.arange(20) * 2.0**-133), 1.5 * 2.0**-126, 64 * 2.0**-133, 127 * 2.0**-133)
        values, eps = operand(x, x, x, rule)
        assert np.array_equal(eps, np.where(np.abs(values) <= TINY, np.abs(values), 0))
        assert (eps > 0).any()
        assert not quantised(np.zeros((1, 40)), rule).any()
    # with e = -127 all that E4M3 cannot say is finer than bfloat16
    assert np.array_equal(quantised(of(*(np.arange(17) * 2.0**-133)), mode_of("mxfp8").x)[0, :17], np.arange(17) * 2.0**-133)


@every_rule
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_nan(rule, value):
    x = np.full((2, 70), 6.0)
    x[1, 66] = value
    expected = np.full((2, 70), 6.0)
    expected[1, 64:] = np.nan
    values, eps = operand(x, x, x, rule)
    assert np.array_equal(values, expected, equal_nan=True)
    assert np.array_equal(np.isinf(eps), np.isnan(expected))


# an uncertain h


def neighbours(a):
    """The bfloat16 numbers below and above, for positive ones."""
    bits = a.astype(BFLOAT16).view(np.uint16)
    return ((bits + np.uint16(step)).view(BFLOAT16).astype(np.float64) for step in (65535, 1))


@every_rule
def test_a_quantised_h_that_is_uncertain_is_within_its_error_and_attains_it(rule):
    # element 0 is the largest: the last number with its scale, or the next one, with twice the scale; others are exact, or not
    last, _ = DOUBLES[rule.target, rule.name]
    rng = np.random.default_rng(17)
    h = round_bfloat16(last * rng.uniform(0.04, 0.9, (1, 40)))
    h[0, 0] = last
    if rule.target == "mxfp8":  # whose numbers do not depend on the scale but below the least normal one
        h[0, 12:32] = round_bfloat16(np.ldexp(h[0, 12:32], -rng.integers(14, 18, 20)))
    low, high = neighbours(h)
    uncertain = rng.random(h.shape) < 0.5
    uncertain[0, :2], uncertain[0, 32:] = (True, False), False
    low, high = np.where(uncertain, low, h), np.where(uncertain, high, h)
    values, eps = operand(h, low, high, rule)
    assert np.array_equal(values, quantised(h, rule))
    choice = rng.integers(3, size=(3000, 40))
    chosen = np.choose(choice, [np.broadcast_to(v, choice.shape) for v in (low, h, high)])
    off = np.abs(quantised(chosen, rule) - values).max(axis=0)
    assert np.array_equal(off[1:], eps[0, 1:])
    assert off[0] <= eps[0, 0]  # the largest goes with its own scale only, which the error does not know
    assert not eps[0, 32:].any()  # the second block is certain
    assert (eps[0, :32][~uncertain[0, :32]] > 0).any()  # an element that is certain, but whose scale is not
    assert not operand(h, h, h, rule)[1].any()


@every_rule
def test_a_largest_magnitude_that_may_be_anything_has_every_scale(rule):
    h, low, high = np.zeros((1, 32)), np.full((1, 32), -(2.0**-126)), np.full((1, 32), 1.0)
    low[0, 1] = h[0, 1] = high[0, 1] = 0.046875
    values, eps = operand(h, low, high, rule)
    for largest in np.exp2(np.arange(-40, 1) / 4):
        one = of(largest, 0.046875)
        assert abs(quantised(round_bfloat16(one), rule)[0, 1] - values[0, 1]) <= eps[0, 1]
    assert eps[0, 0] == quantised(of(1.0), rule)[0, 0]
    assert np.isinf(operand(h, low, np.full((1, 32), np.inf), rule)[1]).all()


def test_a_tie_of_h_may_fall_to_either_side_and_only_there():
    # sigmoid(64) is 1 to within 2**-92, so that h is 64 u, and 384 gives a block the scale 64: u = 2.5 + 2**-7 lies half-way
    # between the bfloat16 numbers 2.5, of which MXFP4 makes 2, and 2.5 + 2**-6, of which it makes 3
    gate, zeros = np.zeros((2, 2, 32), int)
    gate[:, 0] = 2
    up = zeros.copy()
    up[0, 1], up[1, 2:5] = 7, 2
    down = np.zeros((32, 2), int)
    down[0, 1] = 2
    experts = from_codes(gate, up, down)
    for distance in (0.0, 2.0**-9):
        x = np.zeros((1, 32))
        x[0, :5] = 64.0, 1.0, 2.5, 2.0**-7, -distance
        reference = forward(experts, x, np.zeros((1, 1), int), np.ones((1, 1)), out_dtype="float32", activations="bf16/mxfp4")
        assert reference.y[0, 0] == 128
        flipped = np.zeros((1, 32))
        flipped[0, 0] = 192
        ratio = reference.error(flipped)[0, 0]
        assert ratio > 1e4 if distance else 0.999 < ratio <= 1


# forward


@pytest.mark.cover("values")
@pytest.mark.parametrize("format", [MXFP4, int4(64), BF16, fp8(block=(16, 16)), nvfp4()], ids=lambda v: v.description)
@pytest.mark.parametrize("activations", ["mxfp4", "mxfp8", "mxfp8/mxfp4", "mxfp4:gguf/bf16", "bf16/mxfp8:round"])
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
def test_forward_equals_rational_arithmetic(router_weight, format, activations):
    rng = np.random.default_rng(15)
    experts = random_experts(rng, 1, 35 if format is BF16 else 36, 34, format=format, bias=True)
    x, ids, weights = random_batch(rng, experts, tokens=2, top_k=1)
    expected = naive_forward(experts, x, ids, weights, [True], router_weight, activations)
    y = forward(experts, x, ids, weights, router_weight=router_weight, activations=activations).y
    assert np.abs(y - expected).max() <= 1e-12 * np.abs(expected).max()
    exact = forward(experts, x, ids, weights, router_weight=router_weight).y
    assert np.abs(exact - y).max() > 1e-3 * np.abs(y).max()


def test_unknown_modes_are_refused():
    experts = from_codes([[2, 0], [0, 0]], [[2, 0], [0, 0]], [[2, 0], [0, 0]])
    arguments = experts, np.ones((1, 2)), np.zeros((1, 1), int), np.ones((1, 1), np.float32)
    for name in ("fp4", "mxfp4/int8", "mxfp4:best"):
        with pytest.raises(InputError, match=name):
            forward(*arguments, activations=name)
    with pytest.raises(InputError, match="'folded' needs bf16 rows, found activations 'int8'"):
        forward(*arguments, activations="int8", rounding="folded")
