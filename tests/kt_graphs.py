"""Calls of KTMoEWrapper in CUDA graphs, on any torch: what tests of it share."""

from __future__ import annotations

import numpy as np
from helpers import BF16
from kt_wrappers import wrapper


def on_device(torch, case) -> list:
    """x, ids and weights as new tensors of fake_cuda's device."""
    dtypes = torch.bfloat16, torch.int64, torch.float32
    made = [torch.on_device(array, dtype) for array, dtype in zip(case, dtypes, strict=True)]
    torch.cuda.current_stream().synchronize()  # and no other one
    return made


def value(y) -> np.ndarray:
    """A copy, once all streams are done."""
    y.torch.cuda.synchronize()
    return y.array.view(BF16).copy()


def stack(folder, deferred) -> list:
    """Wrappers of the first layers; deferred: of each."""
    return [wrapper(folder, index, max_deferred_experts_per_token=d) for index, d in enumerate(deferred)]


def call(w, tensors, stream):
    w.submit_forward(*tensors, stream)
    return w.sync_forward(tensors[0], stream)


class Captured:
    """A call of each wrapper, in this order, in one graph. inputs: the calls' tensors, outputs: their results."""

    def __init__(self, torch, wrappers, cases, **how):
        self.torch, self.wrappers = torch, list(wrappers)
        self.inputs = [on_device(torch, case) for case in cases]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, **how):
            stream = torch.cuda.current_stream()
            self.outputs = [call(w, tensors, stream) for w, tensors in zip(self.wrappers, self.inputs, strict=True)]

    def replay(self, cases) -> None:
        """Replay the graph with new numbers, which come before it in the current stream."""
        for tensors, case in zip(self.inputs, cases, strict=True):
            for tensor, array in zip(tensors, case, strict=True):
                tensor.set_(array)
        self.graph.replay()

    def run(self, cases) -> list[np.ndarray]:
        self.replay(cases)
        return [value(y) for y in self.outputs]
