"""Orders of scale bytes: row by row, or in tiles as AMD's matrix instructions read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ktmoe import arrays
from ktmoe.arrays import A, expect_shape
from ktmoe.errors import InputError
from ktmoe.messages import show
from ktmoe.two_stage.kinds import as_bytes, give, whole

#: Rows and columns of a tile, each as two digits: row = 16 r1 + r0, column = 4 c1 + c0.
_ROWS, _COLUMNS = (2, 16), (2, 4)


@dataclass(frozen=True)
class ScaleOrder:
    """Where the scale of row r and block b of a row stands.

    tiled: whether in tiles of 32 rows and 8 blocks, one after another along b, then along r. Byte of a tile:
    64 (b % 4) + 4 (r % 16) + 2 (b // 4 % 2) + r // 16 % 2. rows: how many of a tile's 32 rows are used, from its first on.
    """

    tiled: bool
    rows: int = 32


#: plain: [rows, blocks]. tiled: what aiter calls an e8m0 shuffle. tiled16: a tile for each 16 rows, as kernels whose blocks
#: have 16 rows write and read it.
SCALE_ORDERS = {"plain": ScaleOrder(False), "tiled": ScaleOrder(True), "tiled16": ScaleOrder(True, 16)}


def checked_order(scale_order: str) -> ScaleOrder:
    """The order of that name. Raises InputError if there is none."""
    if not isinstance(scale_order, str) or scale_order not in SCALE_ORDERS:
        raise InputError(f"scale_order must be one of {', '.join(SCALE_ORDERS)}, found {show(scale_order)}")
    return SCALE_ORDERS[scale_order]


def tile_scales(scales: A, scale_order: str = "tiled") -> A:
    """Plain scales [rows, blocks] in another order, [rows, blocks] rounded up to whole tiles; what is added is 0.

    bytes, of numpy or torch; so is what is returned. Raises InputError.

    Examples:
        >>> tile_scales(np.ones((3, 4), np.uint8)).shape
        (32, 8)
    """
    order = checked_order(scale_order)
    array = as_bytes(scales, "scales")
    expect_shape("scales", array, (None, None))
    return give(tiled(array, order), arrays.is_torch(scales))


def untile_scales(scales: A, rows: int, blocks: int, scale_order: str = "tiled") -> A:
    """The inverse of tile_scales(): the scales of so many rows and blocks, [rows, blocks].

    scales: bytes of whole tiles in any shape; more than are needed are not looked at. Raises InputError if there are too few.

    Examples:
        >>> scales = np.arange(12, dtype=np.uint8).reshape(3, 4)
        >>> np.array_equal(untile_scales(tile_scales(scales), 3, 4), scales)
        True
    """
    order = checked_order(scale_order)
    array = as_bytes(scales, "scales")
    return give(untiled(array, order, whole(rows, "rows"), whole(blocks, "blocks"), "scales"), arrays.is_torch(scales))


def tiled(scales: np.ndarray, order: ScaleOrder) -> np.ndarray:
    """tile_scales() of an array."""
    if not order.tiled:
        return scales
    rows, blocks = scales.shape
    tiles_down, tiles_along = -(-rows // order.rows), -(-blocks // 8)
    padded = np.zeros((tiles_down * order.rows, tiles_along * 8), np.uint8)
    padded[:rows, :blocks] = scales
    whole = np.zeros((tiles_down, 32, tiles_along * 8), np.uint8)
    whole[:, : order.rows] = padded.reshape(tiles_down, order.rows, tiles_along * 8)
    digits = whole.reshape(tiles_down, *_ROWS, tiles_along, *_COLUMNS)
    return np.ascontiguousarray(digits.transpose(0, 3, 5, 2, 4, 1)).reshape(tiles_down * 32, tiles_along * 8)


def untiled(scales: np.ndarray, order: ScaleOrder, rows: int, blocks: int, name: str) -> np.ndarray:
    """untile_scales() of an array; of plain ones, the first rows."""
    if not order.tiled:
        if scales.ndim != 2 or scales.shape[1] != blocks or len(scales) < rows:
            raise InputError(f"{name} must have shape [{rows} or more, {blocks}], found {list(scales.shape)}")
        return scales[:rows]
    tiles_down, tiles_along = -(-rows // order.rows), -(-blocks // 8)
    needed = tiles_down * tiles_along * 256
    if scales.size < needed or scales.size % 256:
        raise InputError(f"{name} must have {needed} bytes or more, tiles of 256, for {rows} rows, found {list(scales.shape)}")
    digits = np.ascontiguousarray(scales).reshape(-1)[:needed].reshape(tiles_down, tiles_along, 4, 16, 2, 2)
    whole = digits.transpose(0, 5, 3, 1, 4, 2).reshape(tiles_down, 32, tiles_along * 8)
    return np.ascontiguousarray(whole[:, : order.rows].reshape(tiles_down * order.rows, tiles_along * 8)[:rows, :blocks])
