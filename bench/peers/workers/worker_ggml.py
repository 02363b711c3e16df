"""ggml, as llama-cpp-python ships it: the graph that llama.cpp's build_moe_ffn makes, on its CPU backend, by ctypes.

Ways: "repack", the buffer type that interleaves rows for its gemm kernels, which llama.cpp takes by itself where it can;
"plain", blocks as in a GGUF file. MXFP4 is its own type. INT4 is its Q4_0, and both round x and h to 8 bits with a scale
per 32 (Q8_0). GGUF's types are its own, too, and x and h have a scale per 256 (Q8_K). "BF16", as in a GGUF file: it rounds x
and h to bfloat16.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from functools import partial
from pathlib import Path

import numpy as np
from protocol import Batches, Calls, Model, Worker, count, serve, thread_counts
from weights import bfloat16_weights, float32, mxfp4_blocks, q4_0_blocks

F32, I32 = 0, 26  # enum ggml_type
#: The types of GGUF's records, by their numbers there.
GGUF = {"Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q6_K": 14, "IQ2_XXS": 16, "IQ3_XXS": 18}
#: ggml's own type for a checkpoint's weights, with its number, and what makes a matrix's blocks, by the weights.
OWN = {
    "MXFP4": ("MXFP4", 39, mxfp4_blocks),
    "INT4": ("Q4_0", 2, q4_0_blocks),
    **{f"GGUF {name}": (name, number, lambda records: records) for name, number in GGUF.items()},
}


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


SIGNATURES = {
    "ggml_init": (c_void_p, InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
    "ggml_new_tensor_3d": (c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64),
    "ggml_nbytes": (c_size_t, c_void_p),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_mul_mat_id": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_swiglu_split": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_mul": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_add": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_view_2d": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t),
    "ggml_view_3d": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_size_t, c_size_t, c_size_t),
    "ggml_cont": (c_void_p, c_void_p, c_void_p),
    "ggml_set_output": (None, c_void_p),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_gallocr_new": (c_void_p, c_void_p),
    "ggml_gallocr_free": (None, c_void_p),
    "ggml_gallocr_alloc_graph": (c_bool, c_void_p, c_void_p),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_buft_name": (c_char_p, c_void_p),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_reg": (c_void_p,),
    "ggml_backend_cpu_buffer_type": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_reg_dev_get": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_supports_op": (c_bool, c_void_p, c_void_p),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_version": (c_char_p,),
}
FEATURES = ("avx2", "avx_vnni", "avx512", "avx512_vbmi", "avx512_vnni", "avx512_bf16", "amx_int8")


class Ggml:
    """The functions of libggml*.so, with their types."""

    def __init__(self):
        # not imported: that would load libllama, too
        folder = Path(importlib.util.find_spec("llama_cpp").origin).parent / "lib"
        loaded = [ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu", "ggml")]
        for name, (result, *arguments) in SIGNATURES.items():
            function = next(getattr(library, name) for library in loaded if hasattr(library, name))
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self.features = [name for name in FEATURES if getattr(loaded[1], f"ggml_cpu_has_{name}")()]

    def context(self, tensors: int) -> int:
        """One whose tensors have no memory yet."""
        return self.init(InitParams((tensors + 8) * 1024 + (1 << 18), None, True))

    def extra_buffer_types(self) -> dict[str, int]:
        """The types of buffers that the CPU backend has beside its plain one, by name."""
        registry = self.backend_cpu_reg()
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        types = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(self.backend_reg_dev_get(registry, 0))
        found = {}
        for pointer in types or ():
            if not pointer:
                break
            found[self.backend_buft_name(pointer).decode()] = pointer
        return found


class GgmlWorker(Worker):
    def __init__(self, way: str, model: Model, threads: int):
        self.model, self.threads = model, threads
        self.ggml = ggml = Ggml()
        self.backend = ggml.backend_cpu_init()
        plain, extra = ggml.backend_cpu_buffer_type(), ggml.extra_buffer_types()
        if way == "repack" and "CPU_REPACK" not in extra:
            raise RuntimeError(f"this build of ggml has no buffer type CPU_REPACK, only {', '.join(extra) or 'the plain one'}")
        self.plain = plain
        own, number, blocks = OWN[model.weights] if way != "BF16" else ("BF16", 30, partial(bfloat16_weights, model.weights))
        context = ggml.context(3)
        self.weights = {}
        for name in ("gate", "up", "down"):
            n, k = (model.hidden, model.intermediate) if name == "down" else (model.intermediate, model.hidden)
            self.weights[name] = ggml.new_tensor_3d(context, number, k, n, model.experts)
        if not ggml.backend_alloc_ctx_tensors_from_buft(context, extra["CPU_REPACK"] if way == "repack" else plain):
            raise MemoryError("ggml could not allocate the weights")
        if not self._supported():  # setting such weights ends with a segmentation fault
            raise RuntimeError(f"ggml's CPU backend has no mul_mat_id of {own} for {way} on this CPU")
        for name, tensor in self.weights.items():
            data = np.concatenate([blocks(*model.matrix(expert, name)) for expert in range(model.experts)])
            if data.nbytes != ggml.nbytes(tensor):
                raise RuntimeError(f"{name}: ggml expects {ggml.nbytes(tensor)} bytes of {own}, here are {data.nbytes}")
            ggml.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
        self.about = {
            "version": f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}, ggml {ggml.version().decode()}",
            "weights": f"{own}, buffer type {'CPU_REPACK' if way == 'repack' else 'CPU'}",
            "built for": ggml.features,
            "extra buffer types": sorted(extra),
        }

    def _supported(self) -> bool:
        """Whether it multiplies by all matrices where they lie."""
        ggml, context = self.ggml, self.ggml.context(7)
        ids = ggml.new_tensor_2d(context, I32, 1, 1)
        calls = []
        for name, matrix in self.weights.items():
            k = self.model.intermediate if name == "down" else self.model.hidden
            calls.append(ggml.mul_mat_id(context, matrix, ggml.new_tensor_3d(context, F32, k, 1, 1), ids))
        supported = all(ggml.backend_supports_op(self.backend, call) for call in calls)
        ggml.free(context)
        return supported

    def settings(self, tokens: int) -> list[str]:
        return [count(threads) for threads in thread_counts(self.threads, tokens)]

    def prepare(self, batches: Batches) -> GgmlCalls:
        return GgmlCalls(self, batches)


class GgmlCalls(Calls):
    def __init__(self, worker: GgmlWorker, batches: Batches):
        self.worker, self.batches = worker, batches
        ggml, model, weights = worker.ggml, worker.model, worker.weights
        tokens, top_k = batches.ids.shape[1:]
        self.tokens = tokens
        self.inputs = ggml.context(3)
        self.x = ggml.new_tensor_3d(self.inputs, F32, model.hidden, 1, tokens)
        self.ids = ggml.new_tensor_2d(self.inputs, I32, top_k, tokens)
        self.router = ggml.new_tensor_3d(self.inputs, F32, 1, top_k, tokens)
        self.buffer = ggml.backend_alloc_ctx_tensors_from_buft(self.inputs, worker.plain)

        self.context = c = ggml.context(3 * top_k + 16)
        self.graph = ggml.new_graph(c)
        up = ggml.mul_mat_id(c, weights["up"], self.x, self.ids)
        gate = ggml.mul_mat_id(c, weights["gate"], self.x, self.ids)
        h = ggml.swiglu_split(c, gate, up)
        down = ggml.mul_mat_id(c, weights["down"], h, self.ids)
        experts = ggml.mul(c, down, self.router)
        ggml.build_forward_expand(self.graph, experts)
        row = 4 * model.hidden
        slots = [ggml.view_2d(c, experts, model.hidden, tokens, row * top_k, row * slot) for slot in range(top_k)]
        for view in slots:
            ggml.build_forward_expand(self.graph, view)
        self.y = slots[0]
        for view in slots[1:]:
            self.y = ggml.add(c, self.y, view)
        if top_k == 1:
            self.y = ggml.cont(c, self.y)
        ggml.set_output(self.y)
        ggml.build_forward_expand(self.graph, self.y)
        self.allocator = ggml.gallocr_new(worker.plain)
        if not ggml.gallocr_alloc_graph(self.allocator, self.graph):
            raise MemoryError("ggml could not allocate the graph")
        self._set(self.x, float32(batches.x))

    def _set(self, tensor: int, array: np.ndarray) -> None:
        self.worker.ggml.backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)

    def stage(self, batch: int) -> None:
        self._set(self.ids, self.batches.ids[batch].astype(np.int32))
        self._set(self.router, self.batches.weights[batch])

    def run(self, setting: str) -> None:
        ggml, backend = self.worker.ggml, self.worker.backend
        ggml.backend_cpu_set_n_threads(backend, int(setting.split()[0]))
        status = ggml.backend_graph_compute(backend, self.graph)
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")

    def output(self) -> np.ndarray:
        y = np.empty((self.tokens, self.worker.model.hidden), np.float32)
        self.worker.ggml.backend_tensor_get(self.y, y.ctypes.data, 0, y.nbytes)
        return y

    def __del__(self):
        ggml = self.worker.ggml
        ggml.gallocr_free(self.allocator)
        ggml.free(self.context)
        ggml.backend_buffer_free(self.buffer)
        ggml.free(self.inputs)


if __name__ == "__main__":
    serve(GgmlWorker)
