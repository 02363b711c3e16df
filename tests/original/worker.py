"""worker.py REQUEST.npz ANSWER.npz: drives kt-kernel by a list of steps, in an environment that has it and no CUDA.

Run by original.py, which has the steps' meaning. Needs kt-kernel, torch and numpy, and nothing of ktmoe.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

import kt_kernel
import numpy as np
import torch
from kt_kernel import kt_kernel_ext
from kt_kernel.sft import weights as sft_weights

PROJECTIONS = ("gate", "up", "down")
ALIGNMENT = 64  # of buffers, as CUDA's pinned ones have: BF16 is exported by stores that need it
#: Bytes of a buffer that malloc always maps by itself, at an address above 2**31.
MAPPED = 1 << 26


def without_cuda() -> None:
    """Let kt-kernel's tasks go to its queue at once and not to a stream; and nothing is pinned, which changes no value."""
    os.environ["KT_FORCE_SYNC_SUBMIT"] = "1"
    for name in ("zeros", "full", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))


def unpinned(make):
    def made(*arguments, pin_memory=False, **others):
        tensor = make(*arguments, **others)
        return far(tensor) if pin_memory else tensor

    return made


def far(tensor: torch.Tensor) -> torch.Tensor:
    """The same at an address above 2**31, where pinned memory is, too. kt-kernel takes a mask's address for a number of experts
    if it fits into an int, and so it does on Linux 6.18, in the heap of a Python that is no position-independent executable.
    """
    place = torch.empty(MAPPED, dtype=torch.uint8)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return place.copy_(tensor)


def buffer(size: int) -> np.ndarray:
    """Bytes, all 0xaa."""
    raw = np.full(size + ALIGNMENT, 0xAA, np.uint8)
    return raw[-raw.ctypes.data % ALIGNMENT :][:size]


def pointers(arrays) -> list[int]:
    return [array.ctypes.data for array in arrays]


def tensor(array: np.ndarray) -> torch.Tensor:
    """uint16 is bfloat16 bits."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def bits(y: torch.Tensor) -> np.ndarray:
    """A copy of bfloat16 bits, uint16."""
    return y.view(torch.int16).numpy().view(np.uint16).copy()


class Session:
    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays, self.answer, self.layers, self.pools = arrays, {}, {}, {}

    def pool(self, shards: int):
        """One of two threads for each shard; it is never given back, as its destructor may hang."""
        if shards not in self.pools:
            config = kt_kernel_ext.WorkerPoolConfig()
            config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = shards, [0] * shards, [2] * shards
            self.pools[shards] = kt_kernel_ext.CPUInfer(config)
        return self.pools[shards]

    def classes(self, out: str) -> None:
        self.answer[out] = np.array([name for name in dir(kt_kernel_ext.moe) if name.endswith("_MOE")])

    def layer(
        self, name, kind, sizes, most_tokens, quantization, mask, logical, shards=1, limit=0.0, alpha=0.0, rounded=None
    ) -> None:
        """sizes: experts, experts of a token, hidden, intermediate. quantization: what quant_config says.

        rounded: None, or a folder: codes are bfloat16, which the class rounds when it loads them, and saves there.
        """
        a, cpu = self.arrays, self.pool(shards)
        on_gpu, logical = far(torch.from_numpy(a[mask])), torch.from_numpy(a[logical])
        config = kt_kernel_ext.moe.MOEConfig(*sizes, on_gpu.data_ptr())
        config.layer_idx, config.pool, config.max_len = 0, cpu.backend_, most_tokens
        config.swiglu_limit, config.swiglu_alpha = limit, alpha
        for projection in PROJECTIONS:
            codes, scales = (a.get(f"{projection} {what}") for what in ("codes", "scales"))
            if rounded is not None:
                setattr(config, f"{projection}_proj", codes.ctypes.data)
                continue
            setattr(config, f"{projection}_projs", [pointers(codes)])
            setattr(config, f"{projection}_scales", [[0] * len(codes) if scales is None else pointers(scales)])
        if rounded is not None:
            config.save, config.load, config.path = True, False, rounded
        for key, value in quantization.items():
            setattr(config.quant_config, key, value)
        config.quant_config.zero_point = False
        moe = getattr(kt_kernel_ext.moe, kind)(config)
        cpu.submit(moe.load_weights_task(logical.data_ptr()))
        cpu.sync()
        self.layers[name] = cpu, moe, on_gpu, logical

    def forward(self, layer, x, ids, weights, out, before=None) -> None:
        """before: bfloat16 bits in the output buffer, to which the result is added."""
        cpu, moe, *_ = self.layers[layer]
        x, ids, weights = (self.arrays[name] for name in (x, ids, weights))
        y = self.arrays[before].copy() if before else np.zeros_like(x)
        tokens = np.array([len(x)], np.int32)
        addresses = pointers([ids, weights, x, y])
        cpu.submit(moe.forward_task(tokens.ctypes.data, ids.shape[1], *addresses, before is not None))
        cpu.sync()
        self.answer[out] = y

    def mask(self, layer, mask) -> None:
        self.layers[layer][2].copy_(torch.from_numpy(self.arrays[mask]))

    def export(self, layer, expert, parts, sizes, out) -> None:
        """sizes: of the four buffers of a part, in bytes."""
        owner = self.layers[layer]
        buffers = [[buffer(size) for _ in range(parts)] for size in sizes]
        arguments = [parts, expert, *(pointers(part) for part in buffers)]
        if isinstance(owner, tuple):
            owner[0].submit(owner[1].write_weight_scale_to_buffer_task(*arguments))
            owner[0].sync()
        else:
            owner.submit_write_weight_scale_to_buffer(*arguments)
            owner.sync_write_weight_scale_to_buffer()
        for name, part in zip(("w13", "w13 scales", "w2", "w2 scales"), buffers, strict=True):
            self.answer[f"{out} {name}"] = np.stack(part)

    def masks(self, frequency, number, out) -> None:
        self.answer[out] = kt_kernel.generate_gpu_experts_masks(torch.from_numpy(self.arrays[frequency]), number).numpy()

    def environment(self, variables) -> None:
        os.environ.update(variables)

    def wrapper(self, name, logical=None, mask=None, tensors=None, **keywords) -> None:
        """Make kt-kernel's KTMoEWrapper, loaded from files, or from the arrays "{tensors} gate" and so on.

        An exception of the constructor is an answer.
        """
        mask = None if mask is None else torch.from_numpy(self.arrays[mask])
        try:
            wrapper = kt_kernel.KTMoEWrapper(gpu_experts_mask=mask, **keywords)
        except Exception as error:
            self.answer[name] = np.array([type(error).__name__, str(error)])
            return
        if tensors is not None:
            given = [tensor(self.arrays[f"{tensors} {projection}"]) for projection in PROJECTIONS]
            wrapper.load_weights_from_tensors(*given, torch.from_numpy(self.arrays[logical]))
        elif logical is not None:
            wrapper.load_weights(torch.from_numpy(self.arrays[logical]))
        self.layers[name] = wrapper

    def tuned(self, name, given, share, **keywords) -> None:
        """Make kt-kernel's KTMoEWrapper in mode "sft" with the arrays of codes and scales. given: how they are handed over.

        The adapter is the arrays "gate_lora_a" and so on. share: whether layers share memory for backward, which some need.
        """
        wrapper = kt_kernel.KTMoEWrapper(gpu_experts_mask=None, mode="sft", **keywords)
        wrapper.share_backward_bb = share
        adapter = {key: tensor(array) for key, array in self.arrays.items() if "_lora_" in key}
        if adapter:
            wrapper.init_lora_weights(**adapter, **{f"grad_{key}": torch.zeros_like(matrix) for key, matrix in adapter.items()})
        every = torch.arange(keywords["num_experts"])
        codes, scales = (
            {p: tensor(self.arrays[f"{p} {kind}"]) for p in PROJECTIONS if f"{p} {kind}" in self.arrays}
            for kind in ("codes", "scales")
        )
        named = {f"{p}_proj": array for p, array in codes.items()} | {f"{p}_scale": array for p, array in scales.items()}
        if given == "mxfp4":
            lists = {p: [*array] for p, array in codes.items()} | {f"{p}_scale": [*array] for p, array in scales.items()}
            wrapper.load_mxfp4_weights(lists, every)
        elif given == "rawint4":
            wrapper.load_rawint4_weights(sft_weights.RAWINT4ExpertWeights(**named), every)
        elif given == "fp8":
            lists = {key: [*array] for key, array in named.items()}
            for p in PROJECTIONS:
                lists[f"{p}_proj"] = [matrix.view(torch.float8_e4m3fn) for matrix in lists[f"{p}_proj"]]
            wrapper.load_block_fp8_weights(sft_weights.BlockFP8ExpertWeights(**lists), every)
        elif given == "tensors":
            wrapper.load_weights_from_tensors(*codes.values(), every)
        else:
            wrapper.load_weights(every)
        self.layers[name] = wrapper

    def train(self, wrapper, x, ids, weights, grad, out) -> None:
        """forward() and backward(): "{out} y", "{out} x", "{out} weights", and the adapter's gradients by their names."""
        owner = self.layers[wrapper]
        x, ids, weights, grad = (tensor(self.arrays[name]) for name in (x, ids, weights, grad))
        self.answer[f"{out} y"] = bits(owner.forward(x, ids, weights))
        of_x, of_weights = owner.backward(grad)
        self.answer[f"{out} x"], self.answer[f"{out} weights"] = bits(of_x), of_weights.numpy()
        if not owner._is_skip_lora:
            for key in (key for key in self.arrays if "_lora_" in key):
                self.answer[f"{out} {key}"] = bits(getattr(owner, f"grad_{key}"))

    def capture(self, sizes) -> None:
        kt_kernel.KTMoEWrapper.set_capture_batch_sizes(sizes)

    def call(self, wrapper, x, ids, weights, out) -> None:
        """submit_forward and sync_forward; out is the result and, as "{out} error", what they raised."""
        owner, arguments = self.layers[wrapper], [tensor(self.arrays[name]) for name in (x, ids, weights)]
        try:
            owner.submit_forward(*arguments, 0)
            self.answer[out] = bits(owner.sync_forward(arguments[0], 0))
        except Exception as error:
            self.answer[f"{out} error"] = np.array([type(error).__name__, str(error)])


def main(request: str, answer: str) -> None:
    without_cuda()
    with np.load(request) as file:
        arrays = {name: file[name] for name in file.files}
    session = Session(arrays)
    for step, keywords in json.loads(str(arrays.pop("steps"))):
        getattr(session, step)(**keywords)
    np.savez(answer, **session.answer)
    sys.stdout.flush()
    ctypes.CDLL(None)._exit(0)  # its threads are not asked, whose end may hang


if __name__ == "__main__":
    main(*sys.argv[1:])
