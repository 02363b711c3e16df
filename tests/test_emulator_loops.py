"""What is emulated of general registers behind an emulated instruction, against the CPU."""

from __future__ import annotations

import ctypes
import itertools

import emulator
import numpy as np
import pytest
from emulator.machine import Frame, assemble

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))

TRIGGER = bytes.fromhex("c4 e2 6d 52 d9")  # vpdpwssd %ymm1, %ymm2, %ymm3
CARRY, ADJUST, ZERO, OVERFLOW = 1, 1 << 4, 1 << 6, 1 << 11
ARITHMETIC_FLAGS = 0x8D5
IMMEDIATES = [0, 1, 8, 64, 127, -128, -1, 128, -(1 << 31)]
WIDE, NARROW = {"rax": "rax", "r9": "r9"}, {"rax": "eax", "r9": "r9d"}


def instructions():
    """Instructions of 64 and of 32 bits, of registers and of memory, which rcx points to."""
    for suffix, names in (("q", WIDE), ("l", NARROW)):
        rax, r9 = (f"%{name}" for name in names.values())
        operands = [rax, r9, "(%rcx)", "8(%rcx)", "-8(%rcx, %rsi, 4)"]
        for op in ("add", "sub", "and", "cmp"):
            yield from (f"{op}{suffix} ${number}, {to}" for number in IMMEDIATES for to in operands[1:3])
        yield from (f"xor{suffix} ${number}, {rax}" for number in (1, -1))
        for op in ("add", "sub", "and", "xor", "cmp", "mov"):
            yield from (f"{op}{suffix} {a}, {b}" for a in operands for b in operands if a[0] == "%" or b[0] == "%")
        yield from (f"test{suffix} {a}, {b}" for a in (rax, r9) for b in operands)
        yield from (f"imul{suffix} {a}, {b}" for a in operands for b in (rax, r9))
        for op in ("shl", "shr"):
            yield from (f"{op}{suffix} ${count}, {to}" for count in (1, 2, 31, 32, 63, 64) for to in operands[:3])
        yield from (f"lea{suffix} {address}, {r9}" for address in ("(%rax, %r9, 8)", "-5(%rax)", "1000(%r9, %rax)"))
    yield from (f"movslq {a}, %{b}" for a in ("%eax", "%r9d", "8(%rcx)") for b in ("rax", "r9"))
    yield from ("cltq", "prefetcht0 64(%rcx)", "prefetcht1 (%rax)", "prefetcht2 (%r9)", "prefetchnta (%rcx)")


INSTRUCTIONS = list(instructions())
#: Undefined after an operation: what CPUs do with these differs.
UNDEFINED = {"and": ADJUST, "xor": ADJUST, "test": ADJUST, "imul": ARITHMETIC_FLAGS & ~(CARRY | OVERFLOW)}
UNDEFINED |= {"shl": ADJUST | OVERFLOW, "shr": ADJUST | OVERFLOW}
VALUES = [0, 1, 7, 8, 0x7F, 0x80, 0xFF, (1 << 31) - 1, 1 << 31, 1 << 32]
VALUES += [(1 << 63) + n for n in (-128, -1, 0, 8)] + [(1 << 64) + n for n in (-8, -1)]


EACH_FLAG = [1 << n for n in range(12) if ARITHMETIC_FLAGS >> n & 1]
#: The conditions, with the opcode's last four bits.
CONDITIONS = {"b": 2, "ae": 3, "e": 4, "ne": 5, "be": 6, "a": 7, "l": 12, "ge": 13, "le": 14, "g": 15}


def name_of(text):
    """The name of an instruction as the emulator counts it."""
    op = text.split()[0]
    return "prefetch" if op.startswith("prefetch") else op if op in ("movslq", "cltq") else op[:-1]


@pytest.fixture(scope="module")
def arithmetic(emulator_folder):
    """The routines: code_<i> is an instruction of rax, r9 and memory at rcx, with rsi = 4; routine_<i>(rax, r9, out, memory,
    flags) puts rax, r9 and the flags into out. holds_<condition>(flags) is what a jump goes by."""
    routines = [
        f".globl routine_{i}, code_{i}, end_{i}; routine_{i}: mov %rdi, %rax; mov %rsi, %r9; mov $4, %esi; push %r8; popfq; "
        f"code_{i}: {text}; end_{i}: pushfq; pop 16(%rdx); mov %rax, (%rdx); mov %r9, 8(%rdx); ret"
        for i, text in enumerate(INSTRUCTIONS)
    ]
    routines += [
        f".globl holds_{condition}; holds_{condition}: push %rdi; popfq; set{condition} %al; movzbl %al, %eax; ret"
        for condition in CONDITIONS
    ]
    note = '.section .note.GNU-stack,"",@progbits\n'
    return ctypes.CDLL(str(assemble(emulator_folder, "loops", "\n".join([".text", *routines, note]))))


@pytest.mark.parametrize("op", dict.fromkeys(map(name_of, INSTRUCTIONS)))
def test_registers_memory_and_flags(emulated, arithmetic, op):
    rng = np.random.default_rng(1)
    done = 0
    for i, text in enumerate(INSTRUCTIONS):
        if name_of(text) != op:
            continue
        start, end = (ctypes.cast(getattr(arithmetic, f"{name}_{i}"), ctypes.c_void_p).value for name in ("code", "end"))
        code = ctypes.string_at(start, end - start)
        assert emulator.decode(code) == (op, len(code)), text
        defined = ARITHMETIC_FLAGS & ~UNDEFINED.get(op, 0)
        if op in ("shl", "shr") and text.split()[1] == "$1,":
            defined |= OVERFLOW
        for a, b in [*itertools.product(VALUES[::3], VALUES[1::3]), *rng.choice(np.array(VALUES, np.uint64), (20, 2)).tolist()]:
            flags = int(rng.integers(1 << 12)) & ARITHMETIC_FLAGS
            results = []
            memory = np.array([b, a, ~np.uint64(b)], np.uint64), np.array([b, a, ~np.uint64(b)], np.uint64)
            out = (ctypes.c_uint64 * 3)()
            addresses = [ctypes.c_void_p(array.ctypes.data) for array in memory]
            words = (ctypes.c_uint64(a), ctypes.c_uint64(b), out, addresses[0], ctypes.c_uint64(flags))
            getattr(arithmetic, f"routine_{i}")(*words)
            frame = Frame.of(TRIGGER + code, {"rax": a, "r9": b, "rsi": 4, "rcx": addresses[1].value}, flags)
            assert frame.emulate()
            results = frame.register("rax"), frame.register("r9"), frame.flags & defined
            assert results == (out[0], out[1], out[2] & defined), (text, a, b)
            assert np.array_equal(*memory), (text, a, b)
            done += 1
    assert emulator.counts()["vpdpwssd, VEX"] == emulator.counts(native=True)[op] == done


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("distance", [5, 127, -128, 0x200, -0x200])
def test_jumps(emulated, arithmetic, condition, distance):
    """With all flags that there are."""
    near = not -128 <= distance <= 127
    jump = bytes([0x0F, 0x80 + CONDITIONS[condition]] if near else [0x70 + CONDITIONS[condition]])
    jump += distance.to_bytes(4 if near else 1, "little", signed=True)
    assert emulator.decode(jump) == (f"j{condition}" + ", near" * near, len(jump))
    code, around = TRIGGER + jump, bytes(0x400)
    for bits in itertools.product((0, 1), repeat=len(EACH_FLAG)):
        flags = sum(bit * flag for bit, flag in zip(bits, EACH_FLAG, strict=True))
        frame = Frame.of(around + code + around, flags=flags)
        frame.rip = start = frame.rip + len(around)
        assert frame.emulate()
        holds = getattr(arithmetic, f"holds_{condition}")(ctypes.c_uint64(flags))
        assert frame.rip == start + len(code) + (distance if holds else 0)
        assert frame.flags == flags


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
        ("83 c0 08", ("add", 3)),
        ("39 d6", ("cmp", 2)),
        ("48 83 c8 08", None),  # or
        ("48 83 d0 08", None),  # adc
        ("66 48 83 c0 08", None),  # of 16 bits
        ("f0 48 83 00 08", None),  # locked
        ("70 05", None),  # jo
        ("48 8d c0", None),  # lea of a register
        ("0f 18 c0", None),  # prefetch of a register
        ("48 83 ec 08", None),  # sub $8, %rsp
        ("48 83 7c 24 08 00", ("cmp", 6)),  # cmpq $0, 8(%rsp)
        ("48 89 44 24 08", ("mov", 5)),  # mov %rax, 8(%rsp)
        ("48 89 ec", None),  # mov %rbp, %rsp
        ("48 8b 24 24", None),  # mov (%rsp), %rsp
        ("48 8d 64 24 f0", None),  # lea -16(%rsp), %rsp
        ("48 63 e0", None),  # movslq %eax, %rsp
        ("98", None),  # cwtl
        ("63 c8", None),
        ("e8 00 00 00 00", None),  # call
        ("c3", None),
    ],
)
def test_decodes_only_these(code, decoded):
    assert emulator.decode(bytes.fromhex(code)) == decoded


@pytest.mark.parametrize("code", ["48 83 c0 08", "48 39 d6", "75 00"])
def test_they_start_nothing(emulated, code):
    assert not Frame.of(bytes.fromhex(code)).emulate()


def test_code_that_changes(emulated):
    """What was decoded at an address does not count once other bytes are there; nor does any byte behind these."""
    frame = Frame.of(TRIGGER + bytes.fromhex("48 83 c0 08"), {"rax": 1})
    start = frame.rip
    for code, rax in (("48 83 c0 08", 9), ("48 83 c0 08", 17), ("83 e8 07", 10), ("48 83 e8 0a", 0)):
        frame.machine_code[len(TRIGGER) :][: len(bytes.fromhex(code)) + 1] = [*bytes.fromhex(code), 0x90]
        frame.rip = start
        assert frame.emulate()
        assert frame.register("rax") == rax
        assert frame.rip == start + len(TRIGGER) + len(bytes.fromhex(code))


def test_many_addresses(emulated):
    """More than there are places for."""
    code = bytes.fromhex("48 83 c0 01") * 200_000
    frame = Frame.of(TRIGGER + code, {"rax": 0})
    start = frame.rip
    for times in (1, 2):
        frame.rip = start
        assert frame.emulate()
        assert frame.rip == start + len(TRIGGER + code)
        assert frame.register("rax") == times * 200_000
