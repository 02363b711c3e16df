"""Masks of the experts that are on the GPU, as arrays or torch tensors."""

from __future__ import annotations

import operator
import sys

import numpy as np

from ktmoe import arrays
from ktmoe.errors import InputError


def make(given, num_gpu_experts: int, num_experts: int):
    """A mask of the caller's own kind to change in place."""
    if given is None:
        torch = sys.modules.get("torch")
        mask = np.zeros(num_experts, bool)
        mask[:num_gpu_experts] = True
        # from_numpy: callers build their models under torch.device("cuda"), where torch.zeros would be on the GPU
        return mask if torch is None else torch.from_numpy(mask)
    mask = given.detach().cpu().clone() if arrays.is_torch(given) else np.array(given)
    read(mask, num_experts)
    if num_gpu_experts not in (0, int(mask.sum())):
        raise InputError(
            f"num_gpu_experts must be left out or be what gpu_experts_mask has, {int(mask.sum())}; found {num_gpu_experts}"
        )
    return mask


def read(mask, num_experts: int) -> np.ndarray:
    """The mask as it is now."""
    array = arrays.as_numpy(mask, "gpu_experts_mask")
    if array.dtype != np.bool_ or array.shape != (num_experts,):
        raise InputError(f"gpu_experts_mask must be bool [{num_experts}], found {array.dtype} {list(array.shape)}")
    return array.copy()


def live(mask, num_experts: int) -> np.ndarray:
    """The mask's own memory, uint8 [num_experts]: it says what the mask says, at any time."""
    array = arrays.as_numpy(mask, "gpu_experts_mask")
    read(array, num_experts)
    if not array.flags.c_contiguous:
        raise InputError(f"gpu_experts_mask must be contiguous in a CUDA graph, found strides {array.strides}")
    return array.view(np.uint8)


def generate_gpu_experts_masks(activation_freq, num_gpu_experts: int):
    """Which experts to place on the GPU: the num_gpu_experts most frequent of all layers, of equally frequent ones the first.

    activation_freq: [layers, experts], a numpy array or a torch tensor. Returns bool [layers, experts] of the same kind, on the
    CPU.
    """
    is_tensor = arrays.is_torch(activation_freq)
    array = arrays.as_numpy(activation_freq.detach().cpu().double() if is_tensor else activation_freq, "activation_freq")
    if array.ndim != 2:
        raise InputError(f"activation_freq must have shape [layers, experts], found {list(array.shape)}")
    number = min(max(operator.index(num_gpu_experts), 0), array.size)
    masks = np.zeros(array.size, bool)
    if number:  # the last of the reversed array, so that the first of equal ones win
        masks[array.size - 1 - np.argsort(array.ravel()[::-1], kind="stable")[-number:]] = True
    masks = masks.reshape(array.shape)
    return sys.modules["torch"].from_numpy(masks) if is_tensor else masks
