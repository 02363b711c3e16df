"""What a call of dense matrices is given, checked, and where its results go."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ktmoe import arrays
from ktmoe.arrays import FloatArray, expect_native, expect_shape
from ktmoe.errors import InputError
from ktmoe.messages import show
from ktmoe.output_arrays import checked_output


def checked(x: Any, shape: tuple[int | None, ...], name: str = "x") -> FloatArray:
    """An argument of that shape; None is any size. Raises InputError."""
    given = arrays.view(x, name)
    expect_shape(name, given.array, shape)
    return given


def items_of(value: Any) -> Any:
    """The items of what has some; None for anything else."""
    try:
        return tuple(value)
    except TypeError:
        return None


def target_of(x: Any, given: FloatArray, shape: tuple[int, ...], dtype: Any, out: Any) -> Any:
    """Where y goes, and what makes of it what is returned: out, checked, or else new memory and an array of x's kind."""
    return new_output(x, given, shape, dtype) if out is None else (_fitting(out, given, shape, dtype), lambda _: out)


def _fitting(out: Any, given: FloatArray, shape: tuple[int, ...], dtype: Any, name: str = "out") -> np.ndarray:
    """The array of an out that y goes into."""
    wide = _is_float32(dtype)
    array = checked_output(out, given, shape, name=name, float32=True)
    if wide and array.dtype != np.float32:
        raise InputError(f"{name} must be of float32, as dtype is; found {arrays.view(out, name).kind}")
    return array


def fitting_each(out: Any, given: FloatArray, shapes: Sequence[tuple[int, ...]], dtype: Any) -> list[np.ndarray]:
    """The same of a sequence, whose arrays have one dtype, and none of which overlaps another one."""
    outs = items_of(out)
    if outs is None or len(outs) != len(shapes):
        raise InputError(f"out must be a sequence of {len(shapes)} arrays, found {show(out)}")
    found = []
    for i, (each, shape) in enumerate(zip(outs, shapes, strict=True)):
        found.append(_fitting(each, given, shape, dtype, f"out[{i}]"))
        if found[i].dtype != found[0].dtype:
            first, own = arrays.view(outs[0], "out[0]").kind, arrays.view(each, f"out[{i}]").kind
            raise InputError(f"out[{i}] must be of out[0]'s dtype, a {first}; found a {own}")
        if any(np.may_share_memory(found[i], other) for other in found[:i]):
            raise InputError(f"out[{i}] must not overlap those before it")
    return found


def new_output(x: Any, given: FloatArray, shape: tuple[int, ...], dtype: Any) -> Any:
    """New memory for y, and what makes of it an array of x's kind, or of float32."""
    if _is_float32(dtype) and given.array.dtype != np.float32:
        return np.empty(shape, np.float32), arrays.float32_like(x)
    return np.empty(shape, given.array.dtype), given.restore


def checked_ids(ids: Any, n: int) -> np.ndarray:
    """Numbers of rows of a matrix that has n, as int64, C-contiguous, in memory of their own: nobody changes them after this.

    Raises InputError.
    """
    given = arrays.as_numpy(ids, "ids")
    if given.dtype.kind not in "iu":
        raise InputError(f"ids must be integers, found {given.dtype}")
    expect_shape("ids", given, (None,))
    copy = np.array(given, np.int64, order="C")
    if wrong := np.flatnonzero((copy < 0) | (copy >= n))[:1].tolist():
        raise InputError(f"ids must be in [0, {n}), found {given[wrong[0]]} at {wrong}")
    return copy


def rows_target(ids: Any, shape: tuple[int, int], dtype: Any, out: Any) -> Any:
    """Where rows go, uint16 or float32, and what makes of it what is returned: out, or an array of ids' library."""
    wide = _is_float32(dtype)
    if out is None:
        like = arrays.float32_like if wide else arrays.bfloat16_like
        return np.empty(shape, np.float32 if wide else np.uint16), like(ids)
    given = arrays.view(out, "out")
    if arrays.is_torch(ids) != arrays.is_torch(out):
        wanted = "a torch tensor" if arrays.is_torch(ids) else "a numpy array"
        raise InputError(f"out must be {wanted}, as ids are; found a {given.kind}")
    if wide and given.array.dtype != np.float32:
        raise InputError(f"out must be of float32, as dtype is; found a {given.kind}")
    expect_shape("out", given.array, shape)
    expect_native("out", given.array)
    return given.array, lambda _: out


def _is_float32(dtype: Any) -> bool:
    """Whether a call asks for float32, by numpy's dtype or torch's; None does not. Raises InputError for any other."""
    if dtype is None:
        return False
    torch = sys.modules.get("torch")
    if torch is not None and dtype is torch.float32:
        return True
    try:
        if isinstance(dtype, type | str | np.dtype) and np.dtype(dtype) == np.float32:
            return True
    except (TypeError, ValueError, SyntaxError):  # what numpy makes of other types and words
        pass
    raise InputError(f"dtype must be None or float32, found {show(dtype)}")


def gradient_target(like: Any, grads: dict[str, FloatArray], shape: tuple[int, ...], out: Any) -> Any:
    """target_of() of a gradient. like: the first of grads, as it was given; grads: by the names of the arguments."""
    if out is None:
        return new_output(like, next(iter(grads.values())), shape, None)
    targets = [checked_output(out, given, shape, of=name, float32=True) for name, given in grads.items()]
    return targets[0], lambda _: out
