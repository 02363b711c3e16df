"""Calls of KTMoEWrapper in CUDA graphs, on any torch: what tests of it share."""

from __future__ import annotations

import numpy as np
from helpers import BF16, same_bits
from kt_wrappers import batch, wrapper


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


def close(wrappers) -> None:
    for w in wrappers:
        w.close()


def cases_of(turn, tokens, layers=3) -> list:
    return [batch(100 * turn + layer, tokens) for layer in range(layers)]


def eager(wrappers, cases) -> list[np.ndarray]:
    """The same calls on numpy arrays."""
    return [w.forward(*case).copy() for w, case in zip(wrappers, cases, strict=True)]


def assert_same(found, expected) -> None:
    assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(expected)


class Captured:
    """A call of each wrapper, in this order, in one graph. inputs: the calls' tensors, outputs: their results.

    make(torch, case): new tensors; read(y): a result's numbers, once it is there.
    """

    make, read = staticmethod(on_device), staticmethod(value)

    def __init__(self, torch, wrappers, cases, **how):
        self.torch, self.wrappers = torch, list(wrappers)
        self.inputs = [self.make(torch, case) for case in cases]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, **how):
            self.outputs = [w.forward(*tensors) for w, tensors in zip(self.wrappers, self.inputs, strict=True)]

    def run(self, cases) -> list[np.ndarray]:
        """Replay the graph with new numbers, which come before it in the current stream."""
        for tensors, case in zip(self.inputs, cases, strict=True):
            for tensor, new in zip(tensors, self.make(self.torch, case), strict=True):
                tensor.copy_(new)
        self.graph.replay()
        return [self.read(y) for y in self.outputs]
