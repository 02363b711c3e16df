"""AMX tiles as tests see them: a thread's configuration, and how often kernels multiply, load and store tiles."""

import ctypes
from collections import Counter

import emulator
import numpy as np
from environments import COMPILER, run
from helpers import crowd

from ktmoe._native import core

#: LDTILECFG and STTILECFG of 64 bytes, for assemblers that do not know them.
SOURCE = """
void configure(const void *from) { __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0x07" : : "D"(from) : "memory"); }
void configuration(void *to) { __asm__ volatile(".byte 0xc4, 0xe2, 0x79, 0x49, 0x07" : : "D"(to) : "memory"); }
"""


class Tiles:
    """The calling thread's tile configuration: read() gives 64 bytes, all zero in the initial state."""

    def __init__(self, folder):
        (folder / "tiles.c").write_text(SOURCE)
        run([*COMPILER, "-shared", "-fPIC", "-o", folder / "tiles.so", folder / "tiles.c"])
        self.library = ctypes.CDLL(str(folder / "tiles.so"))

    def read(self):
        to = np.full(64, 0xFF, np.uint8)
        self.library.configuration(ctypes.c_void_p(to.ctypes.data))
        return to

    def write(self, configuration):
        self.library.configure(ctypes.c_void_p(configuration.ctypes.data))


TILE, WIDTH, STEP = 16, 64, 32
#: What tiles of rows take: (passes for the columns of a panel, tiles of C, loads of A and of B a step). The tallest loads A
#: twice, but for the tile at which it turns round.
PASSES = {1: (1, 4, 1 + 4), 2: (2, 4, 2 + 2), 3: (2, 6, 5 + 2)}
#: The same where each weight is the sum of two: twice as many tiles of B.
PASSES_OF_TWO = {1: (1, 4, 1 + 8), 2: (2, 4, 2 + 4), 3: (2, 6, 9 + 4)}


def ceil(a, b):
    return -(-a // b)


def blocks(m):
    """Rows of each kernel call."""
    while m:
        count = ceil(m, core.ROWS_MAX)
        rows = m if count == 1 else ceil(ceil(m, count), TILE) * TILE
        yield rows
        m -= rows


def passes(rows):
    """The tiles of rows that each pass over a panel takes."""
    tiles = ceil(rows, TILE)
    while tiles:
        now = tiles if tiles <= 3 else 2
        yield now
        tiles -= now


def formula(m, n, k, terms=1, group=None):
    """The instructions on tiles for m rows times the transpose of W [n, k].

    terms: numbers a weight. group: k after which C is stored and begins anew.
    """
    counts, steps = Counter(), ceil(k, STEP)
    for now in [now for rows in blocks(m) for now in passes(rows)]:
        times, tiles, loads = (PASSES if terms == 1 else PASSES_OF_TWO)[now]
        times *= ceil(n, WIDTH)
        counts["tdpbf16ps"] += times * tiles * terms * steps
        counts["tileloadd"] += times * loads * steps
        counts["tilezero"] += times * tiles * (1 + ceil(k, group) if group else 1)
        counts["tilestored"] += times * tiles * (ceil(k, group) if group else 1)
    return counts


def counted(layer, m):
    """Every instruction on tiles' data that a forward pass of m rows executed at all, counted."""
    x, ids, weights = crowd(layer, m)
    emulator.reset()
    layer.forward(x, ids, weights)
    assert not emulator.errors()
    of_tiles = {name: count for name, count in emulator.counts().items() if name.startswith(("tdp", "tile")) and count}
    of_tiles.pop("tilerelease", None)  # where emulation is forced, the CPU runs it
    return of_tiles


def expected(layer, m, **how):
    """The instructions on tiles that a forward pass of m rows needs. how: as formula() takes it."""
    gate = up = formula(m, layer.intermediate, layer.hidden, **how)
    return gate + up + formula(m, layer.hidden, layer.intermediate, **how)
