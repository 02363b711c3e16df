"""bfloat16 rows as symmetric integers: each rule's ties, its steps by Python's numbers, and how far a weight can move."""

import math
from fractions import Fraction

import numpy as np
import pytest
from helpers import BF16, random_experts

from ktmoe import BF16 as B16
from ktmoe import GatedActivation, Matrix, reference
from ktmoe.errors import FormatError
from ktmoe.quantization import Quantizer

RULES = {
    "EVEN_8": Quantizer("int8", rule="amxint8"),
    "EVEN_4": Quantizer("int4", rule="amxint4"),
    "AWAY_8": Quantizer("int8", rule="moe_int8"),
    "AWAY_4": Quantizer("int4", rule="moe_int4"),
}
MOST = {"EVEN_8": 127, "EVEN_4": 7, "AWAY_8": 127, "AWAY_4": 7}
#: How far q * s can be from w, as a part of a row's scale, see docs/numerics.md.
BOUNDS = {"EVEN_8": 1 / 2 + 2**-16, "EVEN_4": 17 / 32 + 2**-16, "AWAY_8": 1 / 2 + 2**-16, "AWAY_4": 1 / 2 + 2**-16}


def matrix(weights, bias=None):
    weights = np.asarray(weights, np.float32).astype(BF16)
    return Matrix("m", B16, weights.shape, weights, bias=bias)


def rounded(name, weights):
    """(codes, scales) as the rule's matrix stands for them, by the reference."""
    made, _ = RULES[name].matrix(matrix(weights))
    scales = made.factor.astype(np.float64)
    whole = reference.dequantize(Matrix("q", made.format, made.shape, made.codes, factor=np.ones_like(made.factor)))
    assert np.array_equal(reference.dequantize(made), whole * scales[:, None])
    return whole, scales


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("EVEN_8", (0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 0.25), (0, 2, 2, 0, -2, -2, 126, 0)),
        ("AWAY_8", (0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 0.25), (1, 2, 3, -1, -2, -3, 127, 0)),
        # 39.5 sixteenths are 40 by even, which is half of a step above 2; 39.25 sixteenths are 39
        ("EVEN_4", (0.5, 1.5, 2.5, -0.5, -2.5, 2.46875, 2.453125, -2.46875), (1, 2, 3, -1, -3, 3, 2, -3)),
        ("AWAY_4", (0.5, 1.5, 2.5, -0.5, -2.5, 2.46875, 2.453125, -2.46875), (1, 2, 3, -1, -3, 2, 2, -2)),
    ],
)
def test_ties(name, given, wanted):
    """Of a row whose scale is 1; EVEN_8's is, too, as 127 * (1 / 127) is rounded."""
    codes, scales = rounded(name, [[*given, MOST[name], -MOST[name]]])
    assert scales == 1
    assert codes[0].tolist() == [*wanted, MOST[name], -MOST[name]]


def as_float32(number: Fraction) -> float:
    return float(np.float32(float(number)))


def away(number) -> int:
    return int(math.copysign(math.floor(abs(Fraction(number)) + Fraction(1, 2)), number))


def restated(name: str, w: float, scale: float) -> int:
    """A code by the rule's words: round() is to even."""
    if name == "AWAY_8":
        return away(as_float32(Fraction(w) / Fraction(scale)))
    if name == "AWAY_4":
        return away(w / scale)
    steps = 16 if name == "EVEN_4" else 1
    nearest = round(as_float32(Fraction(w) * Fraction(as_float32(steps / Fraction(scale)))))
    return away(Fraction(nearest, steps))


@pytest.mark.parametrize("name", RULES)
def test_each_step(name):
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal((40, 64)) * 2.0 ** rng.integers(-20, 20, (40, 1))).astype(BF16).astype(np.float64)
    codes, scales = rounded(name, weights)
    for row, found, scale in zip(weights, codes, scales, strict=True):
        most = Fraction(as_float32(Fraction(1, 127))) if name == "EVEN_8" else Fraction(1, MOST[name])
        assert scale == as_float32(Fraction(np.abs(row).max()) * most)
        assert found.tolist() == [restated(name, w, scale) for w in row.tolist()]


@pytest.mark.parametrize("name", RULES)
def test_how_far_a_weight_moves(name):
    """Rows in several turns; all magnitudes that have a normal scale."""
    rng = np.random.default_rng(1)
    weights = (rng.standard_normal((300, 512)) * 2.0 ** rng.integers(-110, 120, (300, 1))).astype(BF16).astype(np.float64)
    codes, scales = rounded(name, weights)
    off = np.abs(codes * scales[:, None] - weights) / scales[:, None]
    assert off.max() <= BOUNDS[name]
    assert off.max() > BOUNDS[name] * 0.99
    assert (np.abs(codes).max(axis=1) == MOST[name]).all()


@pytest.mark.parametrize("name", RULES)
def test_the_smallest_and_the_largest_numbers(name):
    """Zeros; numbers whose scale is denormal, and has no float32 inverse; bfloat16's greatest."""
    least, greatest = 2.0**-133, (2 - 2**-7) * 2.0**127
    codes, scales = rounded(name, [[0, -0.0], [least, -least], [least * 100, least * 50], [greatest, greatest / 2]])
    assert scales[0] == 0
    assert not codes[0].any()
    most = MOST[name]
    assert codes[1].tolist() == [most, -most]
    assert codes[2:, 0].tolist() == [most, most]
    assert (np.abs(codes[2:, 1] - most / 2) <= 1).all()


@pytest.mark.parametrize("name", RULES)
def test_experts(name):
    """A matrix at a time, with its bias; the activation and what router weights multiply are the same."""
    activation = GatedActivation(limit=3.0)
    experts = random_experts(np.random.default_rng(2), 3, 64, 32, formats=B16, biases=True, activation=activation)
    experts.router_weight = "expert_input"
    made = RULES[name].experts(experts)
    assert made.router_weight == "expert_input"
    assert (made.num_experts, made.hidden, made.intermediate, made.activation) == (3, 64, 32, activation)
    for projection in ("gate", "up", "down"):
        found, original = made.matrix(1, projection), experts.matrix(1, projection)
        assert found.format == RULES[name].format == made.formats[projection]
        assert np.array_equal(found.bias, original.bias)
        off = np.abs(reference.dequantize(found) - original.codes.astype(np.float64))
        assert (off <= BOUNDS[name] * found.factor[:, None]).all()


@pytest.mark.parametrize("name", RULES)
def test_what_cannot_be_rounded(name):
    rule = RULES[name]
    for wrong in (np.nan, np.inf):
        with pytest.raises(FormatError, match=r"m: weight \[1, 0\] is (nan|inf); expected a finite number"):
            rule.matrix(matrix([[1, 2], [wrong, 3]]))
    odd = matrix([[1, 2, 3]])
    if MOST[name] == 7:
        with pytest.raises(FormatError, match=r"m: expected a multiple of 2 columns to round, found \[1, 3\]"):
            rule.matrix(odd)
    else:
        assert rule.matrix(odd)[0].shape == (1, 3)
