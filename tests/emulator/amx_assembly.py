"""The AMX assembler program of the emulator's tests: random instances of each instruction, and fixed routines around them.

The system assembler turns them into machine code, as in assembly.py. A routine takes one argument, a state::

    0       configuration, 64 bytes
    64, 72  what the general registers of a case hold: base, index
    128     tiles, 1024 bytes each: before, tmm0-7, and then after
    ...     configuration after

Routines of the program; what lies behind tile_load, tile_store and code_<i> is for made-up frames, with rdi = state, rax = 64::

    case_<i>        loads the configuration and all tiles, executes code_<i>, stores them back
    load, store     the two halves of that, for a thread to hold its tiles in between
    start_load      configuration, load of tmm0 from before[0], store to after[0], configuration after
    start_store     configuration, store of tmm0 to after[0], configuration after
    release         configuration, TILERELEASE, configuration after
    reload          configuration, load of tmm0 from before[0], configuration from there, configuration after
    again           the same configuration a second time, an instruction of the CPU's in front, store of tmm0 to after[0]
    edge            load of tmm0 from the second argument, store of zeros there, store of tmm0 to after[0]
    wrong           a TDP whose shapes are wrong if the configuration says so, between two that are right
    cost            `count` (second argument) times load of tmm1 and TDPBF16PS; cost_of_traps without the latter
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from .assembly import REGISTERS

BEFORE, AFTER, CONFIG_AFTER, STATE_BYTES = 128, 128 + 8192, 128 + 2 * 8192, 128 + 2 * 8192 + 64
RIP_DATA_BYTES = 1024
CONFIGS = ["ldtilecfg", "sttilecfg"]
MOVES = ["tileloadd", "tileloaddt1", "tilestored"]
DOTS = ["tdpbf16ps", "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud"]
CASES_PER_OP = 150


@dataclasses.dataclass
class Case:
    """One instruction with its operands: C, A, B are `tile`, `a`, `b` of a TDP; memory lies at its area plus `offset`."""

    op: str
    tile: int = 0
    a: int = 1
    b: int = 2
    area: str = ""  # buffer, low, rip_data; "" = no memory operand
    offset: int = 0
    base: str = ""
    index: str = ""
    scale: int = 1
    displacement: int = 0
    stride: int = 0  # of a tile's rows

    @property
    def text(self) -> str:
        """The instruction in AT&T syntax."""
        if self.op == "tilezero":
            return f"tilezero %tmm{self.tile}"
        if self.op in DOTS:
            return f"{self.op} %tmm{self.b}, %tmm{self.a}, %tmm{self.tile}"
        if self.area == "rip_data":
            address = f".Lrip_data+{self.offset}(%rip)"
        elif self.base or self.index:
            base = f"%{self.base}" if self.base else ""
            address = f"{self.displacement}({base}{f',%{self.index},{self.scale}' if self.index else ''})"
        else:
            address = f"{self.displacement:#x}"
        if self.op in CONFIGS:
            return f"{self.op} {address}"
        return f"{self.op} %tmm{self.tile}, {address}" if self.op == "tilestored" else f"{self.op} {address}, %tmm{self.tile}"

    def registers(self, target: int) -> dict[str, int]:
        """What the address takes to be `target`, or in a tile's first row."""
        index = self.stride // self.scale
        if self.op in CONFIGS:
            index = 5 if self.base else (target - self.displacement) // self.scale
        result = {self.index: index} if self.index else {}
        if self.base:
            step = index * self.scale if self.index and self.op in CONFIGS else 0
            result[self.base] = target - self.displacement - step
        return result


def _random_displacement(rng: np.random.Generator) -> int:
    return int(rng.choice([0, rng.integers(-128, 128), 127, -128, 128, rng.integers(-(1 << 13), 1 << 13)]))


def _random_registers(rng: np.random.Generator, case: Case) -> None:
    case.base, case.index = (REGISTERS[n] for n in rng.choice(16, 2, replace=False))
    if case.index == "rsp":  # cannot be an index
        case.base, case.index = case.index, case.base
    case.scale = int(rng.choice([1, 2, 4, 8]))
    case.displacement = _random_displacement(rng)


def _random_config(rng: np.random.Generator, op: str, low_address: int) -> Case:
    case = Case(op, area="buffer", offset=int(rng.integers(0, 32)) * 8)
    _random_registers(rng, case)
    form = rng.choice(["base", "base+index", "index", "rip", "absolute"])
    if form == "rip":  # without registers: if rsp were there, the signal frame would not fit, and the process would die
        case.area, case.base, case.index = "rip_data", "", ""
    elif form == "absolute":
        case.area, case.base, case.index, case.displacement = "low", "", "", low_address + case.offset
    elif form == "index":
        case.base, case.displacement = "", case.displacement & ~7
        case.index = "r12" if case.index == "rsp" else case.index
    elif form == "base":
        case.index = ""
    if case.base == "rsp":  # the signal frame grows down from it: keep it below the operand
        case.displacement = abs(case.displacement)
    return case


def _random_move(rng: np.random.Generator, op: str, low_address: int) -> Case:
    case = Case(op, tile=int(rng.integers(0, 8)), area="buffer", offset=int(rng.integers(0, 256)))
    _random_registers(rng, case)
    case.stride = int(rng.choice([64, 0, rng.integers(-128, 128), rng.integers(-2000, 2000)])) // 8 * 8
    if case.scale == 1:
        case.stride += int(rng.integers(0, 8))
    if case.base == "rsp":
        case.displacement, case.stride = abs(case.displacement), abs(case.stride)
    elif not rng.integers(4):  # without a base: an absolute address
        case.area, case.base, case.offset = "low", "", 2000
        case.displacement, case.stride = low_address + case.offset, max(-128, min(case.stride, 127 // case.scale * case.scale))
    return case


def cases(low_address: int) -> list[Case]:
    """The first are TDPs of tmm0, tmm1, tmm2, in the order of DOTS; `low_address` is what absolute addresses may use."""
    rng = np.random.default_rng(20250)
    result = [Case(op) for op in DOTS]
    result += [Case("tilezero", tile) for tile in range(8)]
    result += [Case(op, *triple) for op in DOTS for triple in itertools.permutations(range(8), 3)]
    result += [_random_config(rng, op, low_address) for op in CONFIGS for _ in range(CASES_PER_OP)]
    result += [_random_move(rng, op, low_address) for op in MOVES for _ in range(CASES_PER_OP)]
    return result


def _case(i: int, case: Case) -> str:
    saved = ["rbx", "rbp", "r12", "r13", "r14", "r15"]
    slots = {case.base: 64, case.index: 72}
    load = [f"mov {slots[name]}(%rdi), %{name}" for name in sorted(slots, key=lambda name: name == "rdi") if name]
    return f"""
        .globl case_{i}, code_{i}, end_{i}
        case_{i}:
            {"; ".join(f"push %{register}" for register in saved)}
            mov %rdi, state(%rip)
            mov %rsp, stack(%rip)
            mov $64, %eax
            call tile_load
            {"; ".join(load)}
        code_{i}:
            {case.text}
        end_{i}:
            mov stack(%rip), %rsp
            mov state(%rip), %rdi
            mov $64, %eax
            call tile_store
            {"; ".join(f"pop %{register}" for register in reversed(saved))}
            ret
    """


def _routine(name: str, body: str) -> str:
    """name(state), and tile_name behind the setting of rax."""
    symbols = f".globl {name}, tile_{name}; .type {name}, @function"
    return f"{symbols}\n{name}: mov $64, %eax\ntile_{name}: {body}; ret\n.size {name}, . - {name}"


def program(cases: list[Case]) -> str:
    """The whole source file."""
    tiles = range(8)
    after = f"sttilecfg {CONFIG_AFTER}(%rdi)"
    load = "ldtilecfg (%rdi);" + ";".join(f"tileloadd {BEFORE + 1024 * t}(%rdi,%rax), %tmm{t}" for t in tiles)
    store = ";".join(f"tilestored %tmm{t}, {AFTER + 1024 * t}(%rdi,%rax)" for t in tiles)
    first = f"tileloadd {BEFORE}(%rdi,%rax), %tmm0"
    store_first = f"tilestored %tmm0, {AFTER}(%rdi,%rax)"
    edge = "tilezero %tmm1; tilestored %tmm1, (%rsi,%rax)"
    dot = "tdpbf16ps %tmm2, %tmm1, %tmm0"
    return "\n".join(
        [
            ".text",
            _routine("load", load),
            _routine("store", f"{store}; {after}; tilerelease"),
            _routine("start_load", f"ldtilecfg (%rdi); {first}; {after}; {store_first}; tilerelease"),
            _routine("start_store", f"ldtilecfg (%rdi); {store_first}; {after}; tilerelease"),
            _routine("release", f"ldtilecfg (%rdi); {first}; tilerelease; {after}"),
            _routine("reload", f"ldtilecfg (%rdi); {first}; ldtilecfg {BEFORE}(%rdi); {after}; tilerelease"),
            _routine("again", f"ldtilecfg (%rdi); {first}; nop; ldtilecfg (%rdi); {store_first}; tilerelease"),
            _routine("edge", f"ldtilecfg (%rdi); tileloadd (%rsi,%rax), %tmm0; {edge}; {store_first}; tilerelease"),
            _routine("wrong", f"ldtilecfg (%rdi); tilezero %tmm0; {dot}; tilezero %tmm1; tilerelease"),
            _routine("cost", f"1: tileloadd {BEFORE}(%rdi,%rax), %tmm1; {dot}; dec %rsi; jnz 1b"),
            _routine("cost_of_traps", f"1: tileloadd {BEFORE}(%rdi,%rax), %tmm1; dec %rsi; jnz 1b"),
            *(_case(i, case) for i, case in enumerate(cases)),
            f".data\n.balign 64\n.globl rip_data\nrip_data:\n.Lrip_data: .zero {RIP_DATA_BYTES}",
            "state: .quad 0\nstack: .quad 0",
            '.section .note.GNU-stack,"",@progbits\n',
        ]
    )
