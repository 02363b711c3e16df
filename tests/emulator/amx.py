"""The assembled AMX program, and two ways to run its routines: execution, and frames made up for the emulator alone.

The second works on any CPU and in any process, and also where LDTILECFG, STTILECFG and TILERELEASE do not trap.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from . import amx_assembly as assembly
from .machine import Frame, NotAssembledError, aligned, assemble, low_memory

EXECUTED, MADE_UP = WAYS = ("executed", "made-up frames")


def config(shapes=None, start_row=0):
    """64 bytes; shapes: (rows, bytes in a row) of tiles by number, the others are as large as can be."""
    result = np.zeros(64, np.uint8)
    result[:2] = 1, start_row
    for tile in range(8):
        result[48 + tile], result[16 + 2 * tile] = (shapes or {}).get(tile, (16, 64))
    return result


class Program:
    """Routines, cases, and the memory areas that the cases address."""

    def __init__(self, folder):
        low = low_memory()
        self.cases = assembly.cases(low.ctypes.data)
        self.path = assemble(folder, "amx", assembly.program(self.cases))
        self.library = ctypes.CDLL(str(self.path))
        rip_data = (ctypes.c_uint8 * assembly.RIP_DATA_BYTES).in_dll(self.library, "rip_data")
        self.areas = {
            "low": low,
            "rip_data": np.frombuffer(rip_data, np.uint8),
            "buffer": aligned(1 << 18, np.uint8)[1 << 16 :],
        }
        self.origin = {"low": 0, "rip_data": 0, "buffer": 1 << 16}  # what a case's offset counts from

    def address(self, name):
        """The address of a symbol."""
        return ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value

    def code(self, i):
        """The bytes of a case's instruction."""
        start = self.address(f"code_{i}")
        return ctypes.string_at(start, self.address(f"end_{i}") - start)

    def memory(self, case):
        """The area of a case's operand, and where in it that begins."""
        return self.areas[case.area], self.origin[case.area] + case.offset

    def call(self, way, name, state, argument=0):
        """Run a routine."""
        if way == EXECUTED:
            getattr(self.library, name)(ctypes.c_void_p(state.ctypes.data), ctypes.c_void_p(argument))
        else:
            assert Frame(self.address(f"tile_{name}"), {"rdi": state.ctypes.data, "rsi": argument, "rax": 64}).emulate()

    def run(self, way, i, config, tiles):
        """Run case i; returns tiles and configuration afterwards. tiles: uint8 [8, 16, 64]."""
        case = self.cases[i]
        registers = {}
        if case.area:
            area, start = self.memory(case)
            registers = case.registers(area.ctypes.data + start)
        state = new_state(config, tiles)
        if way == EXECUTED:
            state[64:80].view(np.uint64)[:] = [registers.get(name, 0) % (1 << 64) for name in (case.base, case.index)]
            self.call(way, f"case_{i}", state)
        else:
            self.call(way, "load", state)
            frame = Frame(self.address(f"code_{i}"), registers)
            assert frame.emulate(), case.text
            self.call(way, "store", state)
        return after(state)

    def dot(self, way, op, c, a, b):
        """C + A * B by one instruction; c [m, n] of 4 bytes, a [m, k * 4 bytes], b [k, n * 4 bytes]."""
        tiles = np.zeros((8, 16, 64), np.uint8)
        operands = [np.ascontiguousarray(x).view(np.uint8) for x in (c, a, b)]
        for tile, operand in zip(tiles, operands, strict=False):
            tile[: operand.shape[0], : operand.shape[1]] = operand
        shapes = {tile: operand.shape for tile, operand in enumerate(operands)}
        result, _ = self.run(way, assembly.DOTS.index(op), config(shapes), tiles)
        return np.ascontiguousarray(result[0, : c.shape[0], : 4 * c.shape[1]]).view(c.dtype)


@functools.cache
def program(folder):
    """The program; None if the assembler is too old for AMX."""
    try:
        assemble(folder, "probe", "tdpbf16ps %tmm0, %tmm1, %tmm2\n")
    except NotAssembledError:
        return None
    return Program(folder)


def new_state(config, tiles=None):
    """What a routine takes; the tiles afterwards are zero."""
    state = aligned(assembly.STATE_BYTES, np.uint8)
    state[:64] = config
    if tiles is not None:
        state[assembly.BEFORE : assembly.AFTER] = tiles.ravel()
    return state


def after(state):
    """Tiles and configuration that a routine left."""
    return state[assembly.AFTER : assembly.CONFIG_AFTER].reshape(8, 16, 64), state[assembly.CONFIG_AFTER :]


def visible(tiles, config):
    """Tiles with zeros beyond their shapes."""
    result = np.zeros_like(tiles)
    for tile in range(8):
        rows, size = config[48 + tile], config[16 + 2 * tile]
        result[tile, :rows, :size] = tiles[tile, :rows, :size]
    return result


def random_tiles(rng):
    """Contents of all tiles."""
    return rng.integers(0, 256, (8, 16, 64), dtype=np.uint8)


def random_config(rng):
    """Any shapes."""
    return config({tile: (rng.integers(1, 17), 4 * rng.integers(1, 17)) for tile in range(8)})
