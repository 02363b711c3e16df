"""The AVX512_BF16 emulator against the system's assembler and a numpy model.

On a CPU that has the instructions nothing traps, and the same tests compare the CPU itself with the model.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import emulator
import numpy as np
import pytest
from emulator import assembly

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))

OPS = ["vdpbf16ps", "vcvtne2ps2bf16", "vcvtneps2bf16"]
CASES_PER_OP = 250
DEFAULT_MXCSR = 0x1F80
STALE = 0xAA
MAP_32BIT = 0x40  # not in Python's mmap


# --- the model: float64, where the product of two bf16 is exact and the rest is rounded to odd, hence to float32 once ---


def quiet(x):
    return (x.view(np.uint32) | np.uint32(0x00400000)).view(np.float32)


def flush(x):
    """Denormals to zeros of their sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def round_once(x, error):
    """The exact x + error, |error| at most half an ulp of float64 x, as float32: RNE, tininess after rounding, FTZ."""
    bits = x.view(np.int64)
    inexact_even = (error != 0) & (bits & 1 == 0)
    bits = bits + np.where(inexact_even, np.where((error > 0) == (x > 0), 1, -1), 0)  # to odd: no tie arises by chance
    bits = (bits + 0x0FFFFFFF + (bits >> 29 & 1)) & ~0x1FFFFFFF  # 24 bits of precision, exponent as wide as it takes
    rounded = bits.view(np.float64)
    rounded = np.where(np.abs(rounded) < 2.0**-126, np.copysign(0.0, rounded), rounded)
    return rounded.astype(np.float32)  # exact, or infinite


def fma(a, b, c):
    """float32 a * b + c with one rounding, DAZ, FTZ; NaN priority a, b, c."""
    a, b, c = flush(a), flush(b), flush(c)
    with np.errstate(all="ignore"):
        product = a.astype(np.float64) * b.astype(np.float64)
        total = product + c
        shadow = total - product
        error = (product - (total - shadow)) + (c.astype(np.float64) - shadow)
        finite = np.isfinite(product) & np.isfinite(c)
        result = np.where(finite, round_once(total, np.where(finite, error, 0)), total.astype(np.float32))
    result = np.where(np.isnan(result), np.uint32(0xFFC00000).view(np.float32), result)  # invalid: the default NaN, negative
    for operand in (c, b, a):
        result = np.where(np.isnan(operand), quiet(operand), result)
    return result


def dot_pairs(acc, a, b, order=(1, 0)):
    """VDPBF16PS: uint32 pairs of bf16 a, b into float32 acc; order of the pair's elements: the odd one first."""
    for element in order:
        high = [x & np.uint32(0xFFFF0000) if element else x << np.uint32(16) for x in (a, b)]
        acc = fma(high[0].view(np.float32), high[1].view(np.float32), acc)
    return acc


def to_bf16(x):
    """float32 -> bf16 bits by arithmetic on the value: RNE, denormals to zero, NaN cut and made quiet."""
    x = flush(x)
    with np.errstate(all="ignore"):
        fraction, exponent = np.frexp(x.astype(np.float64))
        rounded = np.ldexp(np.rint(fraction * 256), exponent - 8).astype(np.float32)
    rounded = np.where(np.isnan(x), quiet(x), np.where(np.isinf(x), x, rounded))
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


def expected_between(case, zmm, memory):
    """The same for what is emulated between the others, and the instruction in front of it."""
    before = expected_registers(assembly.TRIGGER, zmm, None, None)
    source = np.array(memory if case.source is None else before[case.source])
    words, first = source.view(np.uint16), before[case.first].view(np.uint16)
    after = before.copy()
    if case.op == "vpbroadcastd":
        after[case.dest] = np.tile(source[:4], 16)
    elif case.op == "vpsrlw":
        after[case.dest] = (words >> case.immediate if case.immediate < 16 else words * 0).view(np.uint8)
    elif case.op == "vpermw":
        after[case.dest] = words[first & 31].view(np.uint8)
    elif case.op == "vpsubusw":
        after[case.dest] = np.where(first > words, first - words, np.uint16(0)).view(np.uint8)
    else:
        after[case.dest] = source
    return after


def expected_registers(case, zmm, k, memory):
    """What the registers hold after the instruction; zmm: uint8 [32, 64], memory: the 64 bytes at the operand."""
    if case.op in assembly.BETWEEN:
        return expected_between(case, zmm, memory)
    lanes = case.vector_bytes // 4
    source = np.array(memory if case.source is None else zmm[case.source]).view(np.uint32)[:lanes]
    if case.broadcast:
        source = np.full(lanes, source[0])
    first, dest = zmm[case.first].view(np.uint32)[:lanes], zmm[case.dest].view(np.uint32)[:lanes]
    if case.op == "vdpbf16ps":
        result = dot_pairs(dest.view(np.float32), first, source).view(np.uint32)
    elif case.op == "vcvtne2ps2bf16":
        result = to_bf16(np.concatenate([source, first]).view(np.float32))
    else:
        result = to_bf16(source.view(np.float32))
    if case.mask:
        kept = np.zeros_like(result) if case.zeroing else zmm[case.dest].view(result.dtype)[: len(result)]
        result = np.where(int(k[case.mask]) >> np.arange(len(result)) & 1, result, kept)
    after = zmm.copy()
    after[case.dest] = 0
    after[case.dest, : result.nbytes] = result.view(np.uint8)
    return after


# --- inputs ---

SPECIAL = np.array(
    [0, 0x0001, 0x007F, 0x0080, 0x0081, 0x00FF, 0x3F80, 0x3F81, 0x4049, 0x7F7F, 0x7F00, 0x7F80, 0x7F81, 0x7FC0, 0x7FC5, 0x7FFF],
    np.uint16,
)


def bf16_values(rng, count):
    """bf16 bits: a third of ordinary size, a third of any, a third special (zeros, denormals, infinities, NaN), either sign."""
    ordinary = (rng.normal(0, 1, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    special = rng.choice(SPECIAL, count) | (rng.integers(0, 2, count, dtype=np.uint16) << 15)
    return np.choose(rng.integers(0, 3, count), [ordinary, rng.integers(0, 1 << 16, count, dtype=np.uint16), special])


def aligned(count, dtype):
    raw = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + raw.size - 64].view(dtype)


# --- the assembled program ---


@pytest.fixture(scope="session")
def build_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("emulator")


@pytest.fixture(scope="session")
def program(build_dir):
    """The assembled routines, their cases, and the memory areas that the cases address."""

    def assemble(name, text):
        source = build_dir / f"{name}.s"
        source.write_text(text)
        output = build_dir / f"{name}.so"
        command = [*emulator._compiler(), "-shared", "-o", str(output), str(source)]
        return output, subprocess.run(command, capture_output=True, text=True)

    if assemble("probe", "vdpbf16ps %zmm0, %zmm0, %zmm0\n")[1].returncode:
        pytest.skip("the system's assembler does not know AVX512_BF16")
    low = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_32BIT)
    low_bytes = np.frombuffer(low, np.uint8)
    assert low_bytes.ctypes.data + low_bytes.size < 1 << 31
    rng = np.random.default_rng(20240)
    sizes = {**dict.fromkeys(OPS, CASES_PER_OP), **dict.fromkeys(assembly.BETWEEN, CASES_PER_OP // 5)}
    cases = [case for op, n in sizes.items() for case in assembly.random_cases(rng, op, n, low_bytes.ctypes.data)]
    path, done = assemble("program", assembly.program(cases))
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(path))
    for name in ("dot", "cvt2", "cvt", "run"):
        getattr(library, name).argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t, ctypes.c_uint32]
        getattr(library, name).restype = ctypes.c_uint32
    rip_data = (ctypes.c_uint8 * assembly.RIP_DATA_BYTES).in_dll(library, "rip_data")
    areas = {"low": low_bytes, "rip_data": np.frombuffer(rip_data, np.uint8), "buffer": aligned(1 << 18, np.uint8)[1 << 17 :]}
    return SimpleNamespace(library=library, path=path, cases=cases, areas=areas)


@pytest.fixture
def emulated(build_dir):
    """Emulation for one test, counts at zero; on a CPU that has the instructions it changes nothing."""
    with emulator.installed(build_dir):
        emulator.reset()
        yield


@pytest.fixture
def trapping(program, emulated):
    """Whether the instructions trap here, found by executing one: a virtual machine may hide that it has them."""
    x = aligned(32, np.uint32)
    program.library.cvt(x.ctypes.data, x.ctypes.data, x.ctypes.data, 1, DEFAULT_MXCSR)
    did = emulator.traps() == 1
    emulator.reset()
    return did


def execute(program, name, zmm, k, target):
    """Run a routine of the (state, target) kind; returns zmm and k afterwards."""
    state = aligned(assembly.STATE_BYTES, np.uint8)
    state[:2048] = zmm.ravel()
    state[2048:] = k.view(np.uint8)
    getattr(program.library, name)(ctypes.c_void_p(state.ctypes.data), ctypes.c_void_p(target))
    return state[:2048].reshape(32, 64), state[2048:].view(np.uint64)


def loop(program, name, out, a, b, mxcsr=DEFAULT_MXCSR):
    """Run a routine of the array kind over whole vectors; returns MXCSR as it left it."""
    count = a.nbytes // 64
    return getattr(program.library, name)(out.ctypes.data, a.ctypes.data, b.ctypes.data, count, mxcsr)


def random_state(rng):
    zmm = bf16_values(rng, 32 * 32).view(np.uint8).reshape(32, 64)
    return zmm, rng.integers(0, 1 << 63, 8, dtype=np.uint64)


def bits(x):
    return np.ascontiguousarray(x).view(np.uint32)


# --- decoding and operands ---


@pytest.mark.parametrize("op", OPS + assembly.BETWEEN)
def test_every_operand_form(program, emulated, trapping, op):
    """Random registers, lengths, masks, broadcasts and addresses: all 32 registers and 8 masks are as the model says."""
    rng = np.random.default_rng(6)
    done = 0
    for i, case in enumerate(program.cases):
        if case.op != op:
            continue
        area = program.areas[case.area]
        area[case.offset : case.offset + 64] = bf16_values(rng, 32).view(np.uint8)
        memory = area[case.offset : case.offset + 64].copy()
        zmm, k = random_state(rng)
        after, k_after = execute(program, f"case_{i}", zmm, k, area.ctypes.data + case.offset)
        np.testing.assert_array_equal(after, expected_registers(case, zmm, k, memory), err_msg=case.text)
        np.testing.assert_array_equal(k_after, k, err_msg=case.text)
        done += 1
    counts = {**emulator.counts(), "between": sum(emulator.counts(native=True).values())}
    assert done
    assert counts[op if op in OPS else "between"] == (done if trapping else 0)


def test_cases_cover_the_forms(program):
    """The random cases would not be worth much if they missed a form."""
    for op in OPS:
        texts = [case.text for case in program.cases if case.op == op]
        for part in [
            "(%rsp",
            "(%r12",
            "(%rbp",
            "(%r13",
            "(,%",
            ",%r12,",
            "(%rip)",
            "xmm",
            "ymm",
            "zmm",
            "{z}",
            "1to4",
            "1to8",
            "1to16",
        ]:
            assert any(part in text for text in texts), (op, part)
        for register in range(32):
            assert any(case.dest == register for case in program.cases if case.op == op)


@pytest.mark.parametrize(
    ("code", "decoded"),
    [
        ("62 f2 6e 48 52 d9", ("vdpbf16ps", 6)),
        ("62 f2 6e d9 52 58 10", ("vdpbf16ps", 7)),  # {1to16}, disp8, {k1}{z}
        ("62 62 4f 00 72 f9", ("vcvtne2ps2bf16", 6)),
        ("62 f2 7e 48 72 d9", ("vcvtneps2bf16", 6)),
        ("62 f2 6e 58 52 d9", None),  # broadcast of a register
        ("62 f2 6e c8 52 d9", None),  # zeroing without a mask
        ("62 f2 6e 68 52 d9", None),  # reserved length
        ("62 f2 ee 48 52 d9", None),  # W1
        ("62 f2 6d 48 52 d9", None),  # prefix 66: another instruction (VPDPWSSD)
        ("62 f2 6c 48 52 d9", None),  # no prefix
        ("62 f2 6e 48 53 d9", None),  # another opcode
        ("62 f1 6e 48 52 d9", None),  # another map
        ("62 fa 6e 48 52 d9", None),  # reserved bits
        ("62 f2 6a 48 52 d9", None),
        ("62 f2 6e 48 72 d9", None),  # vcvtneps2bf16 with a register in vvvv
        ("62 f2 7e 40 72 d9", None),  # and in V'
        ("62 f2 f5 48 8d d0", ("vpermw", 6)),
        ("62 f1 75 48 71 d0 04", ("vpsrlw", 7)),
        ("62 f1 75 48 71 e0 04", None),  # vpsraw
        ("62 f2 f5 49 8d d0", None),  # vpermw with a mask
        ("62 f2 f5 28 8d d0", None),  # of ymm
        ("c5 f8 77", None),
        ("0f 0b", None),
    ],
)
def test_decodes_only_what_a_cpu_accepts(code, decoded):
    assert emulator.decode(bytes.fromhex(code)) == decoded


# --- numbers ---


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


# --- registers and memory ---


@pytest.mark.parametrize(("name", "register"), [("low", 3), ("high", 20), ("masked", None), ("zero", None)])
def test_registers_in_their_initial_state(program, emulated, name, register):
    """A register file that the signal frame marks as untouched reads as zeros, and the rest of it stays zero."""
    rng = np.random.default_rng(4)
    values = aligned(16, np.float32)
    values[:] = rng.normal(0, 1, 16)
    after, k = execute(program, f"initial_{name}", *random_state(rng), values.ctypes.data)
    expected = np.zeros((32, 64), np.uint8)
    if register is not None:
        expected[register, :32] = to_bf16(values).view(np.uint8)
    np.testing.assert_array_equal(after, expected)
    assert not k.any()


def made_up_frame(code):
    """A ucontext_t at `code` (hexadecimal) and its XSAVE area, all of whose components are initial but hold stale bytes."""
    machine_code = np.frombuffer(bytes.fromhex(code) + bytes(15), np.uint8)
    xsave = aligned(1 << 14, np.uint8)
    xsave[:] = STALE
    xsave[464:512].view(np.uint32)[:5] = (
        0x46505853,
        xsave.size,
        0xE7,
        0,
        xsave.size - 4,
    )  # magic, size, features (8 bytes), size
    xsave[512:576] = 0
    context = aligned(64, np.uint64)  # 40 bytes, 23 general registers with RIP as the 16th, address of the XSAVE area
    context[5 + 16] = machine_code.ctypes.data
    context[5 + 23] = xsave.ctypes.data
    return SimpleNamespace(context=context, xsave=xsave, machine_code=machine_code)


@pytest.mark.parametrize(
    ("code", "components", "zeroed"),
    [
        ("62 f2 5e 48 52 dc", 0b0100_0110, 256 + 256 + 512),  # vdpbf16ps %zmm4, %zmm4, %zmm3: SSE, AVX, ZMM_Hi256
        ("62 a2 5e 40 52 dc", 0b1000_0000, 1024),  # the same of zmm20, zmm19: Hi16_ZMM
    ],
)
def test_stale_bytes_of_a_frame(emulated, code, components, zeroed):
    """A component marked as initial may hold any bytes: they are not read, and are zeroed when a part of it is written."""
    frame = made_up_frame(code)
    assert emulator._load(None).kt_emulator_emulate(frame.context.ctypes.data)
    assert frame.xsave[512] == components
    frame.xsave[464:576] = STALE
    np.testing.assert_array_equal(np.unique(frame.xsave), [0, STALE])
    assert np.count_nonzero(frame.xsave == 0) == zeroed
    assert emulator.counts()["vdpbf16ps"] == 1


def test_the_cpus_own_instructions_start_nothing(emulated):
    """A SIGILL at an instruction that the CPU ought to have is not ours, even if it would be emulated behind one that is."""
    vpermw = made_up_frame("62 f2 f5 48 8d d0")
    assert not emulator._load(None).kt_emulator_emulate(vpermw.context.ctypes.data)
    assert vpermw.context[5 + 16] == vpermw.machine_code.ctypes.data


@pytest.fixture
def page_end():
    """The address of the last element before a page that cannot be touched; it holds 1.5."""
    page, readable, protect = mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, ctypes.CDLL(None).mprotect
    area = mmap.mmap(-1, 2 * page)
    area[page - 4 : page] = np.float32(1.5).tobytes()
    start = np.frombuffer(area, np.uint8).ctypes.data
    assert protect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0
    yield start + page - 4
    assert protect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), readable) == 0


@pytest.mark.parametrize("op", ["vdpbf16ps", "vcvtneps2bf16"])
def test_masked_out_elements_do_not_fault(program, emulated, page_end, op):
    zmm = np.zeros((32, 64), np.uint8)
    zmm[1].view(np.uint32)[:] = 0x40000000  # 0, 2.0
    zmm[2].view(np.float32)[:] = 7
    after, _ = execute(program, f"masked_{op}", zmm, np.zeros(8, np.uint64), page_end)
    if op == "vdpbf16ps":
        np.testing.assert_array_equal(after[2].view(np.float32), [10.0] + [7.0] * 15)
    else:
        np.testing.assert_array_equal(after[2].view(np.uint16), [0x3FC0, 0x40E0] + [0, 0x40E0] * 7 + [0] * 16)


# --- the handler ---


def test_one_trap_for_instructions_in_a_row(program, emulated, trapping):
    a = aligned(160, np.uint32)
    acc = aligned(160, np.float32)
    loop(program, "run", acc, a, a)
    assert emulator.traps() == (10 if trapping else 0)
    assert emulator.counts() == dict.fromkeys(OPS, 10 * assembly.RUN_LENGTH // 3 if trapping else 0)


def test_threads_older_and_younger_than_the_handler(program, build_dir):
    """All get right results at once, and the counts lose nothing."""
    rng = np.random.default_rng(5)
    count, repeats, go, wrong = 1 << 12, 4, threading.Event(), []
    inputs = [aligned(count, np.uint32) for _ in "ab"]
    for x in inputs:
        x[:] = bf16_values(rng, 2 * count).view(np.uint32)
    expected = dot_pairs(np.zeros(count, np.float32), *inputs)

    def work():
        go.wait()
        for _ in range(repeats):
            acc = aligned(count, np.float32)
            loop(program, "dot", acc, *inputs)
            if np.any(bits(acc) != bits(expected)):
                wrong.append(threading.get_ident())

    older = [threading.Thread(target=work) for _ in range(4)]
    for thread in older:
        thread.start()
    with emulator.installed(build_dir):
        emulator.reset()
        younger = [threading.Thread(target=work) for _ in range(4)]
        for thread in younger:
            thread.start()
        go.set()
        for thread in older + younger:
            thread.join()
    assert not wrong
    assert emulator.counts()["vdpbf16ps"] in (0, 8 * repeats * count // 16)


def test_installs_nest(build_dir):
    with emulator.installed(build_dir):
        with emulator.installed(build_dir):
            pass
        assert emulator._depth == 1
    with pytest.raises(RuntimeError, match="not installed"):
        emulator.uninstall()


def test_compiles_once(build_dir):
    first = emulator.build(build_dir)
    stamp = first.stat().st_mtime_ns
    assert emulator.build(build_dir) == first
    assert first.stat().st_mtime_ns == stamp
    assert not list(build_dir.glob("emulator-*.so.*"))


def test_sources_compile_without_warnings(build_dir):
    sources = [str(path) for path in Path(emulator.__file__).parent.glob("*.c")]
    subprocess.run(
        [*emulator._compiler(), *emulator._FLAGS, "-Werror", "-o", str(build_dir / "strict.so"), *sources], check=True
    )


# --- signals that are not ours: each in a process of its own, as most of them end it ---

PREAMBLE = """
import ctypes, faulthandler, mmap, os, resource, signal, sys
import numpy as np
import emulator
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
library = ctypes.CDLL(sys.argv[1])
skipped = ctypes.c_int.in_dll(library, "skipped")
state = np.zeros(4096, np.uint8)
def execute(name, target=None):
    target = target or state.ctypes.data
    getattr(library, name)(ctypes.c_void_p(state.ctypes.data), ctypes.c_void_p(target))
def send():
    os.kill(os.getpid(), signal.SIGILL)
class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_uint8 * 128), ("flags", ctypes.c_int), ("_", ctypes.c_void_p)]
def handle_in_c(flags):
    action = Action(handler=ctypes.cast(library.skip_ud2, ctypes.c_void_p).value, flags=flags)
    assert ctypes.CDLL(None).sigaction(signal.SIGILL, ctypes.byref(action), None) == 0
SIGINFO, NODEFER, RESETHAND = 4, 0x40000000, 0x80000000 - (1 << 32)
"""


def in_process(program, build_dir, script):
    environment = {**os.environ, "PYTHONPATH": str(Path(emulator.__file__).parents[1])}
    environment.pop("PYTHONFAULTHANDLER", None)
    script = PREAMBLE + script.replace("INSTALL", f"emulator.install({str(build_dir)!r})")
    command = [sys.executable, "-c", script, str(program.path)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize(
    ("script", "status", "output"),
    [
        pytest.param("INSTALL; execute('illegal')", -signal.SIGILL, "", id="default"),
        pytest.param(
            "signal.signal(signal.SIGILL, signal.SIG_IGN); INSTALL; execute('illegal')", -signal.SIGILL, "", id="ignored"
        ),
        pytest.param("INSTALL; send()", -signal.SIGILL, "", id="sent"),
        pytest.param(
            "signal.signal(signal.SIGILL, signal.SIG_IGN); INSTALL; send(); print('alive')",
            0,
            "alive",
            id="sent-ignored",
        ),
        pytest.param(
            "signal.signal(signal.SIGILL, lambda *_: print('seen')); INSTALL; send(); print('alive')",
            0,
            "seen\nalive",
            id="sent-python-handler",
        ),
        pytest.param(
            "faulthandler.enable(); INSTALL; execute('illegal')", -signal.SIGILL, "Illegal instruction", id="faulthandler"
        ),
        pytest.param(
            "handle_in_c(SIGINFO); INSTALL; execute('mixed'); print(skipped.value)",
            0,
            "2",
            id="c-handler",
        ),
        pytest.param(
            "handle_in_c(SIGINFO | NODEFER); INSTALL; execute('mixed'); print(skipped.value)",
            0,
            "2",
            id="c-handler-nodefer",
        ),
        pytest.param("handle_in_c(SIGINFO | RESETHAND); INSTALL; execute('mixed')", -signal.SIGILL, "", id="c-handler-once"),
        pytest.param(
            "handle_in_c(SIGINFO); INSTALL; emulator.uninstall(); execute('illegal'); print('alive')", 0, "alive", id="restored"
        ),
        pytest.param(
            "INSTALL; handle_in_c(SIGINFO)\ntry:\n    emulator.uninstall()\nexcept RuntimeError as error:\n    print(error)",
            0,
            "another SIGILL handler",
            id="covered",
        ),
    ],
)
def test_foreign_signals_are_passed_on(program, build_dir, script, status, output):
    done = in_process(program, build_dir, script)
    assert done.returncode == status, done.stderr
    assert output in done.stdout + done.stderr


def test_without_the_emulator_the_instruction_kills(program, build_dir, trapping):
    if not trapping:
        pytest.skip("this CPU has the instructions")
    done = in_process(program, build_dir, "INSTALL; execute('initial_zero'); emulator.uninstall(); print('so far', flush=True)")
    assert done.returncode == 0, done.stderr
    done = in_process(program, build_dir, "INSTALL; emulator.uninstall(); execute('initial_zero')")
    assert done.returncode == -signal.SIGILL


def test_a_bad_address_faults(program, build_dir):
    """VCVTNE2PS2BF16 does not spare masked-out elements; the process gets the SIGSEGV it would get from a CPU."""
    script = """
area = mmap.mmap(-1, 2 * mmap.PAGESIZE)
start = np.frombuffer(area, np.uint8).ctypes.data + mmap.PAGESIZE
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
INSTALL
execute('masked_vdpbf16ps', start - 4)
print('so far', flush=True)
execute('masked_vcvtne2ps2bf16', start - 4)
"""
    done = in_process(program, build_dir, script)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "so far" in done.stdout


def test_faulthandler_sees_nothing_of_ours(program, build_dir):
    done = in_process(program, build_dir, "faulthandler.enable(); INSTALL; execute('initial_zero'); print('alive')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_cost(program, emulated, trapping, record_property):
    """A trap alone and an instruction that follows one, in nanoseconds, for whoever plans a test's size."""
    if not trapping:
        pytest.skip("this CPU has the instructions")
    x, acc = aligned(16 * 2000, np.uint32), aligned(16 * 2000, np.float32)
    seconds = {}
    for name in ("dot", "run"):
        loop(program, name, acc, x, x)
        start = time.perf_counter()
        loop(program, name, acc, x, x)
        seconds[name] = (time.perf_counter() - start) / 2000
    following = (seconds["run"] - seconds["dot"]) / (assembly.RUN_LENGTH - 1)
    print(f"\n{seconds['dot'] * 1e6:.2f} us a trap, {following * 1e6:.3f} us each instruction that follows directly")
    record_property("trap_us", seconds["dot"] * 1e6)
    assert seconds["dot"] < 1e-3
