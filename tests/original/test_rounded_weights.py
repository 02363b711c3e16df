"""Weights that kt-kernel rounds when it loads them, and saves: the same codes and scales as ktmoe's rule gives, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from cases import EXPERTS, FORMATS, experts, originals
from classes import made, need
from original import needed

from ktmoe import Matrix, reference

pytestmark = needed
#: method: (class, what the names of its files begin with, bits of a code, what a unit of a code is in units of a scale).
SAVED = {"AMXINT8": ("AMXInt8_MOE", "INT8", 8, 1), "AMXINT4": ("AMXInt4_MOE", "INT4", 4, 16)}


def unpacked(raw: np.ndarray, n: int, k: int, bits: int) -> np.ndarray:
    """Codes [n, k] of a file, for n and k of one block: tiles of 32 rows and 64 bytes of each, halves of 16 rows by themselves,
    in which dwords of all rows stand side by side. A byte of 4-bit codes has k and k + 64 of its tile.
    """
    columns = 64 * 8 // bits
    tiles = raw.reshape(n // 32, k // columns, 2, 16, 16, 4)
    bytes_ = tiles.transpose(0, 2, 4, 1, 3, 5).reshape(n, k // columns, 64)
    if bits == 8:
        return bytes_.reshape(n, k).view(np.int8)
    nibbles = np.stack([bytes_ & 15, bytes_ >> 4], axis=2).reshape(n, k).astype(np.int8)
    return nibbles - 16 * (nibbles > 7)


@pytest.mark.smoke
@pytest.mark.parametrize("method", SAVED)
def test_the_same_codes_and_scales(exists, tmp_path, method):
    kind, begin, bits, unit = SAVED[method]
    need(exists, kind)
    made(originals(method), method, kind, rounded=str(tmp_path)).run(tmp_path)
    folder = tmp_path / "_layer_0" / "_numa_0"
    assert len([*folder.iterdir()]) == 6 * EXPERTS
    for expert in range(EXPERTS):
        for projection in ("gate", "up", "down"):
            ours = experts(method).matrix(expert, projection)
            n, k = ours.shape
            files = {what: folder.glob(f"{begin}_{projection}_{expert}_*Byte_{what}_.kt") for what in ("quant", "scale")}
            quant, scale = (np.fromfile(next(files[what]), np.uint8) for what in ("quant", "scale"))
            one = Matrix("codes", FORMATS[method].rounds.format, ours.shape, ours.codes, factor=np.ones(n, np.float32))
            assert np.array_equal(unpacked(quant, n, k, bits), reference.dequantize(one))
            assert np.array_equal(scale.view(np.float32) * np.float32(unit), ours.factor)
