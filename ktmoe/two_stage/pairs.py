"""Sorted rows as a layer takes them: which expert, row and weight each slot of a token has; and all checks of a Sorting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ktmoe import arrays
from ktmoe.arrays import expect_shape
from ktmoe.errors import InputError
from ktmoe.two_stage.kinds import room_for
from ktmoe.two_stage.sorting import TOKEN_BITS, TOKEN_MASK, UNITS, Sorting


@dataclass(frozen=True)
class Pairs:
    """ids: int64 [tokens, top_k], the expert of a slot, -1 for none; weights: float32 like it, its router weight.

    filled: int64 [pairs], ascending, the sorted rows that are no padding. places: int64 [tokens, top_k], the place in `filled`
    of a slot's row. size: sorted rows, those behind the blocks included. valid: rows of blocks.
    """

    ids: np.ndarray
    weights: np.ndarray
    filled: np.ndarray
    places: np.ndarray
    size: int
    valid: int

    @property
    def rows(self) -> np.ndarray:
        """int64 [tokens, top_k]: the sorted row of each slot, 0 for none."""
        return self.filled[self.places] if self.filled.size else self.places

    @property
    def tokens(self) -> int:
        return len(self.ids)


def pairs_of(sorting: Sorting, expert_mask: np.ndarray) -> Pairs:
    """What a Sorting says, checked. What is behind num_valid_ids[0] rows is not looked at: a GPU need not write it.

    expert_mask: bool [num_experts], which experts the blocks' numbers count.
    Raises InputError, which names the array, the place, what was expected and what was found; OutOfMemoryError for more tokens
    than fit.
    """
    token_ids, weights, experts, valid, tokens = arrays_of(sorting)
    size = len(token_ids)
    unit = _unit(size, len(experts), valid)
    token_ids, weights, experts = token_ids[:valid], weights[:valid], experts[: valid // unit]
    token, slot = token_ids & TOKEN_MASK, token_ids >> TOKEN_BITS
    top_k = _top_k(token_ids, token, slot, tokens)
    row = np.flatnonzero(token < tokens)
    token, slot = token[row], slot[row]
    _once(token_ids[row])
    known = np.flatnonzero(expert_mask)
    if (wrong := np.flatnonzero((experts < 0) | (experts >= len(known)))).size:
        raise InputError(
            f"sorted_expert_ids[{wrong[0]}] must be in [0, {len(known)}), the experts that are not masked, "
            f"found {experts[wrong[0]]}"
        )
    room_for(20 * tokens * top_k, f"a sorting of {tokens} tokens with {top_k} slots")
    ids = np.full((tokens, top_k), -1, np.int64)
    places = np.zeros((tokens, top_k), np.int64)
    of_pair = np.zeros((tokens, top_k), np.float32)
    ids[token, slot] = known[experts[row // unit]]
    places[token, slot] = np.arange(len(row))
    of_pair[token, slot] = weights[row]
    return Pairs(ids, of_pair, row, places, size, valid)


def arrays_of(sorting: Sorting) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    """The first three arrays of a Sorting and both numbers, of the right dtypes and shapes. Raises InputError."""
    if not isinstance(sorting, tuple) or len(sorting) != len(Sorting._fields):
        raise InputError(f"sorting must be Sorting({', '.join(Sorting._fields)}), found {type(sorting).__name__}")
    given = {name: arrays.as_numpy(value, name) for name, value in zip(Sorting._fields, sorting, strict=True)}
    for name, array in given.items():
        dtype = np.float32 if name == "sorted_weights" else np.int32
        if array.dtype != dtype:
            raise InputError(f"{name} must be {np.dtype(dtype)}, found {array.dtype}")
        expect_shape(name, array, (2,) if name == "num_valid_ids" else (None,))
    token_ids, weights, experts, numbers = given.values()
    expect_shape("sorted_weights", weights, token_ids.shape)
    valid, tokens = numbers.tolist()
    if not 0 <= valid <= len(token_ids):
        raise InputError(f"num_valid_ids[0] must be 0 to {len(token_ids)}, the length of sorted_token_ids, found {valid}")
    if not 0 <= tokens <= TOKEN_MASK:
        raise InputError(f"num_valid_ids[1] must be the number of tokens, 0 to {TOKEN_MASK}, found {tokens}")
    return token_ids, weights, experts, valid, tokens


def _unit(size: int, blocks: int, valid: int) -> int:
    """Rows of a block. Where there is one block, num_valid_ids says it."""
    fitting = [unit for unit in UNITS if -(-size // unit) == blocks]
    if not fitting:
        wanted = ", ".join(f"{-(-size // unit)} of {unit} rows" for unit in UNITS)
        raise InputError(
            f"sorted_expert_ids must have an item for each block of the {size} sorted rows: {wanted}; found {blocks}"
        )
    whole = [unit for unit in fitting if valid % unit == 0]
    if not whole:
        raise InputError(f"num_valid_ids[0] must be a multiple of the {fitting[0]} rows of a block, found {valid}")
    return whole[0]


def _top_k(token_ids: np.ndarray, token: np.ndarray, slot: np.ndarray, tokens: int) -> int:
    """Slots of a token: what padding says; without padding, those that occur."""
    if (wrong := np.flatnonzero((token_ids < 0) | (token > tokens))).size:
        at = wrong[0]
        raise InputError(
            f"sorted_token_ids[{at}] must be slot << {TOKEN_BITS} | token, with a token of at most {tokens}, "
            f"found {slot[at]} << {TOKEN_BITS} | {token[at]}"
        )
    padding = token == tokens
    if not padding.any():
        return int(slot.max(initial=-1)) + 1
    top_k = int(slot[padding].max())
    wrong = np.flatnonzero(np.where(padding, slot != top_k, slot >= top_k))
    if wrong.size:
        at = wrong[0]
        raise InputError(
            f"sorted_token_ids[{at}] must be top_k << {TOKEN_BITS} | {tokens}, which is padding and alike everywhere, or have a"
            f" slot below top_k; found {slot[at]} << {TOKEN_BITS} | {token[at]} beside a top_k of {top_k}"
        )
    return top_k


def _once(token_ids: np.ndarray) -> None:
    sorted_ids = np.sort(token_ids)
    if (again := sorted_ids[1:][sorted_ids[1:] == sorted_ids[:-1]]).size:
        slot, token = divmod(int(again[0]), 1 << TOKEN_BITS)
        raise InputError(f"sorted_token_ids must have each pair once, found slot {slot} of token {token} twice")
