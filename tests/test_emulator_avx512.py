"""AVX512_BF16, AVX512_VBMI, VPDPBUSD and what is emulated between: decoding and operands, against the system's assembler and a
numpy model.

On a CPU that has the instructions nothing traps, and the same tests compare the CPU itself with the model. In frames made up
for the emulator it is compared on any CPU.
"""

from __future__ import annotations

import emulator
import numpy as np
import pytest
from emulator import assembly
from emulator.avx512 import GFNI, OPS, VBMI, VNNI, emulate, execute
from emulator.model import affine, bf16_values, dot_bytes, dot_pairs, multiply, multishift, random_state, to_bf16

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))


def expected_between(case, before, memory):
    """The same for what is emulated between the others; before: registers behind the instruction in front of it."""
    source = np.array(memory if case.source is None else before[case.source])
    words, first = source.view(np.uint16), before[case.first].view(np.uint16)
    dwords, firsts = source.view(np.uint32), before[case.first].view(np.uint32)
    after = before.copy()
    if case.op in assembly.STORES:
        return after
    if case.op in ("vpbroadcastd", "vbroadcastss"):
        after[case.dest] = np.tile(source[:4], 16)
    elif case.op in ("vpsrlw", "vpsrlw, VEX"):
        after[case.dest] = (words >> case.immediate if case.immediate < 16 else words * 0).view(np.uint8)
    elif case.op in ("vpsrld", "vpsrld, VEX"):
        after[case.dest] = (dwords >> case.immediate if case.immediate < 32 else dwords * 0).view(np.uint8)
    elif case.op == "vpermps":
        after[case.dest] = dwords[firsts & 15].view(np.uint8)
    elif case.op == "vmulps":
        after[case.dest] = multiply(firsts.view(np.float32), dwords.view(np.float32)).view(np.uint8)
    elif case.op == "vpermw":
        after[case.dest] = words[first & 31].view(np.uint8)
    elif case.op == "vpsubusw":
        after[case.dest] = np.where(first > words, first - words, np.uint16(0)).view(np.uint8)
    elif case.op == "vpand":
        after[case.dest] = before[case.first] & source
    elif case.op == "vpaddd":
        after[case.dest] = (firsts + dwords).view(np.uint8)
    elif case.op == "vpshufb, VEX":
        lanes, indices = before[case.first].reshape(4, 16), source.reshape(4, 16)
        after[case.dest] = np.where(indices < 128, np.take_along_axis(lanes, indices & 15, 1), 0).ravel()
    else:
        after[case.dest] = source
    after[case.dest, case.vector_bytes :] = 0
    return after


def expected_registers(case, zmm, k, memory):
    """What the registers hold after the instruction; zmm: uint8 [32, 64], memory: the 64 bytes at the operand."""
    if case.op in assembly.BETWEEN:
        return expected_between(case, zmm, memory)
    source = np.array(memory if case.source is None else zmm[case.source])
    if case.broadcast:
        source = np.tile(source[: case.element_bytes], 64 // case.element_bytes)
    source, first, dest = (x[: case.vector_bytes].view(np.uint32) for x in (source, zmm[case.first], zmm[case.dest]))
    if case.op == "vpmultishiftqb":
        result = multishift(first.view(np.uint8), source.view(np.uint8))
    elif case.op == "vgf2p8affineqb":
        result = affine(first.view(np.uint8), source.view(np.uint8), case.immediate)
    elif case.op == "vpermb":
        result = source.view(np.uint8)[first.view(np.uint8) % case.vector_bytes]
    elif case.op == "vpdpbusd":
        result = dot_bytes(dest.view(np.int32), first.view(np.uint8), source.view(np.int8)).view(np.uint32)
    elif case.op == "vdpbf16ps":
        result = dot_pairs(dest.view(np.float32), first, source).view(np.uint32)
    elif case.op == "vcvtne2ps2bf16":
        result = to_bf16(np.concatenate([source, first]).view(np.float32))
    else:
        result = to_bf16(source.view(np.float32))
    if case.mask:
        kept = np.zeros_like(result) if case.zeroing else zmm[case.dest].view(result.dtype)[: len(result)]
        result = np.where(k[case.mask] >> np.arange(len(result), dtype=np.uint64) & np.uint64(1), result, kept)
    after = zmm.copy()
    after[case.dest] = 0
    after[case.dest, : result.nbytes] = result.view(np.uint8)
    return after


def between():
    """Vector instructions that were emulated only because they followed another; what makes addresses may, too."""
    return sum(count for name, count in emulator.counts(native=True).items() if name.startswith("v"))


MADE_UP = "made-up frames"


def run_cases(program, op, way, before):
    """Run all cases of op as way_<i>, or in frames, and compare registers and memory with the model; returns their number."""
    rng = np.random.default_rng(6)
    done = 0
    for i, case in enumerate(program.cases):
        if case.op != op:
            continue
        area = program.areas[case.area]
        area[case.offset : case.offset + 64] = bf16_values(rng, 32).view(np.uint8)
        memory = area[case.offset : case.offset + 64].copy()
        zmm, k = random_state(rng)
        target = area.ctypes.data + case.offset
        after, k_after = (
            emulate(program, i, zmm, k, target) if way == MADE_UP else execute(program, f"{way}_{i}", zmm, k, target)
        )
        np.testing.assert_array_equal(after, expected_registers(case, before(zmm), k, memory), err_msg=case.text)
        np.testing.assert_array_equal(k_after, k, err_msg=case.text)
        if op in assembly.STORES:
            memory[: case.vector_bytes] = before(zmm)[case.dest, : case.vector_bytes]
        np.testing.assert_array_equal(area[case.offset : case.offset + 64], memory, err_msg=case.text)
        done += 1
    assert done
    return done


@pytest.mark.parametrize("op", OPS)
def test_every_operand_form(program, emulated, trapping, multishift_traps, affine_traps, dot_bytes_traps, op):
    """Random registers, lengths, masks, broadcasts and addresses: all 32 registers and 8 masks are as the model says."""
    done = run_cases(program, op, "case", lambda zmm: zmm)
    of_groups = ((VBMI, multishift_traps), (GFNI, affine_traps), (VNNI, dot_bytes_traps))
    traps = next((traps for group, traps in of_groups if op in group), trapping)
    assert emulator.counts()[op] == (done if traps else 0)


@pytest.mark.parametrize("op", assembly.BETWEEN)
def test_every_operand_form_behind_a_conversion(program, emulated, trapping, op):
    done = run_cases(program, op, "case", lambda zmm: expected_registers(assembly.TRIGGER, zmm, None, None))
    assert between() == (done if trapping else 0)


@pytest.mark.parametrize("op", OPS + assembly.BETWEEN)
def test_every_operand_form_in_made_up_frames(program, emulated, op):
    behind = op in assembly.BETWEEN
    done = run_cases(program, op, MADE_UP, lambda zmm: expected_registers(assembly.TRIGGER, zmm, None, None) if behind else zmm)
    assert (between() if behind else emulator.counts()[op]) == done


@pytest.mark.parametrize("op", OPS + assembly.BETWEEN)
def test_every_operand_form_behind_an_amx_instruction(program, emulated, tiles_trap, op):
    """Where only AMX traps, what follows it is emulated nevertheless."""
    done = run_cases(program, op, "tile_case", lambda zmm: zmm)
    assert (between() if op in assembly.BETWEEN else emulator.counts()[op]) == (done if tiles_trap else 0)
    assert not emulator.errors()


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
            *([] if op == "vpermb" else ["1to2", "1to4", "1to8"] if op in VBMI + GFNI else ["1to4", "1to8", "1to16"]),
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
        ("62 f2 ed 48 83 d9", ("vpmultishiftqb", 6)),
        ("62 f2 ed d9 83 58 10", ("vpmultishiftqb", 7)),  # {1to8}, disp8, {k1}{z}
        ("62 f2 ed 58 83 d9", None),  # broadcast of a register
        ("62 f2 ed c8 83 d9", None),  # zeroing without a mask
        ("62 f2 ed 68 83 d9", None),  # reserved length
        ("62 f2 6d 48 83 d9", None),  # W0
        ("62 f2 ee 48 83 d9", None),  # another prefix
        ("62 f3 ed 48 ce d9 05", ("vgf2p8affineqb", 7)),
        ("62 f3 ed d9 ce 58 10 05", ("vgf2p8affineqb", 8)),  # {1to8}, disp8, {k1}{z}
        ("62 f3 ed 58 ce d9 05", None),  # broadcast of a register
        ("62 f3 ed c8 ce d9 05", None),  # zeroing without a mask
        ("62 f3 6d 48 ce d9 05", None),  # W0
        ("62 f3 ed 48 cf d9 05", None),  # vgf2p8affineinvqb
        ("62 f2 6d 48 50 d9", ("vpdpbusd", 6)),
        ("62 f2 6d d9 50 58 10", ("vpdpbusd", 7)),  # {1to16}, disp8, {k1}{z}
        ("62 f2 6d 58 50 d9", None),  # broadcast of a register
        ("62 f2 6d c8 50 d9", None),  # zeroing without a mask
        ("62 f2 6d 68 50 d9", None),  # reserved length
        ("62 f2 ed 48 50 d9", None),  # W1
        ("62 f2 6e 48 50 d9", None),  # another prefix
        ("62 f2 6d 48 51 d9", None),  # vpdpbusds, which saturates
        ("c4 e2 6d 50 d9", ("vpdpbusd, VEX", 5)),
        ("c4 e2 6d 52 d9", ("vpdpwssd, VEX", 5)),
        ("c4 e2 6d 53 d9", None),  # vpdpwssds, which saturates
        ("c4 e2 69 50 58 10", ("vpdpbusd, VEX", 6)),  # of xmm, disp8
        ("c4 e2 ed 50 d9", None),  # W1
        ("c4 e2 6c 50 d9", None),  # no prefix
        ("c4 e2 6d 51 d9", None),
        ("62 f2 f5 48 8d d0", ("vpermw", 6)),
        ("62 f1 75 48 71 d0 04", ("vpsrlw", 7)),
        ("62 f1 75 48 71 e0 04", None),  # vpsraw
        ("62 f1 45 48 72 d3 10", ("vpsrld", 7)),
        ("62 f1 c5 48 72 d3 10", None),  # W1
        ("62 f1 6d 48 72 f2 10", None),  # vpslld
        ("62 72 65 48 16 c0", ("vpermps", 6)),
        ("62 72 e5 48 16 c0", None),  # vpermpd
        ("62 71 3c 48 59 c2", ("vmulps", 6)),
        ("62 71 3c 58 59 c2", None),  # with a rounding of its own
        ("62 71 bd 48 59 c2", None),  # vmulpd
        ("62 f1 fd 48 7f 07", ("vmovdqa store", 6)),
        ("62 f1 fe 48 7f 47 01", ("vmovdqu32/64 store", 7)),
        ("62 f1 fd 48 7f c7", None),  # the store's opcode between registers
        ("62 f2 f5 49 8d d0", None),  # vpermw with a mask
        ("62 f2 f5 28 8d d0", None),  # of ymm
        ("c5 fe 6f 07", ("vmovdqu, VEX", 4)),
        ("c4 c1 7e 6f 07", ("vmovdqu, VEX", 5)),  # the long form of the prefix
        ("c5 fd 6f 05 00 00 00 00", ("vmovdqa, VEX", 8)),  # rip-relative
        ("c5 7e 7f c1", ("vmovdqu store, VEX", 4)),
        ("c5 fa 6f 07", None),  # of xmm
        ("c5 f6 6f 07", None),  # a register in vvvv
        ("c4 e2 7e 6f 07", None),  # another map
        ("c4 e2 7d 18 07", ("vbroadcastss, VEX", 5)),
        ("c4 e2 fd 18 07", None),  # W1
        ("c5 7d 71 d0 08", ("vpsrlw, VEX", 5)),
        ("c5 fd 71 e0 08", None),  # vpsraw
        ("c5 fd 71 10 08", None),  # memory, which only EVEX has
        ("c5 fd 72 d0 04", ("vpsrld, VEX", 5)),
        ("c5 f5 db c2", ("vpand, VEX", 4)),
        ("c5 f5 fe c2", ("vpaddd, VEX", 4)),
        ("c4 e2 75 00 c2", ("vpshufb, VEX", 5)),
        ("c5 f5 00 c2", None),  # another map
        ("c5 f8 77", None),
        ("0f 0b", None),
    ],
)
def test_decodes_only_what_a_cpu_accepts(code, decoded):
    assert emulator.decode(bytes.fromhex(code)) == decoded
