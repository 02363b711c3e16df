"""ADD, SUB, CMP, JE and JNE, which are emulated behind an emulated instruction, against the CPU."""

from __future__ import annotations

import ctypes
import itertools

import emulator
import pytest
from emulator.machine import Frame, assemble

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))

TRIGGER = bytes.fromhex("c4 e2 6d 52 d9")  # vpdpwssd %ymm1, %ymm2, %ymm3
ARITHMETIC_FLAGS, ZERO = 0x8D5, 1 << 6
IMMEDIATES = [0, 1, 8, 64, 127, -128, -1]
INSTRUCTIONS = [f"{op} ${n}, %{register}" for op in ("add", "sub") for n in IMMEDIATES for register in ("rax", "r9")]
INSTRUCTIONS += ["cmp %rax, %r9", "cmp %r9, %rax", "cmp %rax, %rax"]
VALUES = [0, 1, 7, 8, 0x7F, 0x80, 0xFF, 1 << 32]
VALUES += [(1 << 63) + n for n in (-128, -1, 0, 8)] + [(1 << 64) + n for n in (-8, -1)]


@pytest.fixture(scope="module")
def arithmetic(emulator_folder):
    """The routines: code_<i> is an instruction of rax and r9; routine_<i>(rax, r9, out) puts them and flags into out."""
    routines = [
        f".globl routine_{i}, code_{i}, end_{i}; routine_{i}: mov %rdi, %rax; mov %rsi, %r9; code_{i}: {text}; end_{i}: "
        "pushfq; pop 16(%rdx); mov %rax, (%rdx); mov %r9, 8(%rdx); ret"
        for i, text in enumerate(INSTRUCTIONS)
    ]
    note = '.section .note.GNU-stack,"",@progbits\n'
    return ctypes.CDLL(str(assemble(emulator_folder, "loops", "\n".join([".text", *routines, note]))))


@pytest.mark.parametrize("i", range(len(INSTRUCTIONS)), ids=INSTRUCTIONS)
def test_registers_and_flags(emulated, arithmetic, i):
    start, end = (ctypes.cast(getattr(arithmetic, f"{name}_{i}"), ctypes.c_void_p).value for name in ("code", "end"))
    code = ctypes.string_at(start, end - start)
    assert emulator.decode(code) == (INSTRUCTIONS[i].split()[0], len(code))
    for a, b in itertools.product(VALUES, VALUES):
        expected = (ctypes.c_uint64 * 3)()
        getattr(arithmetic, f"routine_{i}")(ctypes.c_uint64(a), ctypes.c_uint64(b), expected)
        frame = Frame.of(TRIGGER + code, {"rax": a, "r9": b})
        assert frame.emulate()
        assert (frame.register("rax"), frame.register("r9")) == tuple(expected[:2])
        assert frame.flags == expected[2] & ARITHMETIC_FLAGS
    assert emulator.counts()["vpdpwssd, VEX"] == sum(emulator.counts(native=True).values()) == len(VALUES) ** 2


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(
    ("code", "on_equal", "distance"),
    [
        ("74 05", True, 5),
        ("75 05", False, 5),
        ("74 80", True, -128),
        ("0f 84 00 02 00 00", True, 0x200),
        ("0f 85 00 fe ff ff", False, -0x200),
    ],
)
def test_jumps(emulated, code, on_equal, distance, equal):
    code = TRIGGER + bytes.fromhex("49 39 c1") + bytes.fromhex(code)  # cmp %rax, %r9 in front
    around = bytes(0x400)
    frame = Frame.of(around + code + around, {"rax": 1, "r9": 1 if equal else 2})
    frame.rip = start = frame.rip + len(around)
    assert frame.emulate()
    assert frame.rip == start + len(code) + (distance if equal == on_equal else 0)


def test_a_loop_in_one_go(emulated):
    """All times around, and on behind it."""
    loop = TRIGGER + bytes.fromhex("48 83 c0 08  4c 39 c8  75 f2")  # add $8, %rax; cmp %r9, %rax; jne to the start
    frame = Frame.of(loop + TRIGGER, {"rax": 0, "r9": 800})
    start = frame.rip
    assert frame.emulate()
    assert frame.rip == start + len(loop + TRIGGER)
    assert frame.register("rax") == 800
    assert frame.flags & ZERO
    assert emulator.counts()["vpdpwssd, VEX"] == 101


@pytest.mark.parametrize(
    ("code", "decoded"),
    [
        ("48 83 c0 08", ("add", 4)),
        ("49 83 e9 08", ("sub", 4)),
        ("48 39 d6", ("cmp", 3)),
        ("75 c1", ("jne", 2)),
        ("0f 84 00 01 00 00", ("je, near", 6)),
        ("83 c0 08", None),  # of 32 bits
        ("39 d6", None),
        ("48 83 c8 08", None),  # or
        ("48 83 d0 08", None),  # adc
        ("48 83 00 08", None),  # memory
        ("48 39 16", None),
        ("48 3b d6", None),
        ("66 48 83 c0 08", None),
        ("77 05", None),  # ja
        ("0f 86 00 00 00 00", None),
        ("c3", None),
    ],
)
def test_decodes_only_these(code, decoded):
    assert emulator.decode(bytes.fromhex(code)) == decoded


@pytest.mark.parametrize("code", ["48 83 c0 08", "48 39 d6", "75 00"])
def test_they_start_nothing(emulated, code):
    assert not Frame.of(bytes.fromhex(code)).emulate()
