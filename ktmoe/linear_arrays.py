"""What a call of dense matrices is given, checked, and where its results go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ktmoe import arrays
from ktmoe.arrays import FloatArray, expect_native, expect_shape
from ktmoe.errors import InputError
from ktmoe.messages import show


def checked(x, shape: tuple[int | None, ...], name: str = "x") -> FloatArray:
    """An argument of that shape; None is any size. Raises InputError."""
    given = arrays.view(x, name)
    expect_shape(name, given.array, shape)
    return given


def items_of(value) -> tuple | None:
    """The items of what has some; None for anything else."""
    try:
        return tuple(value)
    except TypeError:
        return None


def target_of(x, given: FloatArray, shape: tuple[int, ...], dtype, out):
    """Where y goes, and what makes of it what is returned: out, checked, or else new memory and an array of x's kind."""
    return new_output(x, given, shape, dtype) if out is None else (_fitting(out, given, shape, dtype), lambda _: out)


def _fitting(out, given: FloatArray, shape: tuple[int, ...], dtype, name: str = "out") -> np.ndarray:
    """The array of an out that y goes into."""
    array = _checked_out(out, given)
    expect_shape(name, array, shape)
    _float32(dtype)
    if dtype is not None and array.dtype != np.float32:
        raise InputError(f"{name} must be of float32, as dtype is; found {arrays.view(out, name).kind}")
    return array


def fitting_each(out, given: FloatArray, shapes: Sequence[tuple[int, ...]], dtype) -> list[np.ndarray]:
    """The same of a sequence, none of which overlaps another one."""
    outs = items_of(out)
    if outs is None or len(outs) != len(shapes):
        raise InputError(f"out must be a sequence of {len(shapes)} arrays, found {show(out)}")
    found = []
    for i, (each, shape) in enumerate(zip(outs, shapes, strict=True)):
        found.append(_fitting(each, given, shape, dtype, f"out[{i}]"))
        if any(np.may_share_memory(found[i], other) for other in found[:i]):
            raise InputError(f"out[{i}] must not overlap those before it")
    return found


def new_output(x, given: FloatArray, shape: tuple[int, ...], dtype):
    """New memory for y, and what makes of it an array of x's kind, or of float32."""
    if dtype is None or given.array.dtype == np.float32:
        _float32(dtype)
        return np.empty(shape, given.array.dtype), given.restore
    _float32(dtype)
    return np.empty(shape, np.float32), arrays.float32_like(x)


def _float32(dtype) -> None:
    if dtype is not None and str(dtype).removeprefix("torch.") not in ("float32", "<class 'numpy.float32'>"):
        raise InputError(f"dtype must be None or float32, found {show(dtype)}")


def _checked_out(out, given: FloatArray, name: str = "x") -> np.ndarray:
    like = arrays.view(out, "out")
    if like.kind != given.kind and like.array.dtype != np.float32:
        raise InputError(f"out must be of {name}'s kind, a {given.kind}, or float32; found a {like.kind}")
    expect_native("out", like.array)
    if np.may_share_memory(like.array, given.array):
        raise InputError(f"out must not overlap {name}")
    return like.array


def gradient_target(like, grads: dict[str, FloatArray], shape: tuple[int, ...], out):
    """target_of() of a gradient. like: the first of grads, as it was given; grads: by the names of the arguments."""
    if out is None:
        return new_output(like, next(iter(grads.values())), shape, None)
    targets = [_checked_out(out, given, name) for name, given in grads.items()]
    expect_shape("out", targets[0], shape)
    return targets[0], lambda _: out
