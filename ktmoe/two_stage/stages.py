"""gemm1() and gemm2(): the two stages of a layer on sorted rows. Together they have the bits of MoELayer.forward()."""

from __future__ import annotations

from typing import Any

import numpy as np

from ktmoe import arrays
from ktmoe.arrays import AnyArray, expect_shape
from ktmoe.batch import checked_mask
from ktmoe.errors import ClosedError, InputError, asking
from ktmoe.layer import MoELayer
from ktmoe.messages import show
from ktmoe.modes import mode_of
from ktmoe.quantization import Rule
from ktmoe.two_stage.kinds import give, room_for
from ktmoe.two_stage.pairs import Pairs, pairs_of
from ktmoe.two_stage.rows import BlockScaled, checked, quantized, values
from ktmoe.two_stage.scales import checked_order, tiled
from ktmoe.two_stage.sorting import Sorting

#: dtypes of y.
DTYPES = {"bfloat16": arrays.BF16, "float32": np.dtype(np.float32)}


def gemm1(layer: MoELayer, x: AnyArray | BlockScaled, sorting: Sorting, scale_order: str = "plain") -> Any:
    """h, the activation of gate and up, of each sorted row: [sorted rows, intermediate].

    layer: its mode says what x and h are rounded to, its expert_mask which experts sorting's numbers count.
    x: [tokens, hidden], bfloat16, uint16 that holds its bits, float32, or a torch CPU tensor of bfloat16 or float32, which is
    rounded as the layer's mode says; or BlockScaled of the mode's format for x, which is taken as it is.
    h is BlockScaled, its scales in scale_order, where the mode rounds h to mxfp4 or mxfp8; else bfloat16. It is a torch tensor
    if x is. Rows of padding, and those behind the blocks, have zeros. A router weight is part of h where the layer's
    router_weight is "down_input" or "expert_input".
    Raises InputError, ClosedError after layer.close(), UnavailableError if the layer's backend has no stages, OutOfMemoryError.

    Examples:
        >>> sorting = moe_sorting(ids, weights, layer.num_experts)
        >>> gemm1(layer, x, sorting).shape == (len(sorting.sorted_token_ids), layer.intermediate)
        True
    """
    packed, mode, mask = _of(layer)
    order = checked_order(scale_order)
    pairs = pairs_of(sorting, mask)
    rounded = isinstance(x, BlockScaled)
    if isinstance(x, BlockScaled):
        blocks = _blocks(x, "x", mode.x, layer)
        torch, given = arrays.is_torch(blocks.codes), values(*checked(blocks, "x", layer.hidden), blocks.format)
        if layer.router_weight == "expert_input":
            raise InputError("x must not be rounded yet, since this layer's router weights multiply it; found BlockScaled")
    else:
        torch, given = arrays.is_torch(x), arrays.view(x, "x").array
    expect_shape("x", given, (pairs.tokens, layer.hidden))
    # rows that a rule rounds stand without padding first
    count, rows = (pairs.size, pairs.rows) if mode.h is None else (len(pairs.filled), pairs.places)
    h = np.zeros((count, layer.intermediate), np.uint16)
    if pairs.filled.size:
        packed.gate_up(arrays.contiguous(given), pairs.ids, pairs.weights, mask.view(np.uint8), rows, h, rounded)
    if mode.h is None:
        return give(h, torch)
    codes, scales = (_spread(array, pairs) for array in quantized(h, mode.h))
    return BlockScaled(give(codes, torch), give(tiled(scales, order), torch), mode.h.target, scale_order)


def gemm2(
    layer: MoELayer, h: AnyArray | BlockScaled, sorting: Sorting, dtype: str = "bfloat16", out: AnyArray | None = None
) -> Any:
    """y [tokens, hidden]: of each token the sum of its rows of h through down, each times its router weight.

    h: what gemm1() gives for this layer, or another kernel's: BlockScaled of the mode's format for h, or bfloat16 where the
    mode rounds no h; [sorted rows, intermediate], or as many rows as num_valid_ids says. Rows of padding are not read.
    dtype: "bfloat16" or "float32". out: written and returned if given, C-contiguous and aligned, [tokens, hidden] of that
    dtype; it must not overlap h. y is a torch tensor if h is. A token without rows gets zeros.
    Sums are in ascending expert, then slot, whatever order the rows have. Router weights are not multiplied where they are part
    of h. Raises as gemm1().

    Examples:
        >>> sorting = moe_sorting(ids, weights, layer.num_experts)
        >>> y = gemm2(layer, gemm1(layer, x, sorting), sorting, dtype="float32")
        >>> np.array_equal(y, layer.forward(x, ids, weights))
        True
    """
    packed, mode, mask = _of(layer)
    pairs = pairs_of(sorting, mask)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, found {show(dtype)}")
    if mode.h is None:
        if isinstance(h, BlockScaled):
            raise InputError(f"h must be bfloat16 in mode {layer.activations!r}, found BlockScaled {show(h.format)}")
        torch, given = arrays.is_torch(h), arrays.view(h, "h").array
        if given.dtype != np.uint16:
            raise InputError(f"h must be bfloat16, found {given.dtype}")
        expect_shape("h", given, (None, layer.intermediate))
        _enough(given, pairs)
        given, rows = arrays.contiguous(given), pairs.rows
    else:
        blocks = _blocks(h, "h", mode.h, layer)
        codes, scales = checked(blocks, "h", layer.intermediate)
        _enough(codes, pairs)
        torch, rows = arrays.is_torch(blocks.codes), pairs.places
        given = values(codes[pairs.filled], scales[pairs.filled], blocks.format)
    shape = pairs.tokens, layer.hidden
    if out is None:
        room_for(pairs.tokens * layer.hidden * DTYPES[dtype].itemsize, f"{layer.name}: y of {pairs.tokens} tokens")
    y = np.empty(shape, DTYPES[dtype]) if out is None else _checked_out(out, shape, dtype, torch, given)
    bits = y if y.dtype == np.float32 else y.view(np.uint16)
    if pairs.filled.size:
        packed.down(given, pairs.ids, pairs.weights, mask.view(np.uint8), rows, bits)
    else:
        bits[...] = 0
    return give(y, torch) if out is None else out


def _of(layer: MoELayer) -> Any:
    """The packed weights, the mode and a copy of the mask, which may change meanwhile."""
    if not isinstance(layer, MoELayer):
        raise InputError(f"layer must be a MoELayer, found {type(layer).__name__}")
    packed = layer.packed  # once: close() may come from another thread
    if packed is None:
        raise ClosedError(f"{layer.name}: a stage after close()")
    if layer.num_shared:
        raise InputError(
            f"{layer.name}: layer must have no shared experts, since a Sorting does not have them; found {layer.num_shared}; "
            "make it without them, and a MoELayer of their own beside"
        )
    with asking(layer.backend, layer.name):
        stages = packed.stages()
    return stages, mode_of(layer.activations), checked_mask(layer.spec, layer.expert_mask).copy()


def _blocks(rows: AnyArray | BlockScaled, name: str, rule: Rule | None, layer: MoELayer) -> BlockScaled:
    """The rows as they are. Raises InputError if they are not of the format that the layer's mode makes of x or h."""
    wanted = f"BlockScaled {rule.target!r}" if rule else "bfloat16"
    if not rule or not isinstance(rows, BlockScaled) or rows.format != rule.target:
        found = f"BlockScaled {show(rows.format)}" if isinstance(rows, BlockScaled) else type(rows).__name__
        raise InputError(f"{name} must be {wanted} in mode {layer.activations!r}, found {found}")
    return rows


def _enough(h: np.ndarray, pairs: Pairs) -> None:
    if len(h) < pairs.valid:
        raise InputError(f"h must have the {pairs.valid} rows that num_valid_ids says, or more, found {len(h)}")


def _spread(rows: np.ndarray, pairs: Pairs) -> np.ndarray:
    """Rows of pairs at their places among the sorted rows; others are zeros."""
    spread = np.zeros((pairs.size, rows.shape[1]), rows.dtype)
    spread[pairs.filled] = rows
    return spread


def _checked_out(out: Any, shape: tuple[int, int], dtype: str, torch: bool, h: np.ndarray) -> np.ndarray:
    array = arrays.view(out, "out").array
    if array.dtype == np.uint16:
        array = array.view(arrays.BF16)
    if arrays.is_torch(out) != torch or array.dtype != DTYPES[dtype]:
        wanted = f"{'a torch tensor' if torch else 'an array'} of {dtype}"
        raise InputError(f"out must be {wanted}, found {type(out).__name__} of {array.dtype}")
    expect_shape("out", array, shape)
    arrays.expect_native("out", array)
    if np.may_share_memory(array, h):
        raise InputError("out must not overlap h: it is written before all of h has been read")
    return array
