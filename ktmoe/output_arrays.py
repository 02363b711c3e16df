"""The arrays that callers have results written into, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from ktmoe import arrays
from ktmoe.arrays import FloatArray, expect_native, expect_shape
from ktmoe.errors import InputError


def checked_output(
    out: Any,
    given: FloatArray,
    shape: tuple[int, ...],
    *,
    name: str = "out",
    of: str = "x",
    float32: bool = False,
    in_place: bool = False,
) -> np.ndarray:
    """The memory of an out, which the messages call `name`. Raises InputError.

    given: what is read meanwhile, which the messages call `of`. out is of its kind, or of float32 where that may be, and has
    this shape; it is C-contiguous, aligned and writeable. It does not overlap what was given; in_place: or it is that.
    """
    like = arrays.view(out, name)
    if like.kind != given.kind and not (float32 and like.array.dtype == np.float32):
        other = ", or float32" if float32 else ""
        raise InputError(f"{name} must be of {of}'s kind, a {given.kind}{other}; found a {like.kind}")
    expect_shape(name, like.array, shape)
    expect_native(name, like.array)
    if np.may_share_memory(like.array, given.array):
        if not in_place or like.array.dtype != given.array.dtype:
            raise InputError(f"{name} must not overlap {of}")
        starts = {array.__array_interface__["data"][0] for array in (like.array, given.array)}
        if len(starts) > 1 or not given.array.flags.c_contiguous:
            raise InputError(f"{name} must be {of} itself or not overlap it; found a partial overlap")
    return like.array
