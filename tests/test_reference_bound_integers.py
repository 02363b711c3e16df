"""The reference's bound where x and h are int16 or int8: an uncertain h, its error, and how near to bf16 all stays."""

import helpers
import numpy as np
import pytest
from reference_experts import BFLOAT16, random_batch, random_experts
from simulated import int8_rows, int16_rows, linear

from ktmoe import Matrix, reference
from ktmoe.reference import UNIT, dequantize, forward, operand, round_bfloat16
from ktmoe.weights.formats import int4, int8


def neighbours(a):
    """The bfloat16 numbers below and above, for positive ones."""
    bits = a.astype(BFLOAT16).view(np.uint16)
    return ((bits + np.uint16(step)).view(BFLOAT16).astype(np.float64) for step in (65535, 1))


@pytest.mark.parametrize(
    ("weight_format", "activations", "roundings"),
    [
        (int4(32), "int8", 1),  # a sum is exact; that it is scaled and added is one rounding
        (int8(32), "int8", 1),
        (int8(32), "int16", 2),  # a sum may have more than 24 bits
        (helpers.SUPER_SCALED["int3 super-16"], "int16", 3),  # a scale times its super-scale, and two sums of 16
        (helpers.SUPER_SCALED["int3 super-16"], "int8", 4),  # that times the scale of x, too
    ],
    ids=["int4-int8", "int8-int8", "int8-int16", "int3-int16", "int3-int8"],
)
def test_what_is_rounded_of_one_block(weight_format, activations, roundings):
    """The bound is for these roundings and no more: of 32 products it has the sizes, and TINY."""
    rng = np.random.default_rng(5)
    arrays = {label: np.ones(shape, dtype) for label, (dtype, shape) in weight_format.arrays(3, 32).items()}
    matrix = Matrix("w", weight_format, (3, 32), **arrays)
    a = rng.integers(1, 100, (2, 32)).astype(float)
    _, eps = reference.linear(matrix, a, np.zeros_like(a), activations=activations)
    sizes = a @ np.abs(dequantize(matrix)).T
    assert np.array_equal(np.round(eps / (UNIT * sizes), 3), np.full((2, 3), roundings))


def test_a_quantised_h_that_is_uncertain_is_within_its_error_and_attains_it():
    # element 0 is the maximum: 1, or the number below, whose step is half as large; the rest are exact, or have a neighbour
    rng = np.random.default_rng(17)
    h = round_bfloat16(np.ldexp(rng.uniform(0.5, 1, (1, 40)), -rng.integers(1, 14, (1, 40))))
    h[0, 0] = h[0, 33] = 1.0
    low, high = neighbours(h)
    uncertain = rng.random(h.shape) < 0.3
    uncertain[0, :2], uncertain[0, 32:] = (True, False), False
    low, high = np.where(uncertain, low, h), np.where(uncertain, high, h)
    quantised, eps = operand(h, low, high, "int16")
    assert np.array_equal(quantised, operand(h, h, h, "int16")[0])
    choice = rng.integers(3, size=(2000, 40))
    chosen = np.choose(choice, [np.broadcast_to(v, choice.shape) for v in (low, h, high)])
    integers, steps = int16_rows(chosen)
    attained = np.abs(integers * np.repeat(steps, 32, axis=1)[:, :40].astype(np.float64) - quantised).max(axis=0)
    assert np.array_equal(attained, eps[0])
    assert not eps[0, 32:].any()  # the second group is certain
    assert (eps[0, :32][~uncertain[0, :32]] > 0).any()  # an element that is certain, but whose step is not
    assert not operand(h, h, h, "int16")[1].any()


def test_a_quantised_h_in_int8_that_is_uncertain_is_within_its_error_and_attains_it():
    # the maximum is 1, or a number beside it: three steps; the second group is certain; in the third only one element is not
    rng = np.random.default_rng(20)
    h = round_bfloat16(np.ldexp(rng.uniform(0.5, 1, (1, 70)), -rng.integers(0, 9, (1, 70))))
    h[0, [0, 33, 65]] = 1.0
    low, high = neighbours(h)
    uncertain = rng.random(h.shape) < 0.3
    uncertain[0, :2], uncertain[0, 32:] = (True, False), False
    uncertain[0, 66] = True
    low, high = np.where(uncertain, low, h), np.where(uncertain, high, h)
    quantised, eps = operand(h, low, high, "int8")
    assert np.array_equal(quantised, operand(h, h, h, "int8")[0])
    choice = rng.integers(3, size=(4000, 70))
    chosen = np.choose(choice, [np.broadcast_to(v, choice.shape) for v in (low, h, high)])
    integers, steps = int8_rows(chosen)
    off = np.abs(integers * np.repeat(steps, 32, axis=1)[:, :70].astype(np.float64) - quantised)
    assert np.array_equal(off.max(axis=0)[1:], eps[0, 1:])
    assert 0 < off[:, 0].max() <= eps[0, 0]  # the maximum goes with its own step only, which the error does not know
    assert not eps[0, 32:66].any()
    assert not eps[0, 67:].any()
    assert (eps[0, :32][~uncertain[0, :32]] > 0).any()  # an element that is certain, but whose step is not
    assert not operand(h, h, h, "int8")[1].any()


@pytest.mark.parametrize("bits", range(1, 14))
def test_a_maximum_in_int8_that_may_be_anything_is_covered(bits):
    """The steps between its ends are tried one by one, or, where they are many, half of the largest is added."""
    rng = np.random.default_rng(bits)
    h = round_bfloat16(rng.uniform(0.1, 1, (3, 32)))
    high = h.copy()
    high[:, 5] = (h[:, 5].astype(BFLOAT16).view(np.uint16) + np.uint16(1 << bits)).view(BFLOAT16).astype(np.float64)
    quantised, eps = operand(h, h, high, "int8")
    for step in rng.integers(0, 1 << bits, 200, endpoint=True):
        one = h.copy()
        one[:, 5] = (h[:, 5].astype(BFLOAT16).view(np.uint16) + np.uint16(step)).view(BFLOAT16).astype(np.float64)
        integers, steps = int8_rows(one)
        assert (np.abs(integers * steps.astype(np.float64) - quantised) <= eps).all()
    assert np.isinf(operand(h, h, np.full((3, 32), np.inf), "int8")[1]).all()


def test_a_maximum_that_may_be_anything_has_every_step():
    h, low, high = np.zeros((1, 32)), np.full((1, 32), -(2.0**-126)), np.full((1, 32), 1.0)
    low[0, 1], h[0, 1], high[0, 1] = 3 * 2.0**-16, 3 * 2.0**-16, 3 * 2.0**-16
    quantised, eps = operand(h, low, high, "int16")
    assert quantised[0, 1] == 3 * 2.0**-16
    assert eps[0, 1] == 2.0**-16  # where the maximum is 1, the step is 2**-14
    assert eps[0, 0] == 1
    assert np.isinf(operand(h, low, np.full((1, 32), np.inf), "int16")[1]).all()


def test_int8_is_within_half_a_step_of_bf16():
    """A linear map of given x; and typically it is far nearer."""
    rng = np.random.default_rng(21)
    experts = random_experts(rng, 1, 256, 256, format=int4(64))
    gate = experts.matrix(0, "gate")
    a = random_batch(rng, experts, tokens=8, top_k=1)[0].astype(np.float64)
    y = [linear(gate, a, v)[0] for v in ("bf16", "int8")]
    largest = np.repeat(np.abs(a).reshape(8, -1, 32).max(axis=2), 32, axis=1)
    most = (1 + 2.0**-8) / 254 * largest @ np.abs(dequantize(gate)).T
    assert (np.abs(y[0] - y[1]) <= most).all()
    assert np.median(np.abs(y[0] - y[1]) / most) < 0.1
    assert 0.003 < np.sqrt(np.mean((y[0] - y[1]) ** 2) / np.mean(y[0] ** 2)) < 0.02


def test_int16_is_near_bf16():
    """2**-15 of the maximum of each group of x and of h; and its own bound is smaller, since nearly nothing is rounded."""
    rng = np.random.default_rng(19)
    experts = random_experts(rng, 1, 256, 256, format=int4(64))
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=1)
    bf16, int16 = (forward(experts, x, ids, weights, out_dtype="float32", activations=v) for v in ("bf16", "int16"))
    assert 0 < np.abs(bf16.y - int16.y).max() < 2.0**-9 * np.abs(bf16.y).max()
    assert np.median(int16.bound) < np.median(bf16.bound)
    gate = experts.matrix(0, "gate")
    a = x.astype(np.float64)
    y = [linear(gate, a, v)[0] for v in ("bf16", "int16")]
    largest = np.repeat(np.abs(a).reshape(8, -1, 32).max(axis=2), 32, axis=1)
    assert (np.abs(y[0] - y[1]) <= 2.0**-15 * largest @ np.abs(dequantize(gate)).T).all()
