"""ggml's mul_mat, as llama-cpp-python ships it. A call is one graph, with an addition for each bias.

Ways: "BF16"; "Q8_0", for matrices of FP8, which has about their bytes: 8 bits a weight and a float16 scale for 32, rounded
from the numbers in bfloat16. Its buffer type CPU_REPACK, which llama.cpp takes where it can, has neither on x86-64. mul_mat
rounds x to bfloat16 for BF16, and to 8 bits with a scale per 32 for Q8_0. Matrices with an x of their own are one mul_mat of
three dimensions.
"""

from __future__ import annotations

import importlib.metadata

import numpy as np
from linear import Dense, LinearWorker, Stored, serve
from protocol import count, thread_counts
from weights import float32
from worker_ggml import F32, Ggml

TYPES = {"BF16": 30, "Q8_0": 8}  # enum ggml_type


def q8_0_blocks(numbers: np.ndarray) -> np.ndarray:
    """ggml's block_q8_0 of float32 [n, k], uint8 [n, k / 32, 34], as its quantize_row_q8_0_ref makes them."""
    groups = numbers.reshape(len(numbers), -1, 32)
    scales = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    scaled = groups * inverse
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return np.concatenate([scales.astype(np.float16).view(np.uint8), codes.view(np.uint8)], axis=-1)


class GgmlLinear(LinearWorker):
    def __init__(self, way: str, threads: int):
        self.type, self.threads = way, threads
        self.ggml = ggml = Ggml()
        self.backend = ggml.backend_cpu_init()
        self.plain = ggml.backend_cpu_buffer_type()
        self.weights, self.held, self.graphs, self.allocator, self.inputs = [], [], [], None, None

    def load(self, call: Dense, copies: int) -> None:
        self.own = call.inputs == "own"
        self.shapes = [[stored.shape for stored in matrices] for matrices in call.dispatches]
        data = [[self._data(stored) for stored in matrices] for matrices in call.dispatches]
        for _ in range(copies):
            self.weights.append(self._copy(call, data))
        ggml = self.ggml
        self.about = {
            "version": f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}, ggml {ggml.version().decode()}",
            "weights": self.type,
            "bytes": sum(each.nbytes for matrices in data for each in matrices),
            "built for": ggml.features,
        }

    def _data(self, stored: Stored) -> np.ndarray:
        bits = stored.bfloat16()
        return np.ascontiguousarray(bits) if self.type == "BF16" else q8_0_blocks(float32(bits))

    def _copy(self, call: Dense, data: list[list[np.ndarray]]) -> list[list[tuple[int, int | None]]]:
        """Tensors of weights and biases in new memory, by dispatch. Those of own inputs are one tensor of three dimensions."""
        ggml, number = self.ggml, TYPES[self.type]
        matrices, biases = ggml.context(sum(map(len, data))), ggml.context(sum(map(len, data)))
        made, parts, added = [], [], []
        for dispatch, arrays in zip(call.dispatches, data, strict=True):
            n, k = dispatch[0].shape
            if self.own:
                tensors = [ggml.new_tensor_3d(matrices, number, k, n, len(dispatch))]
                parts.append((tensors[0], np.concatenate(arrays)))
            else:
                tensors = [ggml.new_tensor_2d(matrices, number, k, stored.shape[0]) for stored in dispatch]
                parts += zip(tensors, arrays, strict=True)
            of_bias = [None] * len(tensors)
            if not self.own:
                for i, stored in enumerate(dispatch):
                    if stored.bias is not None:
                        of_bias[i] = ggml.new_tensor_2d(biases, F32, stored.shape[0], 1)
                        added.append((of_bias[i], np.array(stored.bias)))
            made.append(list(zip(tensors, of_bias, strict=True)))
        for context, wanted in ((matrices, parts), (biases, added)):
            buffer = ggml.backend_alloc_ctx_tensors_from_buft(context, self.plain) if wanted else None
            self.held.append((context, buffer))
            if wanted and not buffer:
                raise MemoryError("ggml could not allocate the weights")
            for tensor, array in wanted:
                if array.nbytes != ggml.nbytes(tensor):
                    raise RuntimeError(f"ggml expects {ggml.nbytes(tensor)} bytes of {self.type}, here are {array.nbytes}")
                ggml.backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)
        return made

    def unload(self) -> None:
        self._drop_graphs()
        for context, buffer in self.held:
            if buffer:
                self.ggml.backend_buffer_free(buffer)
            self.ggml.free(context)
        self.weights, self.held = [], []

    def _drop_graphs(self) -> None:
        ggml = self.ggml
        if self.allocator:
            ggml.gallocr_free(self.allocator)
        for context, *_ in self.graphs:
            ggml.free(context)
        if self.inputs:
            ggml.backend_buffer_free(self.inputs[1])
            ggml.free(self.inputs[0])
        self.graphs, self.allocator, self.inputs = [], None, None

    def settings(self, rows: int) -> list[str]:
        return [count(threads) for threads in thread_counts(self.threads, rows)]

    def prepare(self, xs: list[np.ndarray]) -> None:
        self._drop_graphs()
        ggml = self.ggml
        self.rows = len(xs[0])
        context = ggml.context(len(xs))
        tensors = [ggml.new_tensor_2d(context, F32, x[0].size, self.rows) for x in xs]
        self.inputs = context, ggml.backend_alloc_ctx_tensors_from_buft(context, self.plain)
        for tensor, x in zip(tensors, xs, strict=True):
            numbers = np.ascontiguousarray(float32(x))
            ggml.backend_tensor_set(tensor, numbers.ctypes.data, 0, numbers.nbytes)
        self.allocator = ggml.gallocr_new(self.plain)
        for weights in self.weights:
            self.graphs.append(self._graph(tensors, weights))
            if not ggml.gallocr_alloc_graph(self.allocator, self.graphs[-1][1]):
                raise MemoryError("ggml could not allocate the graph")

    def _graph(self, xs: list[int], weights: list[list[tuple[int, int | None]]]) -> tuple[int, int, list[int]]:
        ggml = self.ggml
        context = ggml.context(4 * sum(map(len, self.shapes)))
        graph, found = ggml.new_graph(context), []
        for x, matrices, shapes in zip(xs, weights, self.shapes, strict=True):
            if self.own:
                groups, k = len(shapes), shapes[0][1]
                x = ggml.view_3d(context, x, k, self.rows, groups, 4 * k * groups, 4 * k, 0)
            for matrix, bias in matrices:
                y = ggml.mul_mat(context, matrix, x)
                if not ggml.backend_supports_op(self.backend, y):
                    raise RuntimeError("ggml's CPU backend does not support mul_mat on these weights")
                y = ggml.add(context, y, bias) if bias else y
                ggml.set_output(y)
                ggml.build_forward_expand(graph, y)
                found.append(y)
        return context, graph, found

    def run(self, setting: str, copy: int) -> None:
        ggml = self.ggml
        ggml.backend_cpu_set_n_threads(self.backend, int(setting.split()[0]))
        self.last = copy
        if status := ggml.backend_graph_compute(self.backend, self.graphs[copy][1]):
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")

    def output(self) -> list[np.ndarray]:
        made = []
        for y, shapes in zip(self.graphs[self.last][2], self._of_output(), strict=True):
            array = np.empty((len(shapes), self.rows, shapes[0][0]), np.float32)
            self.ggml.backend_tensor_get(y, array.ctypes.data, 0, array.nbytes)
            made += list(array)
        return made

    def _of_output(self) -> list[list[tuple[int, int]]]:
        """The matrices of each output: one, or all of a dispatch with own inputs."""
        return self.shapes if self.own else [[shape] for shapes in self.shapes for shape in shapes]


if __name__ == "__main__":
    serve(GgmlLinear)
