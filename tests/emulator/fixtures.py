"""Fixtures of the emulator's tests, which name this module as a plugin. emulator_folder is in conftest.py."""

from __future__ import annotations

import numpy as np
import pytest

import emulator

from . import amx, avx512
from .machine import DEFAULT_MXCSR, aligned


@pytest.fixture
def program(emulator_folder):
    """The AVX-512 routines."""
    assembled = avx512.program(emulator_folder)
    if not assembled:
        pytest.skip("the system's assembler does not know AVX512_BF16")
    return assembled


@pytest.fixture
def tile_program(emulator_folder):
    """The AMX routines."""
    assembled = amx.program(emulator_folder)
    if not assembled:
        pytest.skip("the system's assembler does not know AMX")
    return assembled


@pytest.fixture
def emulated(emulator_folder):
    """Emulation for one test, counts at zero; on a CPU that has the instructions it changes nothing."""
    with emulator.installed(emulator_folder):
        emulator.reset()
        yield


@pytest.fixture
def trapping(program, emulated):
    """Whether AVX512_BF16 traps here, found by executing one: a virtual machine may hide that it has it."""
    x = aligned(32, np.uint32)
    program.library.cvt(x.ctypes.data, x.ctypes.data, x.ctypes.data, 1, DEFAULT_MXCSR)
    did = emulator.traps() == 1
    emulator.reset()
    return did


@pytest.fixture
def multishift_traps(program, emulated):
    """The same of AVX512_VBMI."""
    program.library.multishift()
    did = emulator.traps() == 1
    emulator.reset()
    return did


@pytest.fixture
def affine_traps(program, emulated):
    """The same of GFNI."""
    program.library.affine()
    did = emulator.traps() == 1
    emulator.reset()
    return did


@pytest.fixture
def dot_bytes_traps(program, emulated):
    """The same of AVX512_VNNI."""
    program.library.dot_bytes()
    did = emulator.traps() == 1
    emulator.reset()
    return did


@pytest.fixture
def tiles_trap(program, emulated):
    """The same of AMX, which the process asks for unless emulation is forced."""
    if emulator.native("amx_tile"):
        emulator.permit()
    program.library.tilezero()
    did = emulator.traps() == 1
    emulator.reset()
    return did


@pytest.fixture(params=amx.WAYS)
def way(request, tiles_trap):
    """How to run code; no emulated instruction of the test may turn out to be wrong."""
    yield request.param
    assert not emulator.errors()
