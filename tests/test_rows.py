"""What an activation mode makes of a row of bfloat16: integers and scales against integer arithmetic, bit for bit."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import ways
from helpers import B16, BF16, SUPER_SCALED, same_bits
from integer_rows import GROUP, INT8, INT16, minus_16_sums, numbers_below, words

from ktmoe import MXFP4
from ktmoe._native import core
from ktmoe.backends import native
from ktmoe.errors import InputError

LEAST_EXPONENT = -126


@pytest.fixture(scope="module", params=INT16)
def int16(request, emulator_folder):
    """core.encode for int16: a function from bfloat16 bits [k] to (q int16 [k], scales float32, minus_16_sums(q))."""
    with ways.prepared(request.param, emulator_folder):
        table = native.load_table(request.param)

    def encode(bits):
        row = core.encode(table, MXFP4, "int16", bits)
        k = len(bits)
        assert row.nbytes == 2 * k + 16 * (k // GROUP)
        behind, halves = row[2 * k :].reshape(2, -1, 8)
        scales, sums = behind[:, :4].copy().view(np.float32)[:, 0], np.hstack([behind[:, 4:], halves]).view(np.int32)
        return row[: 2 * k].view(np.int16), scales, sums

    return encode


def test_who_has_integers(table):
    modes = {activations for _, _, _, activations, _, _ in core.kernels(table)}
    for mode, who in (("int16", INT16), ("int8", INT8)):
        assert (mode in modes) == (table.name in who)
        if table.name not in who:
            with pytest.raises(InputError, match=rf"{table.name} has no rows of 32 for '{mode}'"):
                core.encode(table, MXFP4, mode, np.zeros(32, np.uint16))


def split(bits):
    """(sign, m, e): a finite bfloat16 number is sign * m * 2**e, m an integer below 256; int64."""
    bits = bits.astype(np.int64)
    field, fraction = bits >> 7 & 255, bits & 127
    return np.where(bits >> 15, -1, 1), np.where(field, fraction | 128, fraction), np.maximum(field, 1) - 127 - 7


def expected(bits):
    """(q, exponents of the scales) by the rule in docs/numerics.md, in integers."""
    sign, m, e = (part.reshape(-1, GROUP) for part in split(bits))
    magnitudes = np.frexp(m)[1] - 1 + e  # floor(log2), of what is not 0
    top = np.maximum(np.where(m > 0, magnitudes, LEAST_EXPONENT), LEAST_EXPONENT).max(axis=1, keepdims=True)
    shift = e - (top - 14)  # x / s = m * 2**shift
    above, below = m << np.maximum(shift, 0), np.minimum(np.maximum(-shift, 0), 40)
    q, rest, half = above >> below, above & ((1 << below) - 1), (1 << below) >> 1
    q += (rest > half) | ((rest == half) & (below > 0) & (q % 2 == 1))
    return (sign * q).reshape(-1), (top - 14)[:, 0]


def check(int16, bits):
    q, scales, sums = int16(bits)
    expected_q, exponents = expected(bits)
    assert np.array_equal(q, expected_q)
    assert same_bits(scales, np.ldexp(1.0, exponents).astype(np.float32))
    assert np.array_equal(sums, minus_16_sums(expected_q))
    return q, scales


@pytest.mark.parametrize("first", range(0, 255, 51))
def test_every_exponent_every_number_below_it(int16, first):
    for top in range(first, first + 51):
        groups = numbers_below(top)
        check(int16, groups.ravel())


def test_the_arithmetic_of_this_file():
    """expected() against fractions, which Python rounds to even, for some of what it is used for."""
    rng = np.random.default_rng(1)
    for top in (0, 1, 2, 17, 127, 254):
        bits = rng.permutation(numbers_below(top).ravel())[: 8 * GROUP]
        q, exponents = expected(bits)
        sign, m, e = split(bits)
        x = [Fraction(int(s * n)) * Fraction(2) ** int(power) for s, n, power in zip(sign, m, e, strict=True)]
        assert np.array_equal([float(v) for v in x], bits.view(BF16).astype(float))
        for g in range(8):
            group = x[g * GROUP : (g + 1) * GROUP]
            largest = max(map(abs, group))
            exponent = -126
            while largest >= Fraction(2) ** (exponent + 1):
                exponent += 1
            assert exponents[g] == exponent - 14
            scale = Fraction(2) ** (exponent - 14)
            assert q[g * GROUP : (g + 1) * GROUP].tolist() == [round(v / scale) for v in group]


def test_the_largest_number_may_stand_anywhere(int16):
    rng = np.random.default_rng(2)
    bits = rng.integers(110 << 7, 120 << 7, (64, GROUP)).astype(np.uint16)
    bits[np.arange(64), np.arange(64) % GROUP] = words(np.arange(64) // GROUP, 121, rng.integers(0, 128, 64))
    check(int16, bits.ravel())


def test_zeros_and_denormals(int16):
    """The exponent of a group that is zero, or all denormal, is -126: scales of 2**-140, and integers of what there is."""
    groups = np.zeros((6, GROUP), np.uint16)
    groups[1] = 0x8000
    groups[2, 7] = 1  # 2**-133
    groups[3] = np.arange(GROUP) * 4 + 1
    groups[4] = 0x8000 | 0x7F
    groups[5, 31] = 0x0080  # 2**-126
    q, scales = check(int16, groups.ravel())
    assert set(scales.tolist()) == {2.0**-140}
    assert q.reshape(6, GROUP)[2, 7] == 2**7


def test_a_group_that_is_not_finite_has_a_nan_as_scale(int16):
    """And no other group is touched."""
    rng = np.random.default_rng(3)
    clean = rng.standard_normal((4, GROUP)).astype(ml_dtypes.bfloat16).view(np.uint16)
    for word in (0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81):
        for at in range(GROUP):
            bits = clean.copy()
            bits[2, at] = word
            q, scales, sums = int16(bits.ravel())
            assert np.isnan(scales[2])
            others = [0, 1, 3]
            expected_q, exponents = expected(clean.ravel())
            assert np.array_equal(q.reshape(4, GROUP)[others], expected_q.reshape(4, GROUP)[others])
            assert np.array_equal(scales[others], np.ldexp(1.0, exponents[others]))
            assert np.array_equal(sums[others], minus_16_sums(expected_q)[others])


def test_the_bound_of_the_error(int16):
    """2**-15 of the group's maximum, which some numbers nearly have; none for what is at least 2**-7 of it."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((4096, GROUP)) * 2.0 ** rng.integers(-20, 1, (4096, GROUP))
    x = x.astype(BF16)
    q, scales, _ = int16(x.view(np.uint16).ravel())
    exact = x.astype(float)
    error = np.abs(q.reshape(-1, GROUP) * scales[:, None].astype(float) - exact)
    largest = np.abs(exact).max(axis=1, keepdims=True)
    assert (error <= 2.0**-15 * largest).all()
    assert (error > 0.9 * 2.0**-15 * largest).any()
    assert not error[np.abs(exact) >= 2.0 ** np.floor(np.log2(largest)) / 2**7].any()
    assert error.any()


# int8


#: Where the kernels want the k of each 8: what VPSHUFB leaves of a dword of codes.
ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
#: 127 * 2**-118: maxima below count as it.
LEAST_INT8 = (127, -118)


@pytest.fixture(scope="module", params=INT8)
def int8(request, emulator_folder):
    """The same for int8: a function from bfloat16 bits [k] to (q int8 [k], scales' bits uint32, minus_16_sums(q))."""
    with ways.prepared(request.param, emulator_folder):
        table = native.load_table(request.param)

    def encode(bits):
        row = core.encode(table, MXFP4, "int8", bits)
        k = len(bits)
        assert row.nbytes == k + 16 * (k // GROUP)
        behind, halves = row[k:].reshape(2, -1, 8)
        q = np.empty((k // 8, 8), np.int8)
        q[:, ORDER] = row[:k].view(np.int8).reshape(-1, 8)
        starts = np.hstack([behind[:, 4:], halves])
        scales, sums = behind[:, :4].copy().view(np.uint32)[:, 0], starts.view(np.int32)
        if table.name == "avx2":  # of even k in the lower word, of odd k in the upper
            words_ = starts.view(np.int16).reshape(-1, 3, 2).astype(int)
            even = np.where(np.arange(GROUP) % 2, 0, q.reshape(-1, GROUP))
            assert np.array_equal(words_[..., 0], minus_16_sums(even))
            sums = words_.sum(axis=2)
        return q.ravel(), scales, sums

    return encode


def rounded(numerator, denominator):
    """numerator / denominator for integers, half to even."""
    q, rest = numerator // denominator, numerator % denominator
    return q + ((2 * rest > denominator) | ((2 * rest == denominator) & (q % 2 == 1)))


def expected_int8(bits):
    """(q, (m, e) of the scales m * 2**e) by the rule in docs/numerics.md, in integers."""
    sign, m, e = (part.reshape(-1, GROUP) for part in split(bits))
    largest = (bits.reshape(-1, GROUP) & 0x7FFF).argmax(axis=1)
    top, power = (part[np.arange(len(part)), largest] for part in (m, e))
    small = np.ldexp(top.astype(float), power) < np.ldexp(float(LEAST_INT8[0]), LEAST_INT8[1])
    top, power = np.where(small, LEAST_INT8[0], top), np.where(small, LEAST_INT8[1], power)
    # M / 127 with 8 significant bits: M is 127 or from 128 to 255
    shift = np.where((top == 127) | (top < 254), 7, 6)
    scale = rounded(top << shift, 127)
    assert ((scale >= 128) & (scale < 256)).all()
    power = power - shift
    up = e - power[:, None]  # x / scale = m * 2**up / scale
    q = rounded(m << np.maximum(up, 0), scale[:, None] << np.clip(-up, 0, 40))
    return (sign * q).ravel(), scale, power


def check_int8(int8, bits):
    q, scales, sums = int8(bits)
    expected_q, m, e = expected_int8(bits)
    assert np.abs(expected_q).max() <= 127
    assert np.array_equal(q, expected_q)
    assert np.array_equal(scales.view(np.float32).astype(float), np.ldexp(m.astype(float), e))
    assert not (scales & 0xFFFF).any()  # bfloat16 numbers
    assert np.array_equal(sums, minus_16_sums(expected_q))
    return q, scales.view(np.float32)


@pytest.mark.parametrize("first", range(0, 255, 51))
def test_int8_of_every_exponent_and_every_number_below_it(int8, first):
    for top in range(first, first + 51):
        check_int8(int8, numbers_below(top).ravel())


def test_int8_of_every_maximum_and_its_ties(int8):
    """Each number of a binade as a maximum, with all the others; and all multiples of half a scale."""
    for top in (8, 15, 16, 120, 254):
        for fraction in range(128):
            group = words(np.arange(128) % 2, top, np.minimum(np.arange(128), fraction)).reshape(-1, 32)
            group[:, 0] = words(1, top, fraction)
            check_int8(int8, group.ravel())
    halves = (np.arange(-254, 255) / 2).astype(ml_dtypes.bfloat16)
    groups = np.full((17, GROUP), 127, ml_dtypes.bfloat16)
    groups[:, 1:] = np.resize(halves, (17, 31))
    for power in (-118, 0, 100):
        scaled = np.ldexp(groups.astype(float), power).astype(ml_dtypes.bfloat16)
        q, scales = check_int8(int8, scaled.view(np.uint16).ravel())
        assert set(scales.tolist()) == {2.0**power}
        assert np.array_equal(q.reshape(17, GROUP), np.rint(groups.astype(float)))


def test_the_arithmetic_of_int8_in_this_file():
    """expected_int8() against fractions, which Python rounds to even."""
    rng = np.random.default_rng(1)
    for top in (0, 1, 14, 15, 16, 17, 127, 254):
        bits = numbers_below(top)[rng.permutation(8)].ravel()
        q, scales, powers = expected_int8(bits)
        sign, m, e = split(bits)
        x = [Fraction(int(s * n)) * Fraction(2) ** int(power) for s, n, power in zip(sign, m, e, strict=True)]
        for g in range(len(bits) // GROUP):
            group = x[g * GROUP : (g + 1) * GROUP]
            exact = max(*map(abs, group), Fraction(127, 2**118)) / 127
            scale = Fraction(int(scales[g])) * Fraction(2) ** int(powers[g])
            quantum = Fraction(2) ** int(powers[g])
            assert scale == round(exact / quantum) * quantum
            assert q[g * GROUP : (g + 1) * GROUP].tolist() == [round(v / scale) for v in group]


def test_a_group_of_int8_that_is_not_finite_has_a_nan_as_scale(int8):
    rng = np.random.default_rng(3)
    clean = rng.standard_normal((4, GROUP)).astype(ml_dtypes.bfloat16).view(np.uint16)
    before = int8(clean.ravel())
    for word in (0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81):
        for at in range(GROUP):
            bits = clean.copy()
            bits[2, at] = word
            after = int8(bits.ravel())
            assert np.isnan(after[1].view(np.float32)[2])
            for was, is_ in zip(before, after, strict=True):
                others = [0, 1, 3]
                assert np.array_equal(was.reshape(4, -1)[others], is_.reshape(4, -1)[others])


#: (instruction set, family of weights) whose kernels for any scale take bfloat16 as it stands; the others widen it to float32.
AS_THEY_STAND = {("avx512_bf16", "q4"), ("avx512_bf16", "b16"), ("amx", "b16")}


@pytest.mark.parametrize("k", [0, 32, 96])
@pytest.mark.parametrize("weight_format", [MXFP4, B16], ids=["mxfp4", "b16"])
def test_bf16_rows_hold_the_same_numbers(table, weight_format, k):
    """As they are, or widened to float32: whichever it is, the upper or the only half of each item."""
    bits = np.random.default_rng(5).integers(0, 1 << 16, k).astype(np.uint16)
    if not table.serves(weight_format, "bf16"):
        with pytest.raises(InputError, match=f"{table.name} has no rows of {k} for 'bf16'"):
            core.encode(table, weight_format, "bf16", bits)
        return
    row = core.encode(table, weight_format, "bf16", bits)
    if (table.name, weight_format.family) in AS_THEY_STAND:
        assert np.array_equal(row.view(np.uint16), bits)
    else:
        assert np.array_equal(row.view(np.uint32), bits.astype(np.uint32) << 16)


@pytest.mark.parametrize("weight_format", [MXFP4, B16, SUPER_SCALED["fp16 minima"]], ids=["mxfp4", "b16", "fp16 minima"])
def test_a_row_in_pieces_has_the_same_bytes(table, weight_format):
    """h comes strip by strip: each has its place among the numbers and in what stands behind them."""
    bits = np.random.default_rng(6).standard_normal(160).astype(BF16).view(np.uint16)
    for mode in ("bf16", "int16", "int8"):
        if not table.serves(weight_format, mode):
            continue
        for e2m1 in (False, True):
            row = core.encode(table, weight_format, mode, bits, e2m1)
            for together in (32, 64, 128):
                assert np.array_equal(core.encode(table, weight_format, mode, bits, e2m1, together), row)


def test_what_is_no_row(table):
    for mode, k in (("bf16", 31), ("int8", 31), ("int4", 32), ("", 32)):
        with pytest.raises(InputError, match=f"{table.name} has no rows of {k} for '{mode}'"):
            core.encode(table, MXFP4, mode, np.zeros(k, np.uint16))
    if table.serves(MXFP4, "bf16"):
        with pytest.raises(InputError, match=f"{table.name} has no rows of 64 for 'bf16'"):
            core.encode(table, MXFP4, "bf16", np.zeros(64, np.uint16), False, 16)


# Sums of x, which minima multiply


@pytest.mark.parametrize("row", ["portable", "avx2", "avx512f", "avx512_bf16"])
@pytest.mark.parametrize("name", [name for name, weight_format in SUPER_SCALED.items() if weight_format.offset])
def test_rows_that_carry_sums(row, name, emulator_folder):
    """Behind the numbers: the sum of each 32, of their first and of their last 16; exact where float32 can add them so."""
    with ways.prepared(row, emulator_folder):
        table = native.load_table(row)
    rng = np.random.default_rng(9)
    for k, largest in ((32, 255), (544, 1), (96, 2.0**100)):
        x = (rng.integers(-255, 256, k) * (largest / 255)).astype(BF16)
        encoded = core.encode(table, SUPER_SCALED[name], "bf16", x.view(np.uint16))
        numbers = encoded[: len(encoded) - 12 * (k // 32)]
        of_bf16 = len(numbers) == 2 * k
        assert of_bf16 == (row == "avx512_bf16")
        assert np.array_equal(numbers.view(BF16 if of_bf16 else np.float32).astype(float), x.astype(float))
        first, last = x.astype(float).reshape(-1, 2, 16).sum(axis=2).T
        sums = encoded[len(numbers) :].view(np.float32).reshape(-1, 3)
        assert np.array_equal(sums, np.column_stack([first + last, first, last]))


@pytest.mark.parametrize("row", ["portable", "avx512_bf16"])
def test_sums_of_x_that_is_no_number(row, emulator_folder):
    """They stay with their halves of blocks."""
    with ways.prepared(row, emulator_folder):
        table = native.load_table(row)
    x = np.ones(96, BF16)
    x[[3, 95]] = np.nan, np.inf
    sums = core.encode(table, SUPER_SCALED["fp16 minima"], "bf16", x.view(np.uint16))[-36:].view(np.float32).reshape(3, 3)
    assert np.array_equal(sums, [[np.nan, np.nan, 16], [32, 16, 16], [np.inf, 16, np.inf]], equal_nan=True)
