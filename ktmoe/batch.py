"""What one call of a layer is given, checked: x, expert ids and router weights, and where the output goes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ktmoe import arrays
from ktmoe.arrays import expect_shape
from ktmoe.errors import InputError
from ktmoe.experts import ExpertSpec


@dataclass(frozen=True)
class Batch:
    """x: [tokens, hidden]. ids: integers [tokens, top_k]. weights: float32 like ids. mask: bool [num_experts], the layer's own.

    All are views of what was given, of any layout.
    """

    x: arrays.FloatArray
    ids: np.ndarray
    weights: np.ndarray
    mask: np.ndarray

    def contiguous(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """x as uint16 or float32, ids as int64, weights, and the mask as uint8: as native code reads them, copied only if need
        be."""
        return (
            arrays.contiguous(self.x.array),
            arrays.contiguous(self.ids, np.int64),
            arrays.contiguous(self.weights),
            arrays.contiguous(self.mask).view(np.uint8),
        )

    def copied(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """contiguous(), in memory of its own."""
        return (
            np.array(self.x.array, order="C"),
            np.array(self.ids, np.int64, order="C"),
            np.array(self.weights, order="C"),
            np.array(self.mask).view(np.uint8),
        )


def checked_batch(spec: ExpertSpec, mask: np.ndarray, x, expert_ids, expert_weights) -> Batch:
    """The arguments of a call as MoELayer.forward() takes them. Raises InputError, which names the argument.

    spec: the layer's. mask: its expert_mask.
    """
    given = arrays.view(x, "x")
    expect_shape("x", given.array, (None, spec.hidden))
    ids = arrays.as_numpy(expert_ids, "expert_ids")
    if ids.dtype.kind not in "iu":
        raise InputError(f"expert_ids must be integers, found {ids.dtype}")
    expect_shape("expert_ids", ids, (given.array.shape[0], None))
    weights = arrays.as_numpy(expert_weights, "expert_weights")
    if weights.dtype != np.float32:
        raise InputError(f"expert_weights must be float32, found {weights.dtype}")
    expect_shape("expert_weights", weights, ids.shape)
    return Batch(given, ids, weights, checked_mask(spec, mask))


def checked_out(out, batch: Batch) -> np.ndarray:
    """Where the output is written: out's memory, or new memory where it is None. Raises InputError."""
    if out is None:
        return np.empty(batch.x.array.shape, batch.x.array.dtype)
    target = _checked_out(out, batch.x)
    for name, array in (("expert_ids", batch.ids), ("expert_weights", batch.weights), ("expert_mask", batch.mask)):
        if np.may_share_memory(target, array):
            raise InputError(f"out must not overlap {name}: it is written before all of them have been read")
    return target


def checked_mask(spec: ExpertSpec, mask: np.ndarray) -> np.ndarray:
    """A layer's expert_mask. Raises InputError if somebody has set it to anything but bool [num_experts]."""
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (spec.num_experts,):
        found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise InputError(f"expert_mask must be a bool array [{spec.num_experts}], found {found}")
    return mask


def _checked_out(out, given: arrays.FloatArray) -> np.ndarray:
    like = arrays.view(out, "out")
    if like.kind != given.kind:
        raise InputError(f"out must be of x's kind, a {given.kind}; found a {like.kind}")
    expect_shape("out", like.array, given.array.shape)
    arrays.expect_native("out", like.array)
    starts = {array.__array_interface__["data"][0] for array in (like.array, given.array)}
    same = len(starts) == 1 and given.array.flags.c_contiguous
    if not same and np.may_share_memory(like.array, given.array):
        raise InputError("out must be x itself or not overlap it; found a partial overlap")
    return like.array
