"""Scales of groups by the definitions, in rational numbers: every rule, every fraction of a largest weight, the ends."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from helpers import BF16

from ktmoe import BF16 as B16
from ktmoe import Matrix, WeightFormat
from ktmoe.errors import FormatError
from ktmoe.quantization import RULES, Quantizer
from ktmoe.weights.elements import FP32

LARGEST = {"mxfp4": Fraction(6), "mxfp8": Fraction(448)}
#: The bits behind the first to which a rule rounds the largest weight.
BITS = {("mxfp4", "even"): 1, ("mxfp4", "quark"): 1, ("mxfp8", "even"): 3, ("mxfp8", "compressed-tensors"): 1}
POWERS = [key for key in RULES if key[0] in LARGEST]


def floor_log2(number: Fraction) -> int:
    exponent = number.numerator.bit_length() - number.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= number else exponent - 1


def exponent(to: str, rule: str, m: Fraction) -> int:
    """The exponent of the scale, before it is kept in range."""
    share = m / LARGEST[to]
    if rule in ("ceil", "modelopt"):
        return -floor_log2(1 / share)
    if rule == "round":
        low = floor_log2(share)
        return low + (share**2 > Fraction(2) ** (2 * low + 1))
    low = floor_log2(m)
    if (to, rule) in BITS:
        unit = Fraction(2) ** (low - BITS[to, rule])
        low = floor_log2((m / unit + Fraction(1, 2)).__floor__() * unit)
    return low - floor_log2(LARGEST[to])


def rows(weights) -> Matrix:
    weights = np.atleast_2d(np.asarray(weights)).astype(BF16)
    return Matrix("m", B16, weights.shape, weights)


@pytest.mark.parametrize(("to", "rule"), POWERS)
def test_powers_of_two(to, rule):
    """A row for each largest weight, of either sign; the others are a third of it."""
    exponents = [-133, -127, -126, -125, -119, -118, -3, 0, 1, 7, 125, 127]
    most = np.array([f * 2.0 ** (e - 7) for e in exponents for f in range(128, 256) if e > -127 or f == 128])
    weights = np.repeat(most[:, None], 32, axis=1) / 3
    weights[:, 5] = most * np.where(np.arange(len(most)) % 2, -1, 1)
    made, _ = Quantizer(to, rule=rule).matrix(rows(weights))
    wanted = [min(max(exponent(to, rule, Fraction(m)), -127), 127) + 127 for m in most]
    assert made.scales[:, 0].tolist() == wanted
    assert len(set(wanted)) > 6


@pytest.mark.parametrize(("to", "rule"), POWERS)
def test_a_group_of_zeros(to, rule):
    made, error = Quantizer(to, rule=rule).matrix(rows([[0.0] * 32 + [1.0] * 32]))
    assert made.scales[0, 0] == (1 if rule == "quark" else 0)
    assert not made.codes[0, : 16 if to == "mxfp4" else 32].any()
    assert error.weights == 32


def to_kind(number: Fraction, kind) -> Fraction:
    """Rounded to float32 and then to the kind, as these rules do."""
    return Fraction(float(np.float32(float(number)).astype(kind)))


KINDS = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
#: (to, rule): (divisor of the largest weight, what a group of zeros has).
SHARES = {
    ("fp8", "nearest"): (Fraction(448), 1.0),
    ("int8", "symmetric"): (Fraction(127), 1.0),
    ("int8", "compressed-tensors"): (Fraction(255, 2), 2.0**-7),
    ("int4", "symmetric"): (Fraction(7), 1.0),
    ("int4", "compressed-tensors"): (Fraction(15, 2), 2.0**-7),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("to", "rule"), SHARES)
def test_shares(to, rule, kind):
    divisor, of_zeros = SHARES[to, rule]
    exponents = (-3, 0, 5) if kind == "fp16" else (-100, -3, 0, 100)
    most = np.array([f * 2.0 ** (e - 7) for e in exponents for f in range(128, 256)] + [0.0])
    weights = np.zeros((len(most), 32))
    weights[:, 7] = -most
    made, _ = Quantizer(to, rule=rule, group=(1, 32), scales=kind).matrix(rows(weights))
    wanted = [to_kind(Fraction(m) / divisor, KINDS[kind]) for m in most[:-1].tolist()]
    assert [Fraction(float(scale)) for scale in made.scales[:-1, 0]] == wanted
    assert made.scales[-1, 0] == of_zeros


@pytest.mark.parametrize("kind", KINDS)
def test_up_is_the_least_scale_that_reaches(kind):
    exponents = (0, 5) if kind == "fp16" else (-100, 0, 100)
    most = np.array([f * 2.0 ** (e - 7) for e in exponents for f in range(128, 256)])
    made, _ = Quantizer("fp8", rule="up", group=(1, 1), scales=kind).matrix(rows(most[:, None]))
    scales = made.scales[:, 0]
    below = (scales.view(f"u{scales.itemsize}") - np.array(1, f"u{scales.itemsize}")).view(scales.dtype)
    for m, scale, less in zip(most.tolist(), scales.tolist(), below.tolist(), strict=True):
        assert 448 * Fraction(less) < Fraction(m) <= 448 * Fraction(scale)


def f32(number) -> Fraction:
    return Fraction(float(np.float32(float(number))))


def e4m3(number: Fraction) -> Fraction:
    return Fraction(float(np.float64(float(number)).astype(ml_dtypes.float8_e4m3fn)))


@pytest.mark.parametrize("rule", ["modelopt", "compressed-tensors"])
def test_two_levels(rule):
    """Each step of float32; a share of the largest that is given instead; groups of zeros, and far below the others."""
    most = np.array([1.0, 0.3, 0.007, 1e-5, 1e-9, 0.0, 1.9921875, 0.75]).astype(BF16).astype(np.float64)
    weights = np.repeat(most, 16)[None]
    for largest in (None, 5.0):
        made, _ = Quantizer("nvfp4", rule=rule).matrix(rows(weights), largest=largest)
        whole = Fraction(largest or most.max())
        if rule == "modelopt":
            factor = f32(whole / 2688)
            scales = [min(max(f32(Fraction(m) / f32(6 * factor)), Fraction(1, 512)), Fraction(448)) for m in most]
            scales = [e4m3(scale) if m else Fraction(1) for scale, m in zip(scales, most, strict=True)]
        else:
            factor = f32(2688 * f32(1 / whole))
            scales = [e4m3(min(f32(factor * f32(Fraction(m) / 6)), Fraction(448))) or Fraction(1, 8) for m in most]
        assert Fraction(float(made.factor[0])) == factor
        assert [Fraction(float(scale)) for scale in made.scales[0].view(ml_dtypes.float8_e4m3fn)] == scales


ONE = np.float32(1)
#: The scale of a group whose largest weight is m by the source's own steps, float32 each.
BY_SOURCE = {
    ("fp8", "nearest"): lambda m: m / np.float32(448),
    ("fp8", "transformers"): lambda m: ONE / (np.float32(448) * (ONE / m)),  # torch: 448 / m
    ("int8", "compressed-tensors"): lambda m: m / np.float32(127.5),
    ("int8", "amxint8"): lambda m: m * (ONE / np.float32(127)),
    ("int8", "moe_int8"): lambda m: m / np.float32(127),
    ("int4", "compressed-tensors"): lambda m: m / np.float32(7.5),
    ("int4", "amxint4"): lambda m: m / np.float32(7),
    ("int4", "moe_int4"): lambda m: m / np.float32(7),
}


def at_random(rows: int, columns: int) -> np.ndarray:
    """Finite float32 numbers, in each row of about the same magnitude."""
    random = np.random.default_rng(11)
    return (random.standard_normal((rows, columns)) * 2.0 ** random.integers(-110, 120, (rows, 1))).astype(np.float32)


def of_floats(weights: np.ndarray) -> Matrix:
    return Matrix("m", WeightFormat(FP32), weights.shape, weights)


@pytest.mark.parametrize(("to", "rule"), BY_SOURCE)
def test_scales_by_their_sources(to, rule):
    weights, of_row = at_random(4000, 32), RULES[to, rule].group == "row"
    made, _ = Quantizer(to, rule=rule, **({} if of_row else {"group": (1, 32), "scales": "fp32"})).matrix(of_floats(weights))
    found = made.factor if of_row else made.scales[:, 0]
    np.testing.assert_array_equal(found, BY_SOURCE[to, rule](np.abs(weights).max(axis=1)))


def test_codes_of_transformers():
    """Weights are multiplied by torch's 448 / m: bfloat16 ones have ties, where another rounding of that gives other codes."""
    weights = at_random(4000, 32).astype(BF16).astype(np.float32)
    made, _ = Quantizer("fp8", rule="transformers", group=(1, 32)).matrix(of_floats(weights))
    inverses = np.float32(448) * (ONE / np.abs(weights).max(axis=1, keepdims=True))
    wanted = np.clip(weights * inverses, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(made.codes.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("rule", ["modelopt", "compressed-tensors"])
def test_factors_by_their_sources(rule):
    """Of a thousand matrices. A weight of -0 has the code 0, a negative one that becomes zero 8."""
    for weights in at_random(1000, 32)[:, None]:
        weights[0, :2] = -0.0, np.abs(weights).max() * np.float32(-(2**-20))
        m = np.abs(weights).max()
        made, _ = Quantizer("nvfp4", rule=rule).matrix(of_floats(weights))
        assert made.factor == (m / np.float32(2688) if rule == "modelopt" else np.float32(2688) * (ONE / m))
        assert made.codes[0, 0] == 0x80


@pytest.mark.parametrize("kind", KINDS)
def test_zero_points(kind):
    def rounded(number):
        return to_kind(number, KINDS[kind])

    random = np.random.default_rng(0)
    weights = (random.standard_normal((200, 32)) + random.uniform(-2, 2, (200, 1))).astype(BF16).astype(np.float64)
    weights[0], weights[1], weights[2] = 0, np.abs(weights[1]), -np.abs(weights[2])
    made, _ = Quantizer("int4", symmetric=False, scales=kind).matrix(rows(weights))
    assert made.scales[0, 0] == np.float32(ml_dtypes.finfo(KINDS[kind]).eps)
    assert made.offsets[0, 0] == 8
    for row, scale, point in zip(weights[1:], made.scales[1:, 0], made.offsets[1:, 0].tolist(), strict=True):
        low, high = Fraction(min(row.min(), 0.0)), Fraction(max(row.max(), 0.0))
        wanted = rounded(rounded(high - low) / 15)
        assert Fraction(float(scale)) == wanted
        z = rounded(-8 - rounded(low / wanted))
        assert point - 8 == min(max(round(z), -8), 7)


def test_scales_that_a_kind_does_not_have():
    with pytest.raises(FormatError, match=r"m: a scale of .* is too large for fp16"):
        Quantizer("int4", scales="fp16").matrix(rows([[2.0**20] * 32]))


def test_math_of_the_oracle():
    assert [floor_log2(Fraction(n)) for n in (1, 2, 3, 4, 7, 8)] == [0, 1, 1, 2, 2, 3]
    assert all(floor_log2(Fraction(x)) == math.floor(math.log2(x)) for x in (0.3, 0.6, 1e-9, 12345.6))
