"""What one call of a layer is given, checked: x, expert ids and router weights, and where the output goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ktmoe import arrays
from ktmoe.arrays import expect_shape
from ktmoe.errors import InputError
from ktmoe.experts import ExpertSpec
from ktmoe.messages import show
from ktmoe.output_arrays import checked_output


@dataclass(frozen=True)
class Batch:
    """x: [tokens, hidden]. ids: integers [tokens, top_k]. weights: float32 like ids. mask: bool [num_experts], the layer's own.
    num_shared: experts that every token has besides. shared_weights: theirs, float32 [tokens, num_shared]; None: all 1.

    All are views of what was given, of any layout.
    """

    x: arrays.FloatArray
    ids: np.ndarray
    weights: np.ndarray
    mask: np.ndarray
    num_shared: int = 0
    shared_weights: np.ndarray | None = None

    @property
    def slots(self) -> int:
        """Pairs of a token and an id, or a shared expert."""
        return self.ids.size + len(self.ids) * self.num_shared

    def contiguous(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """x as uint16 or float32, ids as int64, weights, and the mask as uint8: as native code reads them, copied only if need
        be. Shared experts follow the others in all three."""
        if self.num_shared:
            return arrays.contiguous(self.x.array), *self._with_shared()
        return (
            arrays.contiguous(self.x.array),
            arrays.contiguous(self.ids, np.int64),
            arrays.contiguous(self.weights),
            arrays.contiguous(self.mask).view(np.uint8),
        )

    def copied(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """contiguous(), in memory of its own."""
        x = np.array(self.x.array, order="C")
        if self.num_shared:
            return x, *self._with_shared()
        return (
            x,
            np.array(self.ids, np.int64, order="C"),
            np.array(self.weights, order="C"),
            np.array(self.mask).view(np.uint8),
        )

    def _with_shared(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """New ids, weights and mask. Shared expert i is number num_experts + i, which an id that was given does not reach."""
        (tokens, top_k), num_experts = self.ids.shape, len(self.mask)
        ids = np.empty((tokens, top_k + self.num_shared), np.int64)
        weights = np.empty(ids.shape, np.float32)
        mask = np.empty(num_experts + self.num_shared, np.uint8)
        ids.fill(-1)
        np.copyto(ids[:, :top_k], self.ids, "same_kind", self.ids < num_experts)
        ids[:, top_k:] = np.arange(num_experts, len(mask))
        weights.fill(1)
        weights[:, :top_k] = self.weights
        if self.shared_weights is not None:
            weights[:, top_k:] = self.shared_weights
        mask.fill(1)
        mask[:num_experts] = self.mask
        return ids, weights, mask


def checked_batch(
    spec: ExpertSpec,
    mask: np.ndarray,
    x: Any,
    expert_ids: Any,
    expert_weights: Any,
    num_shared: int = 0,
    shared_weights: Any = None,
) -> Batch:
    """The arguments of a call as MoELayer.forward() takes them. Raises InputError, which names the argument.

    spec: the layer's. mask: its expert_mask. num_shared: of shared experts.
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
    if shared_weights is not None:
        shared_weights = _checked_shared(shared_weights, (len(ids), num_shared))
    return Batch(given, ids, weights, checked_mask(spec, mask), num_shared, shared_weights)


def checked_out(out: Any, batch: Batch, float32: bool = False) -> np.ndarray:
    """Where the output is written: out's memory, or new memory where it is None. float32: out may be of that. Raises
    InputError."""
    if out is None:
        return np.empty(batch.x.array.shape, batch.x.array.dtype)
    target = checked_output(out, batch.x, batch.x.array.shape, in_place=True, float32=float32)
    for name, array in (("expert_ids", batch.ids), ("expert_weights", batch.weights), ("expert_mask", batch.mask)):
        if np.may_share_memory(target, array):
            raise InputError(f"out must not overlap {name}: it is written before all of them have been read")
    if batch.shared_weights is not None and np.may_share_memory(target, batch.shared_weights):
        raise InputError("out must not overlap shared_weights: it is written in the same call")
    return target


def checked_mask(spec: ExpertSpec, mask: np.ndarray) -> np.ndarray:
    """A layer's expert_mask. Raises InputError if somebody has set it to anything but bool [num_experts]."""
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (spec.num_experts,):
        found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise InputError(f"expert_mask must be a bool array [{spec.num_experts}], found {found}")
    return mask


def _checked_shared(shared_weights: Any, shape: tuple[int, int]) -> np.ndarray:
    if not shape[1]:
        raise InputError(f"shared_weights must be None for a layer without shared experts, found {show(shared_weights)}")
    weights = arrays.as_numpy(shared_weights, "shared_weights")
    if weights.dtype != np.float32:
        raise InputError(f"shared_weights must be float32, found {weights.dtype}")
    expect_shape("shared_weights", weights, shape)
    return weights
