"""The AVX-512 assembler program of the emulator's tests: random instances of each instruction, and fixed routines around them.

The system assembler turns them into machine code, so that the emulator's decoder is checked against an encoder it knows
nothing about. A routine of the table below, or `case_<i>(state, target)` for the i-th case::

    case_<i>         loads all vector and mask registers from `state`, executes the instruction with its memory operand (if it
                     has one) at `target`, stores the registers back; code_<i> lies in front of the instruction, or of
                     the one that it is to follow
    tile_case_<i>    the same behind an AMX instruction
    save             loads the registers from `state` and saves them to the XSAVE area at `target`, where a frame may hold them
    restore          takes them from there and stores them to `state`
    dot, cvt2, cvt   loop over arrays of `count` vectors under a given MXCSR; return the MXCSR they end with
    run              as dot, but 48 instructions of three kinds in a row
    masked_*         load with all but the first element masked out
    initial_*        start from vector registers in their initial state (XRSTOR of an empty area)
    illegal          UD2
    mixed            UD2, an instruction of ours, UD2, two of ours
    mixed_tiles      the same with AMX
    tilezero         an AMX instruction with all that it takes
    multishift       a VPMULTISHIFTQB
    affine           a VGF2P8AFFINEQB
    skip_ud2         a SIGILL handler that steps over UD2 and counts in `skipped`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

REGISTERS = ["rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", *(f"r{n}" for n in range(8, 16))]
LETTER = {16: "x", 32: "y", 64: "z"}
STATE_BYTES = 32 * 64 + 8 * 8  # zmm0-31, k0-7
RIP_DATA_BYTES = 1024
RUN_LENGTH = 48
MOVES = ["vmovaps", "vmovdqa32", "vmovdqa64", "vmovdqu8", "vmovdqu16", "vmovdqu32", "vmovdqu64"]
VEX_MOVES = ["vmovdqa", "vmovdqu"]
VEX_STORES = [f"{op} store" for op in VEX_MOVES]
EVEX_STORES = [f"{op} store" for op in MOVES[1:]]
STORES = EVEX_STORES + VEX_STORES
SHIFTS = ["vpsrlw", "vpsrld"]
VEX_SHIFTS = [f"{op}, VEX" for op in SHIFTS]
VEX = [*VEX_MOVES, *VEX_STORES, "vbroadcastss", *VEX_SHIFTS, "vpand", "vpaddd", "vpshufb, VEX"]
EVEX = [*MOVES, *EVEX_STORES, "vpbroadcastd", *SHIFTS, "vpermps", "vmulps", "vpermw", "vpsubusw"]
BETWEEN = EVEX + VEX  # between.c
# Bytes, as the assembler need not know AMX: ldtilecfg (%rax); tilezero %tmm0; tilerelease.
LDTILECFG, TILEZERO, TILERELEASE = (
    f".byte 0xc4, 0xe2, {rest};" for rest in ("0x78, 0x49, 0", "0x7b, 0x49, 0xc0", "0x78, 0x49, 0xc0")
)
CONFIGURE = f"lea tile_config(%rip), %rax; {LDTILECFG}"


@dataclasses.dataclass
class Case:
    """One instruction with its operands; `source` is None for a memory operand, which lies at its area plus `offset`."""

    op: str
    vector_bytes: int
    dest: int  # of a store, what it stores
    first: int  # unused by those of one operand
    source: int | None
    mask: int
    zeroing: bool
    immediate: int = 0
    broadcast: bool = False
    area: str = "buffer"  # or rip_data, or low (the absolute address given to random_cases)
    offset: int = 0
    address: str = ""
    setup: tuple[str, ...] = ()  # puts the address's registers into place; target is in rsi
    registers: Callable[[int], dict[str, int]] = lambda target: {}  # what they then hold

    @property
    def element_bytes(self) -> int:
        """Bytes of an element that is broadcast."""
        return 8 if self.op in ("vpmultishiftqb", "vgf2p8affineqb") else 4

    @property
    def text(self) -> str:
        """The instruction in AT&T syntax."""
        letter = LETTER[self.vector_bytes]
        narrows = self.op == "vcvtneps2bf16"
        shifts = self.op in SHIFTS + VEX_SHIFTS
        unary = narrows or shifts or self.op in MOVES + VEX_MOVES + ["vpbroadcastd", "vbroadcastss"]
        dest = f"%{LETTER[max(self.vector_bytes // 2, 16)] if narrows else letter}mm{self.dest}"
        if self.mask:
            dest += f"{{%k{self.mask}}}" + ("{z}" if self.zeroing else "")
        # The assembler prefers VEX where both say the same.
        mnemonic = "{evex} vgf2p8affineqb" if self.op == "vgf2p8affineqb" else self.op.removesuffix(", VEX")
        if self.source is not None:
            source = f"%{'x' if self.op in ('vpbroadcastd', 'vbroadcastss') else letter}mm{self.source}"
        else:
            source = self.address + (f"{{1to{self.vector_bytes // self.element_bytes}}}" if self.broadcast else "")
            if narrows and letter != "z" and not self.broadcast:
                mnemonic += letter  # the length shows in no operand
        if self.op in STORES:
            return f"{mnemonic.removesuffix(' store')} {dest}, {source}"
        if shifts or self.op == "vgf2p8affineqb":
            source = f"${self.immediate}, {source}"
        return f"{mnemonic} {source}, {dest}" if unary else f"{mnemonic} {source}, %{letter}mm{self.first}, {dest}"


TRIGGER = Case("vcvtneps2bf16", 64, dest=31, first=0, source=30, mask=0, zeroing=False)
"""What those of BETWEEN follow, as they are emulated behind an emulated instruction only."""


def _place(case: Case, rng: np.random.Generator, low_address: int) -> None:
    """Choose an addressing form and its registers."""
    form = rng.choice(["base", "base", "base", "base+index", "base+index", "base+index", "index", "rip", "absolute"])
    unit = case.element_bytes if case.broadcast or case.op == "vpbroadcastd" else case.vector_bytes
    displacement = int(
        rng.choice([0, rng.integers(-128, 128) * unit, rng.integers(-128, 128), rng.integers(-(1 << 13), 1 << 13), 127 * unit])
    )
    case.offset = int(rng.integers(0, 256))
    if case.op.startswith(("vmovaps", "vmovdqa")):
        case.offset &= ~63
    if form == "rip":
        case.area = "rip_data"
        case.address = f".Lrip_data+{case.offset}(%rip)"
        return
    if form == "absolute":
        case.area = "low"
        case.address = f"{low_address + case.offset:#x}"
        return
    base, index = (REGISTERS[n] for n in rng.choice(16, 2, replace=False))
    scale = int(rng.choice([1, 2, 4, 8]))
    if index == "rsp":  # cannot be an index
        base, index = index, base
    if form == "index":
        case.offset &= ~7  # divisible by the scale
        displacement &= ~7
        case.address = f"{displacement}(,%{index},{scale})"
        case.setup = (f"lea {-displacement}(%rsi), %{index}", f"shr ${scale.bit_length() - 1}, %{index}")
        case.registers = lambda target: {index: (target - displacement) // scale}
        return
    count = int(rng.integers(-1000, 1000)) if form == "base+index" else 0
    if base == "rsp":  # the signal frame grows down from it: keep it below the operand
        displacement, count = abs(displacement), abs(count)
    case.setup = (f"lea {-displacement - count * scale}(%rsi), %{base}",)
    case.registers = lambda target: {base: target - displacement - count * scale, index: count}
    if form == "base+index":
        case.setup += (f"mov ${count}, %{index}",)
        case.address = f"{displacement}(%{base},%{index},{scale})"
    else:
        case.address = f"{displacement}(%{base})"


def random_cases(rng: np.random.Generator, op: str, count: int, low_address: int) -> list[Case]:
    """`count` instances of `op`; `low_address` is the mapped area that absolute addresses may use."""
    cases = []
    for _ in range(count):
        mask = int(rng.choice([0, rng.integers(1, 8)]))
        dest, first, source = (int(n) for n in rng.integers(0, 32, 3))
        case = Case(op, int(rng.choice([16, 32, 64])), dest, first, source, mask, bool(mask and rng.integers(2)))
        if op in BETWEEN:
            case.vector_bytes, case.mask, case.zeroing = 64, 0, False
            case.immediate = int(rng.choice([rng.integers(0, 34), rng.integers(0, 256)]))
        if op == "vgf2p8affineqb":
            case.immediate = int(rng.integers(0, 256))
        if op in VEX:
            case.vector_bytes, case.dest, case.first, case.source = 32, dest % 16, first % 16, source % 16
        if op in STORES or (rng.integers(3) and op not in VEX_SHIFTS):
            case.source = None
            case.broadcast = bool(rng.integers(2)) and op not in [*BETWEEN, "vpermb"]
            _place(case, rng, low_address)
        cases.append(case)
    return cases


def _array_loop(name: str, body: str) -> str:
    """name(rdi, rsi, rdx, rcx = count, r8 = MXCSR) -> MXCSR afterwards; `body` handles one vector of 64 bytes."""
    return f"""
        .globl {name}
        {name}:
            stmxcsr -4(%rsp)
            mov %r8d, -8(%rsp)
            ldmxcsr -8(%rsp)
        1:
            {body}
            add $64, %rdi
            add $64, %rsi
            add $64, %rdx
            dec %rcx
            jnz 1b
            stmxcsr -8(%rsp)
            ldmxcsr -4(%rsp)
            mov -8(%rsp), %eax
            ret
    """


def _with_registers(name: str, body: str) -> str:
    """name(state, target): `body` between loading and storing all vector registers; it may use any general register."""
    saved = ["rbx", "rbp", "r12", "r13", "r14", "r15"]
    return f"""
        .globl {name}
        {name}:
            {"; ".join(f"push %{register}" for register in saved)}
            mov %rdi, state(%rip)
            mov %rsp, stack(%rip)
            call load
            {body}
            mov stack(%rip), %rsp
            mov state(%rip), %rdi
            call store
            {"; ".join(f"pop %{register}" for register in reversed(saved))}
            ret
    """


def program(cases: list[Case]) -> str:
    """The whole source file."""
    zmm = [(f"{64 * n}(%rdi)", f"%zmm{n}") for n in range(32)]
    k = [(f"{2048 + 8 * n}(%rdi)", f"%k{n}") for n in range(8)]
    load = [f"vmovdqu64 {memory}, {register}" for memory, register in zmm] + [
        f"kmovq {memory}, {register}" for memory, register in k
    ]
    store = [f"vmovdqu64 {register}, {memory}" for memory, register in zmm] + [
        f"kmovq {register}, {memory}" for memory, register in k
    ]
    row = "vdpbf16ps (%rdx), %zmm1, %zmm0; vcvtneps2bf16 %zmm0, %ymm2; vcvtne2ps2bf16 %zmm0, %zmm0, %zmm3"
    parts = [
        ".text\nload:",
        *load,
        "ret\nstore:",
        *store,
        "ret",
        *(
            _with_registers(
                f"case_{i}",
                "\n".join([*case.setup, f".globl code_{i}; code_{i}:", *([TRIGGER.text] * (case.op in BETWEEN)), case.text]),
            )
            for i, case in enumerate(cases)
        ),
        *(
            _with_registers(f"tile_case_{i}", "\n".join([CONFIGURE, *case.setup, TILEZERO, case.text, TILERELEASE]))
            for i, case in enumerate(cases)
        ),
        _array_loop(
            "dot", "vmovups (%rdi), %zmm0; vmovups (%rsi), %zmm1; vdpbf16ps (%rdx), %zmm1, %zmm0; vmovups %zmm0, (%rdi)"
        ),
        _array_loop("cvt2", "vmovups (%rsi), %zmm1; vcvtne2ps2bf16 (%rdx), %zmm1, %zmm0; vmovups %zmm0, (%rdi)"),
        _array_loop("cvt", "vcvtneps2bf16 (%rsi), %ymm0; vmovups %zmm0, (%rdi)"),
        _array_loop(
            "run",
            "vmovups (%rdi), %zmm0; vmovups (%rsi), %zmm1;" + f"{row};" * (RUN_LENGTH // 3) + "vmovups %zmm0, (%rdi)",
        ),
    ]
    first_only = "mov $1, %eax; kmovq %rax, %k1;"
    for op, operands in {
        "vdpbf16ps": "(%rsi), %zmm1, %zmm2{%k1}",
        "vcvtneps2bf16": "(%rsi), %ymm2{%k1}",
        "vcvtne2ps2bf16": "(%rsi), %zmm1, %zmm2{%k1}",
        "vpmultishiftqb": "(%rsi), %zmm1, %zmm2{%k1}",
        "vgf2p8affineqb": "$1, (%rsi), %zmm1, %zmm2{%k1}",
        "vpermb": "(%rsi), %zmm1, %zmm2{%k1}",
    }.items():
        parts.append(_with_registers(f"masked_{op}", f"{first_only} {op} {operands}"))
    components = "mov $0xe6, %eax; xor %edx, %edx;"  # SSE, AVX, opmask and the rest of AVX-512
    empty = f"{components} xrstor empty(%rip);"
    for name, body in {
        "low": "vcvtneps2bf16 (%rsi), %ymm3",
        "high": "vcvtneps2bf16 (%rsi), %ymm20",
        "masked": "vdpbf16ps (%rsi), %zmm4, %zmm21{%k1}",
        "zero": "vdpbf16ps (%rsi), %zmm5, %zmm22",
    }.items():
        parts.append(_with_registers(f"initial_{name}", f"{empty} {body}"))
    ours = "vcvtneps2bf16 (%rsi), %ymm1;"
    parts += [
        _with_registers("save", f"{components} xsave (%rsi)"),
        _with_registers("restore", f"{components} xrstor (%rsi)"),
        _with_registers("mixed", f"ud2; {ours} ud2; {ours} vcvtneps2bf16 %zmm2, %ymm3"),
        _with_registers("mixed_tiles", f"{CONFIGURE} ud2; {TILEZERO} ud2; {TILEZERO} {TILEZERO} {TILERELEASE}"),
        f".globl tilezero\ntilezero: {CONFIGURE} {TILEZERO} {TILERELEASE} ret",
        ".globl multishift\nmultishift: vpmultishiftqb %zmm0, %zmm0, %zmm0; ret",
        ".globl affine\naffine: vgf2p8affineqb $0, %zmm0, %zmm0, %zmm0; ret",
        ".globl dot_bytes\ndot_bytes: vpdpbusd %zmm0, %zmm0, %zmm0; ret",
        ".globl illegal\nillegal: ud2; ret",
        ".globl skip_ud2\nskip_ud2: addq $2, 168(%rdx); incl .Lskipped(%rip); ret",  # 168: RIP within ucontext_t
        f".data\n.balign 64\n.globl rip_data\nrip_data:\n.Lrip_data: .zero {RIP_DATA_BYTES}",
        ".balign 64\nempty: .zero 24; .long 0x1f80, 0xffff; .zero 4064",  # MXCSR and its mask
        "tile_config: .byte 1; .zero 15; .short 64; .zero 30; .byte 16; .zero 15",  # tmm0 is 16 rows of 64 bytes
        "state: .quad 0\nstack: .quad 0\n.globl skipped\nskipped: .Lskipped: .long 0",
        '.section .note.GNU-stack,"",@progbits\n',
    ]
    return "\n".join(parts)
