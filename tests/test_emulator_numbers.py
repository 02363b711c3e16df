"""What the emulator computes for AVX512_BF16 and VNNI, against a numpy model: rounding, order, special values, MXCSR.

On a CPU that has the instructions nothing traps, and the same tests compare the CPU itself with the model.
"""

from __future__ import annotations

import emulator
import numpy as np
import pytest
from emulator.avx512 import execute, loop
from emulator.machine import Frame, aligned
from emulator.model import SPECIAL, bf16_values, bits, dot_bytes, dot_pairs, dot_words, to_bf16

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))


def test_dot_product_numbers(program, emulated):
    """Ordinary and extreme values; then sums that cancel, where order and single rounding show."""
    rng = np.random.default_rng(1)
    count = 1 << 16
    a, b, acc = aligned(count, np.uint32), aligned(count, np.uint32), aligned(count, np.float32)
    a[:], b[:] = bf16_values(rng, 2 * count).view(np.uint32), bf16_values(rng, 2 * count).view(np.uint32)
    acc[:] = bf16_values(rng, 2 * count).view(np.float32)
    half = count // 2  # the second half: acc is about minus one product, at various scales
    for x in (a, b):
        scaled = rng.normal(0, 1, (half, 2)) * 2.0 ** rng.integers(-70, 64, (half, 1))
        x[half:] = (scaled.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint32).ravel()
    with np.errstate(all="ignore"):
        product = (a & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64) * (b & np.uint32(0xFFFF0000)).view(np.float32)
        cancel = -product[half:] * (1 + rng.integers(-3, 4, half) * 2.0**-23)
        acc[half:] = cancel.astype(np.float32)
    before = acc.copy()
    loop(program, "dot", acc, a, b)
    np.testing.assert_array_equal(bits(acc), bits(dot_pairs(before, a, b)))
    assert np.any(bits(acc) != bits(dot_pairs(before, a, b, order=(0, 1)))), "these inputs do not tell the order"


def test_dot_product_special_values(program, emulated):
    """Every special a, b and accumulator with each other, in both places of the pair: NaN priority, infinities, denormals."""
    values = np.concatenate([SPECIAL, SPECIAL | 0x8000]).astype(np.uint32)
    grid = [x.ravel() for x in np.meshgrid(values, values, values)]
    count = grid[0].size
    a, b, acc = aligned(count, np.uint32), aligned(count, np.uint32), aligned(count, np.float32)
    rng = np.random.default_rng(2)
    for other in (0, 0x3F80, None):  # the other element of the pair: harmless, or special too
        for shift in (0, 16):
            rest = [np.full(count, other, np.uint32) if other is not None else rng.choice(values, count) for _ in "ab"]
            a[:] = grid[0] << shift | rest[0] << (16 - shift)
            b[:] = grid[1] << shift | rest[1] << (16 - shift)
            acc[:] = (grid[2] << 16).view(np.float32)
            expected = dot_pairs(acc, a, b)
            loop(program, "dot", acc, a, b)
            np.testing.assert_array_equal(bits(acc), bits(expected))


def test_dot_product_at_the_smallest_normal(program, emulated):
    """2^-126 less a little: a result that rounds up to it stays, one that does not is flushed; tininess is after rounding."""
    smallest = 2.0**-126
    a, b, acc = aligned(16, np.uint32), aligned(16, np.uint32), aligned(16, np.float32)
    acc[:] = smallest
    exponents = np.arange(-153, -137)  # of the product -2^e
    a[:] = np.full(16, -(2.0**-70), np.float32).view(np.uint32)
    b[:] = np.ldexp(np.float32(1), exponents + 70).astype(np.float32).view(np.uint32)
    expected = np.where(smallest - 2.0**exponents >= smallest - 2.0**-151, smallest, 0).astype(np.float32)
    np.testing.assert_array_equal(bits(dot_pairs(acc, a, b)), bits(expected))
    loop(program, "dot", acc, a, b)
    np.testing.assert_array_equal(bits(acc), bits(expected))


def test_conversion_numbers(program, emulated):
    """Every upper half with the lower halves around a tie."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = aligned(upper.size * lower.size, np.float32)
    values[:] = (upper[:, None] | lower).ravel().view(np.float32)
    expected = to_bf16(values)
    out = aligned(values.size * 2, np.uint16)
    loop(program, "cvt", out, values, values)
    out = out.reshape(-1, 32)
    np.testing.assert_array_equal(out[:, :16].ravel(), expected)
    assert not out[:, 16:].any(), "the upper half of the register is zeroed"
    high = aligned(values.size, np.float32)
    high[:] = values[::-1]
    loop(program, "cvt2", out, high, values)
    np.testing.assert_array_equal(out[:, :16].ravel(), expected)
    np.testing.assert_array_equal(out[:, 16:].ravel(), expected[::-1])


@pytest.mark.parametrize("mxcsr", [0x1F80, 0x3F80, 0x5F80, 0x7F80, 0x9FC0, 0x0000, 0x603F], ids=hex)
def test_mxcsr_is_neither_read_nor_written(program, emulated, mxcsr):
    """The four rounding modes, DAZ and FTZ, exceptions unmasked, flags set: same results, MXCSR as it was."""
    rng = np.random.default_rng(3)
    a, b = aligned(1024, np.uint32), aligned(1024, np.uint32)
    a[:], b[:] = bf16_values(rng, 2048).view(np.uint32), bf16_values(rng, 2048).view(np.uint32)
    acc, out = aligned(1024, np.float32), aligned(2048, np.uint16)
    acc[:] = rng.normal(0, 1, 1024)
    expected = dot_pairs(acc, a, b)
    assert loop(program, "dot", acc, a, b, mxcsr) == mxcsr
    np.testing.assert_array_equal(bits(acc), bits(expected))
    assert loop(program, "cvt2", out, a, b, mxcsr) == mxcsr
    assert loop(program, "cvt", out, a, b, mxcsr) == mxcsr


@pytest.mark.parametrize("op", ["vpdpbusd", "vpdpwssd"])
def test_dots_by_vex(program, emulated, op):
    """Of xmm or ymm, as {vex} vpdpbusd %ymm9, %ymm2, %ymm11, by their bytes; the rest of the register is zeroed."""
    opcode, model, types = {"vpdpbusd": ("50", dot_bytes, "u1 i1"), "vpdpwssd": ("52", dot_words, "i2 i2")}[op]
    of_a, of_b = map(np.dtype, types.split())
    rng = np.random.default_rng(8)
    area = aligned(64, np.uint8)
    for code, dest, first, source in (
        (f"c4 42 6d {opcode} d9", 11, 2, 9),
        (f"c4 e2 6d {opcode} d9", 3, 2, 1),
        (f"c4 e2 05 {opcode} c7", 0, 15, 7),
        (f"c4 e2 69 {opcode} d9", 3, 2, 1),
        (f"c4 e2 6d {opcode} 5e 20", 3, 2, None),  # at 32(%rsi)
    ):
        size = 32 if int(code.split()[2], 16) & 4 else 16
        zmm = rng.integers(0, 256, (32, 64), dtype=np.uint8)
        zmm[source or 1, :4], zmm[first, :4] = 128, 255  # of bytes, the least signed, the largest unsigned
        area[:] = rng.integers(0, 256, 64)
        frame = Frame.of(bytes.fromhex(code), {"rsi": area.ctypes.data})
        k = np.zeros(8, np.uint64)
        execute(program, "save", zmm, k, frame.xsave.ctypes.data)
        assert frame.emulate()
        after, _ = execute(program, "restore", np.zeros_like(zmm), k, frame.xsave.ctypes.data)
        b = (area[32 : 32 + size] if source is None else zmm[source, :size]).copy().view(of_b)
        expected = zmm.copy()
        expected[dest] = 0
        sums = model(zmm[dest, :size].copy().view(np.int32), zmm[first, :size].copy().view(of_a), b)
        expected[dest, :size] = sums.view(np.uint8)
        np.testing.assert_array_equal(after, expected, err_msg=code)
    assert emulator.counts()[f"{op}, VEX"] == 5
