"""The assembled AVX-512 program, and how its routines are called."""

from __future__ import annotations

import ctypes
import functools
from types import SimpleNamespace

import numpy as np

from . import assembly
from .machine import DEFAULT_MXCSR, Frame, NotAssembledError, aligned, assemble, low_memory

BF16 = ["vdpbf16ps", "vcvtne2ps2bf16", "vcvtneps2bf16"]
VBMI = ["vpmultishiftqb", "vpermb"]
GFNI = ["vgf2p8affineqb"]
VNNI = ["vpdpbusd"]
OPS = BF16 + VBMI + GFNI + VNNI
_CASES_PER_OP = 250


@functools.cache
def program(folder):
    """The assembled routines, their cases, and the memory areas that the cases address; None if the assembler is too old."""
    try:
        assemble(folder, "probe", "vdpbf16ps %zmm0, %zmm0, %zmm0\n")
    except NotAssembledError:
        return None
    low = low_memory()
    rng = np.random.default_rng(20240)
    sizes = {**dict.fromkeys(OPS, _CASES_PER_OP), **dict.fromkeys(assembly.BETWEEN, _CASES_PER_OP // 5)}
    cases = [case for op, n in sizes.items() for case in assembly.random_cases(rng, op, n, low.ctypes.data)]
    path = assemble(folder, "avx512", assembly.program(cases))
    library = ctypes.CDLL(str(path))
    for name in ("dot", "cvt2", "cvt", "run"):
        getattr(library, name).argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t, ctypes.c_uint32]
        getattr(library, name).restype = ctypes.c_uint32
    rip_data = (ctypes.c_uint8 * assembly.RIP_DATA_BYTES).in_dll(library, "rip_data")
    areas = {"low": low, "rip_data": np.frombuffer(rip_data, np.uint8), "buffer": aligned(1 << 18, np.uint8)[1 << 17 :]}
    return SimpleNamespace(library=library, path=path, cases=cases, areas=areas)


def execute(program, name, zmm, k, target):
    """Run a routine of the (state, target) kind; returns zmm and k afterwards."""
    state = aligned(assembly.STATE_BYTES, np.uint8)
    state[:2048] = zmm.ravel()
    state[2048:] = k.view(np.uint8)
    getattr(program.library, name)(ctypes.c_void_p(state.ctypes.data), ctypes.c_void_p(target))
    return state[:2048].reshape(32, 64), state[2048:].view(np.uint64)


def emulate(program, i, zmm, k, target):
    """The same of case i in a made-up frame: the emulator runs it on any CPU."""
    code = ctypes.cast(getattr(program.library, f"code_{i}"), ctypes.c_void_p).value
    frame = Frame(code, program.cases[i].registers(target))
    execute(program, "save", zmm, k, frame.xsave.ctypes.data)
    assert frame.emulate(), program.cases[i].text
    return execute(program, "restore", np.zeros_like(zmm), np.zeros_like(k), frame.xsave.ctypes.data)


def loop(program, name, out, a, b, mxcsr=DEFAULT_MXCSR):
    """Run a routine of the array kind over whole vectors; returns MXCSR as it left it."""
    count = a.nbytes // 64
    return getattr(program.library, name)(out.ctypes.data, a.ctypes.data, b.ctypes.data, count, mxcsr)
