"""Tensors on the stand-in's device, in pinned memory, and in memory of numpy's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import runtime as kernels


@dataclass(frozen=True)
class Dtype:
    name: str
    numpy: type


bfloat16, int16, int32 = Dtype("bfloat16", np.uint16), Dtype("int16", np.int16), Dtype("int32", np.int32)
int64, float32, bool_ = Dtype("int64", np.int64), Dtype("float32", np.float32), Dtype("bool", np.bool_)


@dataclass(frozen=True)
class Device:
    type: str
    index: int | None = None


#: Kernels that convert, by the dtypes from and to.
CONVERSIONS = {
    (int32, int64): kernels.WIDEN_INT32,
    (bfloat16, float32): kernels.WIDEN_BF16,
    (float32, bfloat16): kernels.NARROW_FLOAT32,
}


class Tensor:
    """array: over the tensor's memory, wherever that is. Who reads a tensor of the device by it has waited for the streams."""

    def __init__(self, torch, array: np.ndarray, dtype: Dtype, device: Device, pinned: bool = False):
        self.torch, self.array, self.dtype, self.device, self.pinned = torch, array, dtype, device, pinned

    shape = property(lambda self: self.array.shape)
    ndim = property(lambda self: self.array.ndim)
    is_cuda = property(lambda self: self.device.type == "cuda")

    def detach(self) -> Tensor:
        return self

    def reshape(self, *shape) -> Tensor:
        return Tensor(self.torch, self.array.reshape(*shape), self.dtype, self.device, self.pinned)

    def is_floating_point(self) -> bool:
        return self.dtype in (bfloat16, float32)

    def view(self, dtype: Dtype) -> Tensor:
        return Tensor(self.torch, self.array.view(dtype.numpy), dtype, self.device, self.pinned)

    def numpy(self) -> np.ndarray:
        assert self.device.type == "cpu", "torch cannot make an array of CUDA memory"
        return self.array

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy as torch does: it waits unless the host's memory is pinned."""
        if source.dtype != self.dtype:
            assert source.is_cuda, "some versions of torch convert on the host, before the copy and not in a graph"
            source = source.to(self.dtype)
        for tensor in (self, source):
            if not tensor.is_cuda:
                assert non_blocking, "this waits for the copy"
                assert tensor.pinned, "torch would wait for a copy from memory that is not pinned"
            assert tensor.array.flags.c_contiguous
        addresses = self.array.ctypes.data, source.array.ctypes.data
        self.torch.runtime.call(
            "cudaMemcpyAsync", *addresses, self.array.nbytes, 4, self.torch.cuda.current_stream().cuda_stream
        )
        return self

    # On the device

    def to(self, dtype: Dtype) -> Tensor:
        if dtype == self.dtype:
            return self
        made = self.torch.empty(self.shape, dtype=dtype, device=self.device)
        return self.torch.launch(CONVERSIONS[self.dtype, dtype], made, self)

    def __add__(self, other: Tensor) -> Tensor:
        return self.torch.launch(kernels.ADD_BF16, self.torch.empty_like(self), self, other)

    def __neg__(self) -> Tensor:
        return self.torch.launch(kernels.NEGATE_BF16, self.torch.empty_like(self), self)

    def set_(self, array: np.ndarray) -> None:
        """Put an array's numbers there in the current stream, as the copy of a pinned tensor."""
        pinned = self.torch.empty(self.shape, dtype=self.dtype, pin_memory=True)
        pinned.array[...] = array.view(self.array.dtype)
        self.copy_(pinned, non_blocking=True)
