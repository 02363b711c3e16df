"""What third parties compile against: which headers these are, and that pack/layout.h finds what packing wrote."""

import ctypes
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from environments import COMPILER, NEEDS_COMPILER, ROOT, run
from helpers import FORMATS, bits, random_arrays

import ktmoe
from ktmoe import ExpertWeights, Matrix
from ktmoe._native import core
from ktmoe.backends import native
from ktmoe.backends.base import Plan
from ktmoe.weights.offsets import Minimum

INCLUDE = Path(ktmoe.get_include())
PANEL, BLOCK = 64, 32
SOURCE = """
#include <string.h>
#include "pack/layout.h"

#define kt_f32_bit(k) 0
#define READ(family, rest)                                                                            \\
    void read_##family(const uint8_t *panel, const kt_layout *l, size_t columns, uint32_t *codes) {    \\
        for (size_t c = 0; c < KT_PANEL; c++)                                                          \\
            for (size_t k = 0; k < columns; k++) {                                                     \\
                uint32_t dword;                                                                        \\
                memcpy(&dword, panel + kt_block_at(l, k / 32) + kt_##family##_at(c, k % 32), 4);       \\
                codes[c * columns + k] = dword >> kt_##family##_bit(k % 32) & (rest);                  \\
            }                                                                                          \\
    }
READ(q4, 15)
READ(f8, 255)
void read_int(const uint8_t *panel, const kt_layout *l, size_t columns, uint32_t *codes, size_t bits) {
    const size_t lower = kt_int_lower_bits(bits);
    for (size_t c = 0; c < KT_PANEL; c++)
        for (size_t k = 0; k < columns; k++) {
            const uint8_t *plane = panel + kt_block_at(l, k / 32);
            codes[c * columns + k] = 0;
            for (size_t first = 0, each = lower; first < bits; first += each, each = bits - lower) {
                uint32_t dword;
                memcpy(&dword, plane + first * KT_INT_BIT_BYTES + kt_int_at(each, c, k % 32), 4);
                codes[c * columns + k] |= (dword >> kt_int_bit(each, k % 32) & ((1u << each) - 1)) << first;
            }
        }
}
READ(b16, 65535)
READ(f32, 0xFFFFFFFF)
size_t header_at(const kt_layout *l, size_t number) { return kt_header_at(l, number); }
size_t super_header_at(const kt_layout *l, size_t number) { return kt_super_header_at(l, number); }
int header_shift(size_t scale_group) { return kt_header_shift(scale_group); }
const size_t block_bytes[] = {KT_Q4_BLOCK_BYTES, KT_F8_BLOCK_BYTES, KT_INT_BIT_BYTES, KT_B16_BLOCK_BYTES, KT_F32_BLOCK_BYTES};
"""
READERS = ("q4", "f8", "int", "b16", "f32")


class Layout(ctypes.Structure):
    """kt_layout."""

    _fields_ = (
        ("header_shift", ctypes.c_int),
        ("super_bytes", ctypes.c_size_t),
        ("header_bytes", ctypes.c_size_t),
        ("block_bytes", ctypes.c_size_t),
    )


def public():
    """The headers that a wheel has, by their names in get_include()."""
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["ktmoe"]
    files = [file for pattern in globs for file in (ROOT / "ktmoe").glob(pattern) if file.suffix == ".h"]
    return {str(file.relative_to(INCLUDE)) for file in files}


def included(file):
    return set(re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE))


def test_public_headers_need_no_other():
    assert public() == {"ktmoe.h", "pack/layout.h"}
    for name in public():
        assert included(INCLUDE / name) <= public()


def test_the_example_needs_no_other():
    project = ROOT / "examples" / "native_backend"
    own = {str(file.relative_to(project)) for file in project.rglob("*.h")}
    for file in (*project.rglob("*.c"), *project.rglob("*.h")):
        assert included(file) <= own | public(), file


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """SOURCE, compiled where there are no other headers."""
    folder = tmp_path_factory.mktemp("headers")
    for name in public():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(INCLUDE / name, folder / name)
    (folder / "layout.c").write_text(SOURCE)
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{folder}", "-shared", "-fPIC"]
    run([*COMPILER, *flags, "-o", folder / "layout.so", folder / "layout.c"])
    made = ctypes.CDLL(str(folder / "layout.so"))
    made.header_at.restype = made.super_header_at.restype = ctypes.c_size_t
    return made


def packed(weight_format, shape, stored):
    """The panels of a matrix."""
    n, k = shape
    experts = ExpertWeights(1, k, n, None, dict.fromkeys(("gate", "up", "down"), weight_format))
    layer = core.PackedLayer(native.load_table("portable"), experts, Plan(), [(0, n)], 1)
    layer.pack(0, {"gate": Matrix("w", weight_format, shape, **stored)})
    return layer.packed_bytes(0, "gate")


def codes_of(weight_format, codes):
    """One by one, [n, k], as a panel has them."""
    if weight_format.family == "q4":
        return np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    if weight_format.element.name == "INT8":
        return codes.view(np.uint8) ^ 128
    return codes if weight_format.element.values else bits(codes)


def packed_bits(scale):
    """Of scales that are packed in fewer than 8; else 0."""
    return {"uint4": 4, "int6": 6}.get(scale.kind, 0)


def packed_row(scale, panel, place, upper, number):
    """Scales of 16 k: the lower 4 bits of both of a block's in a row of bytes, the upper 2 in dwords of 256 k."""
    numbers = panel[place : place + PANEL] >> number % 2 * 4 & 15
    if packed_bits(scale) == 6:
        dwords = panel[upper : upper + 4 * PANEL].view(np.uint32)
        numbers = numbers + (dwords >> number % 16 * 2 & 3) * 16 - 32
    return numbers.astype(scale.dtype)


@NEEDS_COMPILER
@pytest.mark.parametrize("name", [name for name, weight_format in FORMATS.items() if weight_format.order.rows])
def test_layout_finds_what_was_packed(library, name):
    """Every code, and the scales and super-scales of rows, in two panels of several groups."""
    weight_format, shape = FORMATS[name], (128, 576)
    stored = {label: array[0] for label, array in random_arrays(np.random.default_rng(5), weight_format, 1, *shape).items()}
    panels = packed(weight_format, shape, stored)
    scale, supers, offset = weight_format.scale, weight_format.super_scale, weight_format.offset
    reader = {"f16": "b16"}.get(weight_format.family, weight_format.family)
    layout = Layout(0, 0, 0, (ctypes.c_size_t * 5).in_dll(library, "block_bytes")[READERS.index(reader)])
    if reader == "int":
        layout.block_bytes *= weight_format.element.bits
    minima, whole = isinstance(offset, Minimum), scale and packed_bits(scale)
    if scale and scale.extent[1] == 256:
        scale, supers = None, scale
        stored["super_scales"] = stored.pop("scales")
    if scale:
        halves, row = (2 if scale.extent[1] < BLOCK and not whole else 1), PANEL * scale.dtype.itemsize
        layout.header_shift = library.header_shift(ctypes.c_size_t(scale.extent[1]))
        layout.header_bytes = 64 if scale.extent[0] > 1 else halves * row
        if minima:
            layout.header_bytes *= 2
        elif offset:
            layout.header_bytes += PANEL
    if supers:
        layout.super_bytes = PANEL * 2 * (1 + minima) + (PANEL * 4 if whole == 6 else 0)
    codes = codes_of(weight_format, stored["codes"])
    for first, panel in zip((0, PANEL), panels, strict=True):
        found, columns = np.zeros((PANEL, shape[1]), np.uint32), slice(first, first + PANEL)
        arguments = panel.ctypes.data, ctypes.addressof(layout), shape[1], found.ctypes.data
        arguments += (weight_format.element.bits,) * (reader == "int")
        getattr(library, f"read_{reader}")(*map(ctypes.c_void_p, arguments))
        np.testing.assert_array_equal(found, codes[columns])
        for label, of, at in (("scales", scale, library.header_at), ("super_scales", supers, library.super_header_at)):
            if not of or of.extent[0] > 1:
                continue
            halves, row_bytes = (2 if of.extent[1] < BLOCK else 1), PANEL * of.dtype.itemsize
            for number in range(stored[label].shape[1]):
                place = at(ctypes.byref(layout), ctypes.c_size_t(number // halves))
                if packed_bits(of):
                    upper = library.super_header_at(ctypes.byref(layout), ctypes.c_size_t(number // 16)) + PANEL * 2 * (
                        1 + minima
                    )
                    row = packed_row(of, panel, place, upper, number)
                else:
                    place += number % halves * row_bytes
                    row = panel[place : place + row_bytes].view(of.dtype)
                np.testing.assert_array_equal(bits(row), bits(np.ascontiguousarray(stored[label][columns, number])))
