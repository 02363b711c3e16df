"""Codes and errors: the native code against numpy's, for every rule, source and shape; elements against all their values."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import rounding_rules
from helpers import BF16, random_experts

from ktmoe import BF16 as B16
from ktmoe import Matrix, WeightFormat, reference
from ktmoe.errors import FormatError
from ktmoe.quantization import RULES, Error, Quantizer, source, steps
from ktmoe.weights.elements import E2M1, E4M3, FP16, FP32
from ktmoe.weights.formats import FORMATS
from ktmoe.weights.ggml import GGML
from ktmoe.weights.records import RecordOrder

KEYS = list(RULES)


def matrix(weights, format=B16):
    weights = np.asarray(weights)
    return Matrix("m", format, weights.shape, weights)


def mixed(rng, n, k):
    """Rows of many magnitudes; zeros of both signs; ties where a scale is a power of two."""
    weights = rng.standard_normal((n, k)) * 2.0 ** rng.integers(-20, 12, (n, 1))
    weights[rng.random((n, k)) < 0.05] = 0
    weights[::3] = np.round(weights[::3] * 4) / 4
    return weights


def expected(quantizer: Quantizer, weights: np.ndarray):
    """numpy's codes and sums of float32 weights."""
    rule, format_ = quantizer.rule, quantizer.format
    extent = steps.extent(format_.scale, bool(format_.factor and format_.factor.per_row), weights.shape)
    low, high = rounding_rules.extremes(weights, extent)
    kind = format_.scale.kind if format_.scale else "fp32"
    made = rule.steps(steps.Groups(low, high, np.abs(weights).max(), kind, "m"))
    return rounding_rules.rounded(weights, extent, made, rule, format_.element)


@pytest.mark.parametrize(("to", "rule"), KEYS)
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_native_is_numpy(to, rule, dtype):
    """Whole chunks, tails, and groups that are cut."""
    rng = np.random.default_rng(3)
    format_ = {np.float16: WeightFormat(FP16), np.float32: WeightFormat(FP32)}.get(dtype, B16)
    quantizer = Quantizer(to, rule=rule)
    for n, k in ((5, 512), (130, 290), (1, 2), (3, 70)):
        weights = mixed(rng, n, k).astype(dtype)
        made, error = quantizer.matrix(matrix(weights, format_))
        codes, of_error, of_weights = expected(quantizer, weights.astype(np.float32))
        assert np.array_equal(made.codes.view(np.uint8), codes)
        np.testing.assert_allclose((error.error, error.weights), (of_error, of_weights), rtol=1e-12)


@pytest.mark.parametrize(("to", "rule"), KEYS)
def test_the_error_is_what_the_matrix_lost(to, rule):
    rng = np.random.default_rng(4)
    weights = mixed(rng, 64, 256).astype(BF16)
    made, error = Quantizer(to, rule=rule).matrix(matrix(weights))
    off = reference.dequantize(made) - weights.astype(np.float64)
    np.testing.assert_allclose(error.error, (off**2).sum(), rtol=1e-9)
    np.testing.assert_allclose(error.weights, (weights.astype(np.float64) ** 2).sum(), rtol=1e-12)
    assert error.relative == (error.error / error.weights) ** 0.5
    assert error + Error(1.0, 2.0) == Error(error.weights + 1.0, error.error + 2.0)
    assert Error().relative == 0


FLOATS = [key for key in KEYS if key[0] in ("mxfp4", "mxfp8")]


@pytest.mark.parametrize(("to", "rule"), FLOATS)
def test_elements_are_the_nearest(to, rule):
    """Every bfloat16 number of 12 binades beside one that makes the scale 1: sizes, signs of zero, ties, what is too large."""
    element = E2M1 if to == "mxfp4" else E4M3
    half = [value for value in element.values[: len(element.values) // 2] if value is not None]
    low, most = (-4, 8.0) if to == "mxfp4" else (-11, 512.0)
    numbers = np.concatenate([(1 + np.arange(128) / 128) * 2.0**e for e in range(low, 1 + int(np.log2(most)))])
    of_one = 446.0 if rule == "compressed-tensors" else half[-1]  # the largest weight, so that the scale is 1
    numbers = np.concatenate([[0], numbers[numbers <= of_one]])
    numbers = np.resize(np.concatenate([numbers, -numbers[1:]]), (-(-2 * len(numbers) // 31), 31))
    weights = np.concatenate([np.full((len(numbers), 1), of_one), numbers], axis=1)
    made, _ = Quantizer(to, rule=rule).matrix(matrix(weights.astype(BF16)))
    assert (made.scales == 127).all()
    codes = made.codes
    if to == "mxfp4":
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(weights.shape)
    ties = RULES[to, rule].ties
    for w, code in zip(weights.ravel().tolist(), codes.ravel().tolist(), strict=True):
        apart = [abs(abs(w) - value) for value in half]  # exact in float64
        least = min(apart)
        near = [at for at, distance in enumerate(apart) if distance == least]
        wanted = near[0] if len(near) == 1 or ties == "zero" else next(at for at in near if at % 2 == 0)
        negative = w < 0 and (wanted or RULES[to, rule].negative_zero)
        assert code == wanted + (len(element.values) // 2 if negative else 0), w


SOURCES = {name: FORMATS[name] for name in FORMATS if name != "BF16"} | {
    f"GGUF {name}": GGML[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "Q3_K", "IQ4_XS")
}


def of_format(name: str) -> Matrix:
    """Any weights."""
    rng, format_ = np.random.default_rng(5), SOURCES[name]
    if not isinstance(format_.order, RecordOrder):
        return random_experts(rng, 1, 256, 128, formats=format_).matrix(0, "up")
    _, shape = format_.arrays(128, 256)["codes"]
    records = rng.integers(0, 256, shape, np.uint8) & np.uint8(0x3F)  # so no fp16 number in them is NaN
    return Matrix("m", format_, (128, 256), records)


@pytest.mark.parametrize("name", SOURCES)
def test_sources_of_every_format(name):
    """What a matrix stands for, rounded to float32, is rounded then."""
    given = of_format(name)
    stands_for = matrix(reference.dequantize(given).astype(np.float32), WeightFormat(FP32))
    for to, rule in (("mxfp4", "ceil"), ("int8", "symmetric")):
        quantizer = Quantizer(to, rule=rule)
        (found, error), (wanted, of_wanted) = quantizer.matrix(given), quantizer.matrix(stands_for)
        assert all(np.array_equal(found.stored[label], array) for label, array in wanted.stored.items())
        assert error == of_wanted


def test_most_sources_are_read_natively():
    """Those that are not have scales of scales, minima, or both a float32 scale and a factor."""
    slow = {name for name in SOURCES if source.read(of_format(name)).stored == "fp32"}
    assert slow == {"GGUF Q4_1", "GGUF Q4_K", "GGUF Q6_K", "GGUF Q3_K", "GGUF IQ4_XS"}


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(dtype, wrong):
    weights = np.ones((3, 600), dtype)
    weights[2, 577] = wrong
    format_ = {np.float16: WeightFormat(FP16), np.float32: WeightFormat(FP32)}.get(dtype, B16)
    with pytest.raises(FormatError, match=r"m: weight \[2, 577\] is -?(nan|inf); expected a finite number"):
        Quantizer("int4").matrix(matrix(weights, format_))


def test_codes_and_scales_that_are_no_numbers():
    experts = random_experts(np.random.default_rng(7), 1, 256, 128, formats=FORMATS["FP8 per 128x128"])
    given = experts.matrix(0, "up")
    for label, at, stored, message in (
        ("codes", (3, 5), 0x7F, r"up: weight \[3, 5\] is byte 127, which is NaN or infinite"),
        ("scales", (0, 1), np.nan, r"up: scale \[0, 1\] is nan; expected a finite number"),
        ("scales", (0, 1), 3e38, r"up: weight \[\d+, \d+\] is too large for float32"),
    ):
        array = getattr(given, label).copy()
        array[at] = stored
        with pytest.raises(FormatError, match=message):
            Quantizer("mxfp4").matrix(replace(given, **{label: array}))


def test_a_bias_stays_and_odd_sizes_are_refused():
    bias = np.arange(3, dtype=np.float32)
    given = replace(matrix(np.ones((3, 5), BF16)), bias=bias)
    assert np.array_equal(Quantizer("int8").matrix(given)[0].bias, bias)
    with pytest.raises(FormatError, match=r"m: expected a multiple of 2 columns to round, found \[3, 5\]"):
        Quantizer("mxfp4").matrix(given)


def test_another_largest_weight():
    """Two matrices that share a factor."""
    rng = np.random.default_rng(8)
    first, second = (matrix((rng.standard_normal((32, 64)) * size).astype(BF16)) for size in (1, 3))
    quantizer = Quantizer("nvfp4")
    largest = max(quantizer.largest(first), quantizer.largest(second))
    assert largest == np.abs(second.codes.astype(np.float64)).max()
    made = [quantizer.matrix(given, largest=largest)[0] for given in (first, second)]
    assert np.array_equal(made[0].factor, made[1].factor)
    assert np.array_equal(made[1].codes, quantizer.matrix(second)[0].codes)


def test_e4m3_is_ml_dtypes_cast():
    bits = np.arange(1, 0x43E1, dtype=np.uint32)
    numbers = np.resize((bits << 16).view(np.float32), (136, 128))
    numbers[:, 0] = 448
    made, _ = Quantizer("fp8", group="row", rule="nearest").matrix(matrix(numbers.astype(BF16)))
    assert (made.factor == 1).all()
    assert np.array_equal(made.codes, numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize(("to", "rule"), KEYS)
def test_bands_of_groups(to, rule, monkeypatch):
    """Some groups' scales at a time: the same bytes."""
    given = matrix(mixed(np.random.default_rng(9), 300, 256).astype(BF16))
    whole, of_whole = Quantizer(to, rule=rule).matrix(given)
    monkeypatch.setattr("ktmoe.quantization.quantizer.AT_ONCE", 5)
    made, error = Quantizer(to, rule=rule).matrix(given)
    assert all(np.array_equal(made.stored[label], array) for label, array in whole.stored.items())
    np.testing.assert_allclose((error.error, error.weights), (of_whole.error, of_whole.weights), rtol=1e-12)
