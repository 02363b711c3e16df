"""Where a caller's arrays are: numpy arrays and torch CPU tensors; CUDA's are in cuda.py. torch is never imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ktmoe import arrays
from ktmoe.compat.buffers import Buffers
from ktmoe.errors import InputError

_TORCH_DTYPES = {np.uint16: "bfloat16", np.int64: "int64", np.float32: "float32"}


class Side(Protocol):
    """Moves a call's arrays to host memory and back. x: [..., hidden]. There is one for each place: it may keep buffers."""

    def allocate(self, shape: tuple[int, ...], dtype: type) -> tuple[np.ndarray, object]:
        """Host memory as an array, and what the side itself works with. uint16 stands for bfloat16 bits."""

    def bring(self, buffers: Buffers, x, ids, weights, stream) -> Callable[[], None]:
        """Begin to copy the arguments into the buffers; what is returned waits for that, and until buffers.y may be written."""

    def hand_back(self, buffers: Buffers, dtype, stream):
        """buffers.y as x's kind, of x's dtype, [tokens, hidden]."""

    def capturing(self, stream):
        """The captures.CapturingStream where this stream's work is captured in a CUDA graph, or None."""


class Numpy:
    """numpy arrays; x: bfloat16 (ml_dtypes), uint16 holding bfloat16 bits, or floats, rounded to bfloat16."""

    def allocate(self, shape, dtype):
        array = np.empty(shape, dtype)
        return array, array

    def bring(self, buffers, x, ids, weights, stream):
        if x.dtype != np.uint16:
            expect_floats("hidden_states", x)
            x = x.astype(arrays.BF16, copy=False).view(np.uint16)
        ids, weights = arrays.as_numpy(ids, "topk_ids"), arrays.as_numpy(weights, "topk_weights")
        if ids.dtype.kind not in "iu":
            raise InputError(f"topk_ids must be integers, found {ids.dtype}")
        expect_floats("topk_weights", weights)
        buffers.x[...] = x.reshape(buffers.x.shape)
        buffers.ids[...] = ids
        buffers.weights[...] = weights.astype(np.float32, copy=False)
        return lambda: None

    def hand_back(self, buffers, dtype, stream):
        y = buffers.y
        if not buffers.captured:  # the caller's from now on
            buffers.y = buffers.y_owner = None
        return y if dtype == np.uint16 else y.view(arrays.BF16).astype(dtype, copy=False)

    def capturing(self, stream):
        return None


def expect_floats(name: str, array: np.ndarray) -> None:
    if array.dtype.kind != "f" and array.dtype != arrays.BF16:
        raise InputError(f"{name} must be floating-point numbers, found {array.dtype}")


class TorchHost:
    """torch CPU tensors of any floating dtype, rounded to bfloat16."""

    pinned = False

    @property
    def torch(self):
        return sys.modules["torch"]

    def allocate(self, shape, dtype):
        torch = self.torch
        if torch.is_inference_mode_enabled():  # whose tensors could not be filled again outside of it
            with torch.inference_mode(False):
                return self.allocate(shape, dtype)
        # the device is named, since callers may be in torch.device("cuda")
        tensor = torch.empty(shape, dtype=getattr(torch, _TORCH_DTYPES[dtype]), device="cpu", pin_memory=self.pinned)
        if dtype == np.uint16:
            return tensor.view(torch.int16).numpy().view(np.uint16), tensor
        return tensor.numpy(), tensor

    def bring(self, buffers, x, ids, weights, stream):
        self.copy(buffers, x, ids, weights)
        return lambda: None

    def copy(self, buffers, x, ids, weights):
        """Copy the arguments into the buffers, and wait for that only where it is needed."""
        for name, value, floating in (("hidden_states", x, True), ("topk_ids", ids, False), ("topk_weights", weights, True)):
            if not arrays.is_torch(value) or value.is_floating_point() != floating:
                found = value.dtype if arrays.is_torch(value) else type(value).__name__
                raise InputError(f"{name} must be a torch tensor of {'floats' if floating else 'integers'}, found {found}")
        buffers.x_owner.copy_(x.detach().reshape(buffers.x.shape), non_blocking=True)
        buffers.ids_owner.copy_(ids.detach(), non_blocking=True)
        buffers.weights_owner.copy_(weights.detach(), non_blocking=True)

    def hand_back(self, buffers, dtype, stream):
        y = buffers.y_owner
        if not buffers.captured:
            buffers.y = buffers.y_owner = None
        return y.to(dtype)

    def capturing(self, stream):
        return None
