"""Registers in their initial state, stale bytes of frames, and memory behind masks, where AVX512_BF16 is emulated."""

from __future__ import annotations

import ctypes
import mmap

import emulator
import numpy as np
import pytest
from emulator.avx512 import execute
from emulator.machine import STALE, Frame, aligned
from emulator.model import random_state, to_bf16

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))


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


@pytest.mark.parametrize(
    ("code", "components", "zeroed"),
    [
        ("62 f2 5e 48 52 dc", 0b0100_0110, 256 + 256 + 512),  # vdpbf16ps %zmm4, %zmm4, %zmm3: SSE, AVX, ZMM_Hi256
        ("62 a2 5e 40 52 dc", 0b1000_0000, 1024),  # the same of zmm20, zmm19: Hi16_ZMM
    ],
)
def test_stale_bytes_of_a_frame(emulated, code, components, zeroed):
    """A component marked as initial may hold any bytes: they are not read, and are zeroed when a part of it is written."""
    frame = Frame.of(bytes.fromhex(code))
    assert frame.emulate()
    assert frame.xsave[512] == components
    frame.xsave[464:576] = STALE
    np.testing.assert_array_equal(np.unique(frame.xsave), [0, STALE])
    assert np.count_nonzero(frame.xsave == 0) == zeroed
    assert emulator.counts()["vdpbf16ps"] == 1


def test_the_cpus_own_instructions_start_nothing(emulated):
    """A SIGILL at an instruction that the CPU ought to have is not ours, even if it would be emulated behind one that is."""
    vpermw = Frame.of(bytes.fromhex("62 f2 f5 48 8d d0"))
    assert not vpermw.emulate()
    assert vpermw.rip == vpermw.machine_code.ctypes.data


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
