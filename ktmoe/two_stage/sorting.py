"""moe_sorting(): which rows each expert gets, in blocks of one expert, as GPU kernels take it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ktmoe import arrays
from ktmoe.arrays import AnyArray, expect_shape
from ktmoe.errors import InputError
from ktmoe.experts import SIZE_LIMIT
from ktmoe.messages import show
from ktmoe.two_stage.kinds import give, integers, room_for, whole

#: Rows of a block.
UNITS = (16, 32, 64, 128)
#: Bits of the token in an item of sorted_token_ids. The slot is above them.
TOKEN_BITS = 24
TOKEN_MASK = (1 << TOKEN_BITS) - 1
#: The most slots of a token: (top_k << TOKEN_BITS) has to be an int32 number.
MOST_SLOTS = 127


class Sorting(NamedTuple):
    """Pairs of token and slot by expert. Arrays of numpy, or tensors of torch.

    sorted_token_ids: int32 [capacity], slot << 24 | token; at padding top_k << 24 | tokens.
    sorted_weights: float32 [capacity], the router weight of each pair; 0 at padding.
    sorted_expert_ids: int32 [blocks], the expert of each block of `unit` rows, counted without masked experts; -1: unused.
    num_valid_ids: int32 [2]: rows of the blocks that are used, and tokens.

    Examples:
        >>> sorting = moe_sorting(np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32), num_experts=4, unit=16)
        >>> sorting.sorted_expert_ids[:3], sorting.num_valid_ids
        (array([ 0,  1, -1], dtype=int32), array([32,  1], dtype=int32))
    """

    sorted_token_ids: Any
    sorted_weights: Any
    sorted_expert_ids: Any
    num_valid_ids: Any


def capacity(tokens: int, top_k: int, num_experts: int, unit: int) -> int:
    """Rows that are enough for every routing: tokens * top_k + num_experts * unit - top_k.

    Each expert that is used has at most unit - 1 rows of padding. A token with more slots than there are experts repeats one;
    then num_experts is what is subtracted.

    Examples:
        >>> capacity(tokens=1, top_k=2, num_experts=4, unit=16)
        64
    """
    return tokens * top_k + num_experts * unit - min(top_k, num_experts)


def moe_sorting(
    topk_ids: AnyArray, topk_weights: AnyArray, num_experts: int, unit: int = 32, expert_mask: AnyArray | None = None
) -> Sorting:
    """Sort pairs of token and slot by expert, and fill each expert's last block of `unit` rows with padding.

    topk_ids: int32 [tokens, top_k], in [0, num_experts); a token may have an expert twice. topk_weights: float32 like it.
    unit: one of UNITS. expert_mask: bool, or integers 0 and 1, [num_experts]; a masked expert's pairs are left out, and the
    experts behind it count one less.
    Experts ascend. An expert without pairs has no block. Its pairs are in ascending token, then slot.
    The arrays are torch tensors if topk_ids is one. Raises InputError, which names the argument, and the token and slot of a
    bad id; OutOfMemoryError if the rows do not fit.

    Examples:
        >>> sorting = moe_sorting(np.array([[2, 0]], np.int32), np.array([[0.25, 0.75]], np.float32), num_experts=4, unit=16)
        >>> sorting.sorted_weights[[0, 16]]
        array([0.75, 0.25], dtype=float32)
    """
    ids = integers(topk_ids, "topk_ids")
    expect_shape("topk_ids", ids, (None, None))
    weights = arrays.as_numpy(topk_weights, "topk_weights")
    if weights.dtype != np.float32:
        raise InputError(f"topk_weights must be float32, found {weights.dtype}")
    expect_shape("topk_weights", weights, ids.shape)
    experts = whole(num_experts, "num_experts", 1, SIZE_LIMIT)
    if not isinstance(unit, int | np.integer) or unit not in UNITS:
        raise InputError(f"unit must be one of {UNITS}, found {show(unit)}")
    unit = int(unit)
    tokens, top_k = ids.shape
    if tokens > TOKEN_MASK or top_k > MOST_SLOTS:
        raise InputError(f"topk_ids must have at most {TOKEN_MASK} tokens and {MOST_SLOTS} slots, found {list(ids.shape)}")
    size = capacity(tokens, top_k, experts, unit)
    if size >= 2**31:
        raise InputError(f"the sorted rows must be fewer than 2^31, found {size} of {experts} experts and {ids.shape} ids")
    # of a row 8 bytes, of a pair and of an expert some arrays of int64
    room_for(8 * size + 48 * (ids.size + experts), f"sorting {list(ids.shape)} ids of {experts} experts into {size} rows")
    enabled = _mask(expert_mask, experts)
    if (wrong := np.argwhere((ids < 0) | (ids >= experts))).size:
        token, slot = wrong[0].tolist()
        raise InputError(f"topk_ids: token {token} has id {ids[token, slot]} in slot {slot}; expected 0 to {experts - 1}")

    token_ids = np.full(size, top_k << TOKEN_BITS | tokens, np.int32)
    row_weights = np.zeros(size, np.float32)
    block_experts = np.full(-(-size // unit), -1, np.int32)

    pairs = np.flatnonzero(enabled[ids])  # in ascending token, then slot
    of_pair = ids.reshape(-1)[pairs]
    pairs = pairs[np.argsort(of_pair, kind="stable")]
    counts = np.bincount(of_pair, minlength=experts)
    blocks = -(-counts // unit)
    used = np.flatnonzero(blocks)
    first_row = (np.cumsum(blocks) - blocks) * unit
    first_pair = np.cumsum(counts) - counts
    rows = np.arange(len(pairs)) + np.repeat(first_row - first_pair, counts)
    token, slot = np.divmod(pairs, max(top_k, 1))
    token_ids[rows] = slot << TOKEN_BITS | token
    row_weights[rows] = weights.reshape(-1)[pairs]
    local = np.cumsum(enabled) - 1
    block_experts[: blocks.sum()] = np.repeat(local[used], blocks[used])
    valid = np.array([blocks.sum() * unit, tokens], np.int32)

    torch = arrays.is_torch(topk_ids)
    return Sorting(*(give(array, torch) for array in (token_ids, row_weights, block_experts, valid)))


def _mask(expert_mask: Any, experts: int) -> np.ndarray:
    if expert_mask is None:
        return np.ones(experts, bool)
    mask = arrays.as_numpy(expert_mask, "expert_mask")
    expect_shape("expert_mask", mask, (experts,))
    if mask.dtype != np.bool_ and (mask.dtype.kind not in "iu" or ((mask != 0) & (mask != 1)).any()):
        raise InputError(f"expert_mask must be bool, or integers 0 and 1, found {mask.dtype} {show(mask)}")
    return mask.astype(bool)
