"""Blocks of bfloat16 numbers rounded to MX formats, bit for bit: against the words of each rule in exact float64, against what
rounds weights, and against the casts of ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import ways
from helpers import BF16
from integer_rows import INT8, INT16, minus_16_sums, numbers_below, words

from ktmoe import BF16 as B16
from ktmoe import MXFP4, Matrix
from ktmoe._native import core
from ktmoe.backends import native
from ktmoe.errors import InputError
from ktmoe.quantization import RULES, Quantizer, block_rule

ELEMENTS = {"mxfp4": "E2M1", "mxfp8": "E4M3"}
KEYS = [key for key in RULES if key[0] in ELEMENTS]
#: By code, without signs.
SIZES = {
    "mxfp4": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "mxfp8": np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float),
}
#: Bits behind the first to which a rule rounds M.
KEPT = {("mxfp4", "even"): 1, ("mxfp4", "quark"): 1, ("mxfp8", "even"): 3, ("mxfp8", "compressed-tensors"): 1}


def floor_log2(numbers):
    return np.frexp(numbers)[1] - 1


def exponents(key, most):
    """e of blocks whose largest magnitudes are these, none of them 0: what the rule says in words."""
    target, name = key
    largest = SIZES[target][-1]
    if name in ("ceil", "modelopt", "round"):
        candidates = floor_log2(most)[:, None] - np.arange(12)[::-1]
        with np.errstate(under="ignore"):
            shares = most[:, None] / (largest * 2.0**candidates)
        fits = (shares**2 >= 0.5) & (shares**2 < 2) if name == "round" else shares <= 1
        found = np.take_along_axis(candidates, fits.argmax(axis=1)[:, None], axis=1)[:, 0]
        assert fits.any(axis=1).all()
    else:
        if key in KEPT:
            units = 2.0 ** (floor_log2(most) - KEPT[key])
            most = np.floor(most / units + 0.5) * units
        found = floor_log2(most) - floor_log2(largest)
    return np.maximum(found, -127)


def expected(key, bits):
    """(codes one a byte, scales, bits of the numbers) of finite bits [k]; every step is exact in float64."""
    target, name = key
    x = bits.view(BF16).astype(float).reshape(-1, 32)
    sizes, most = SIZES[target], np.abs(x).max(axis=1)
    e = np.full(len(x), 1 - 127 if name == "quark" else -127)
    e[most > 0] = exponents(key, most[most > 0])
    t = np.abs(x) / 2.0 ** e[:, None]
    middles = (sizes[:-1] + sizes[1:]) / 2
    below, above = (np.searchsorted(middles, t, side) for side in ("left", "right"))
    ties = {"modelopt": below, "gguf": below if target == "mxfp4" else None}.get(name, np.where(below % 2, above, below))
    code = np.where(below == above, below, ties)
    negative = np.signbit(x) & ((code > 0) | (name not in ("quark", "gguf")))
    number = sizes[code] * 2.0 ** e[:, None]
    with np.errstate(over="ignore"):
        rounded = np.where(negative, -number, number).astype(np.float32).astype(BF16)
    assert (np.isinf(rounded) == (number >= 2.0**128)).all()
    assert (np.abs(rounded.astype(float)) == number)[np.isfinite(rounded)].all()  # no finer than bfloat16's grid
    sign = 8 if target == "mxfp4" else 128
    return (code + negative * sign).astype(np.uint8).ravel(), (e + 127).astype(np.uint8), rounded.view(np.uint16).ravel()


def codes_of(key, codes):
    """One a byte."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1) if key[0] == "mxfp4" else codes


def check(key, bits):
    rule = block_rule(RULES[key])
    codes, scales = rule.quantize(bits)
    expected_codes, expected_scales, expected_bits = expected(key, bits.ravel())
    assert np.array_equal(scales.ravel(), expected_scales)
    assert np.array_equal(codes_of(key, codes).ravel(), expected_codes)
    assert np.array_equal(core.round_blocks(rule, bits).ravel(), expected_bits)
    assert np.array_equal(core.block_values(ELEMENTS[key[0]], codes, scales).ravel(), expected_bits)


def every_number_below(tops):
    return np.concatenate([numbers_below(top) for top in tops])


#: Exponent fields at which scales or numbers reach an end of the range, and one that is far from both.
ENDS = [*range(13), 127, 245, 246, 247, *range(250, 255)]


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_every_number_at_the_ends_of_the_range(key):
    check(key, every_number_below(ENDS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 255, 15))
@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_every_number_below_every_exponent(key, first):
    check(key, every_number_below(range(first, first + 15)))


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_every_maximum(key):
    """Each number as the largest of a block, with some of all sizes below it, and zeros of both signs."""
    most = np.arange(0x7F80)
    others = np.random.default_rng(1).integers(0, np.maximum(most, 1)[:, None] + 1, (len(most), 29))
    signs = np.random.default_rng(2).integers(0, 2, (len(most), 30)) << 15
    groups = np.concatenate([most[:, None], others], axis=1) | signs
    zeros = np.broadcast_to([0, 0x8000], (len(most), 2))
    check(key, np.concatenate([zeros, groups], axis=1).astype(np.uint16))


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_weights_are_rounded_alike(key):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((64, 544)) * 2.0 ** rng.integers(-120, 100, (64, 1))
    x[rng.random(x.shape) < 0.05] = 0
    x[5] = 0
    x = x.astype(BF16)
    made, _ = Quantizer(key[0], rule=key[1]).matrix(Matrix("m", B16, x.shape, x))
    codes, scales = block_rule(RULES[key]).quantize(x.view(np.uint16))
    assert np.array_equal(codes, made.codes.view(np.uint8).reshape(codes.shape))
    assert np.array_equal(scales, made.scales)


@pytest.mark.parametrize(("key", "dtype"), [(("mxfp4", "ceil"), "float4_e2m1fn"), (("mxfp8", "ceil"), "float8_e4m3fn")])
def test_codes_are_the_casts_of_ml_dtypes(key, dtype):
    """All bfloat16 numbers of a scale of 1."""
    largest = SIZES[key[0]][-1].astype(BF16)
    bits = np.arange(largest.view(np.uint16) + 1, dtype=np.uint16)
    bits = np.resize(np.concatenate([bits, bits | 0x8000]), (-(-2 * len(bits) // 31), 31))
    groups = np.concatenate([np.full((len(bits), 1), largest.view(np.uint16)), bits], axis=1)
    codes, scales = block_rule(RULES[key]).quantize(groups)
    assert set(scales.ravel()) == {127}
    cast = groups.view(BF16).astype(np.float32).astype(getattr(ml_dtypes, dtype))
    assert np.array_equal(codes_of(key, codes), cast.view(np.uint8))


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_a_block_with_a_number_that_is_not_finite_is_nan(key):
    rule, clean = block_rule(RULES[key]), np.random.default_rng(4).standard_normal((3, 32)).astype(BF16).view(np.uint16)
    codes, scales = rule.quantize(clean)
    for word in (0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81):
        for at in (0, 1, 13, 31):
            bits = clean.copy()
            bits[1, at] = word
            found_codes, found_scales = rule.quantize(bits)
            assert found_scales[1] == 255
            assert not found_codes[1].any()
            assert np.isnan(core.round_blocks(rule, bits)[1].view(BF16).astype(float)).all()
            others = [0, 2]
            assert np.array_equal(found_codes[others], codes[others])
            assert np.array_equal(found_scales[others], scales[others])
            assert np.array_equal(core.round_blocks(rule, bits)[others], core.round_blocks(rule, clean)[others])


def test_what_is_too_large_becomes_infinity():
    """The largest bfloat16 number is nearest to 2^128."""
    bits = np.full((1, 32), 0xFF7F, np.uint16)
    bits[0, 1:] = words(0, 127, 0)
    for key in (("mxfp4", "ceil"), ("mxfp8", "ceil")):
        rounded = core.round_blocks(block_rule(RULES[key]), bits).view(BF16).astype(float)
        assert rounded[0, 0] == -np.inf
        assert not rounded[0, 1:].any()


@pytest.mark.parametrize("target", ELEMENTS)
def test_values_of_every_code_and_scale(target):
    """Those that bfloat16 has not are rounded to nearest even; without numbers: 0x7F and 0xFF of E4M3, and the scale 255."""
    codes = np.arange(256, dtype=np.uint8)
    numbers = codes.view(ml_dtypes.float8_e4m3fn).astype(float)
    if target == "mxfp4":
        numbers = np.concatenate([SIZES["mxfp4"], -SIZES["mxfp4"]])[codes_of((target,), codes)]
    of_scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], len(numbers) // 32, axis=1)
    found = core.block_values(ELEMENTS[target], np.broadcast_to(codes, (256, 256)), of_scales).view(BF16)
    with np.errstate(over="ignore"):
        exact = numbers * 2.0 ** (np.arange(255)[:, None] - 127)
        assert np.array_equal(found[:255].astype(float), exact.astype(np.float32).astype(BF16).astype(float), equal_nan=True)
    assert np.isnan(found[255].astype(float)).all()


def test_what_cannot_be_rounded():
    rule = block_rule(RULES["mxfp4", "ceil"])
    for wrong in (np.zeros(33, np.uint16), np.zeros(32, np.float32), np.uint16(0), [0] * 32):
        for method in (lambda bits: core.round_blocks(rule, bits), rule.quantize):
            with pytest.raises(InputError, match=r"bits must be uint16 \[\.\.\., a multiple of 32\], found"):
                method(wrong)
    with pytest.raises(InputError, match=r"scales must be \[2, 1\], found \[2, 2\]"):
        core.block_values("E4M3", np.zeros((2, 32), np.uint8), np.zeros((2, 2), np.uint8))
    with pytest.raises(InputError, match="element must be 'E2M1' or 'E4M3', found 'E5M2'"):
        core.block_values("E5M2", np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.uint8))
    with pytest.raises(InputError, match="a rule of mxfp4 or mxfp8 rounds blocks, found one of nvfp4, 'modelopt'"):
        block_rule(RULES["nvfp4", "modelopt"])


def test_no_blocks():
    for key in KEYS:
        rule = block_rule(RULES[key])
        for shape in ((0, 64), (3, 0)):
            codes, scales = rule.quantize(np.zeros(shape, np.uint16))
            assert core.round_blocks(rule, np.zeros(shape, np.uint16)).shape == shape
            assert (codes.size, scales.shape) == (0, (shape[0], shape[1] // 32))
            assert core.block_values(ELEMENTS[key[0]], codes, scales).shape == shape


@pytest.mark.parametrize(("form", "row"), [("int16", row) for row in INT16] + [("int8", row) for row in INT8])
def test_rows_of_integers_hold_e2m1_exactly(form, row, emulator_folder):
    with ways.prepared(row, emulator_folder):
        table = native.load_table(row)
    groups = every_number_below([0, 1, 2, 3, 4, 127, 252, 253, 254])
    if ways.WAYS[row] != "native":
        groups = groups[::40]
    for name in ("ceil", "floor", "gguf"):
        bits = core.round_blocks(block_rule(RULES["mxfp4", name]), groups).ravel()
        bits = bits[np.repeat(np.isfinite(bits.view(BF16).astype(float)).reshape(-1, 32).all(axis=1), 32)]
        with ways.prepared(row, emulator_folder):
            encoded = core.encode(table, MXFP4, form, bits, True)
        k, size = len(bits), 2 if form == "int16" else 1
        behind, halves = encoded[size * k :].reshape(2, -1, 8)
        scales, starts = behind[:, :4].copy().view(np.float32)[:, 0], np.hstack([behind[:, 4:], halves])
        q = encoded[: size * k].view(f"i{size}").astype(float)
        if form == "int8":
            q = q.reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
        assert np.array_equal(q * np.repeat(scales.astype(float), 32), bits.view(BF16).astype(float))
        assert np.abs(q).max() <= (32640 if form == "int16" else 12)
        words_ = form == "int8" and row == "avx2"  # of even k, of odd k
        sums = starts.view(np.int16).reshape(-1, 3, 2).astype(int).sum(axis=2) if words_ else starts.view(np.int32)
        assert np.array_equal(sums, minus_16_sums(q))
