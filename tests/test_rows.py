"""What an activation mode makes of a row of bfloat16: int16's integers and scales against integer arithmetic, bit for bit."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import ways
from helpers import B16, BF16, same_bits

from ktmoe import MXFP4
from ktmoe.backends import native
from ktmoe.errors import InputError

GROUP = 32
LEAST_EXPONENT = -126
#: Instruction sets whose kernels take int16.
INT16 = ["avx2"]


@pytest.fixture(scope="module", params=INT16)
def int16(request, emulator_folder):
    """KernelTable.encode for int16: a function from bfloat16 bits [k] to (q int16 [k], scales float32, minus 16 sums int32)."""
    with ways.prepared(request.param, emulator_folder):
        table = native.load_table(request.param)

    def encode(bits):
        row = table.encode(MXFP4, "int16", bits)
        k = len(bits)
        assert row.nbytes == 2 * k + 8 * (k // GROUP)
        behind = row[2 * k :].reshape(-1, 8)
        scales, sums = behind[:, :4].copy().view(np.float32)[:, 0], behind[:, 4:].copy().view(np.int32)[:, 0]
        return row[: 2 * k].view(np.int16), scales, sums

    return encode


def test_who_has_int16(table):
    modes = {activations for *_, activations, _ in table.kernels()}
    assert ("int16" in modes) == (table.name in INT16)
    if table.name not in INT16:
        with pytest.raises(InputError, match=rf"{table.name} has no rows of 32 for 'int16'"):
            table.encode(MXFP4, "int16", np.zeros(32, np.uint16))


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
    assert np.array_equal(sums, -16 * expected_q.reshape(-1, GROUP).sum(axis=1))
    return q, scales


def words(sign, field, fraction):
    return (np.asarray(sign) << 15 | np.asarray(field) << 7 | np.asarray(fraction)).astype(np.uint16)


def numbers_below(top):
    """Groups whose first number has the exponent field top, and all others of up to 18 fields below, of both signs: at x of
    2**-8 of the maximum and below, every second one is a tie."""
    fields, fractions, signs = np.meshgrid(np.arange(max(top - 18, 0), top + 1), np.arange(128), [0, 1], indexing="ij")
    others = words(signs, fields, fractions).ravel()
    others = np.resize(others, (-(-len(others) // 31), 31))
    return np.concatenate([words(np.arange(len(others)) % 2, top, np.arange(len(others)) * 37 % 128)[:, None], others], axis=1)


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
            assert np.array_equal(sums[others], -16 * expected_q.reshape(4, GROUP)[others].sum(axis=1))


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


#: (instruction set, family of weights) whose kernels for any scale take bfloat16 as it stands; the others widen it to float32.
AS_THEY_STAND = {("avx512_bf16", "q4"), ("avx512_bf16", "b16"), ("amx", "b16")}


@pytest.mark.parametrize("k", [0, 32, 96])
@pytest.mark.parametrize("weight_format", [MXFP4, B16], ids=["mxfp4", "b16"])
def test_bf16_rows_hold_the_same_numbers(table, weight_format, k):
    """As they are, or widened to float32: whichever it is, the upper or the only half of each item."""
    bits = np.random.default_rng(5).integers(0, 1 << 16, k).astype(np.uint16)
    row = table.encode(weight_format, "bf16", bits)
    if (table.name, weight_format.family) in AS_THEY_STAND:
        assert np.array_equal(row.view(np.uint16), bits)
    else:
        assert np.array_equal(row.view(np.uint32), bits.astype(np.uint32) << 16)


def test_what_is_no_row(table):
    for mode, k in (("bf16", 31), ("int8", 32), ("", 32)):
        with pytest.raises(InputError, match=f"{table.name} has no rows of {k} for '{mode}'"):
            table.encode(MXFP4, mode, np.zeros(k, np.uint16))
