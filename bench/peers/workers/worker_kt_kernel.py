"""kt-kernel: its C++ classes on its thread pool, driven as its Python wrappers do, but for their copies to and from a GPU.

Ways: "MXFP4 amx" is AMXFP4_KGroup_MOE, which its wrapper prefers, "MXFP4 avx2" is AVX2MXFP4_MOE, "BF16 amx" is AMXBF16_MOE,
"GGUF llamafile" is MOE. Experts are read by its own loader, or made from the same bytes where it wants bfloat16 or GGUF.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import torch
from kt_kernel import __cpu_variant__, kt_kernel_ext
from kt_kernel.utils.loader import MXFP4SafeTensorLoader
from protocol import Batches, Calls, Model, Worker, serve
from weights import bfloat16_weights, float32, mxfp4_blocks

CLASSES = {
    "MXFP4 amx": "AMXFP4_KGroup_MOE",
    "MXFP4 avx2": "AVX2MXFP4_MOE",
    "BF16 amx": "AMXBF16_MOE",
    "GGUF llamafile": "MOE",
}
GGUF_MXFP4 = 39
MOST_TOKENS = 1024


class KtWorker(Worker):
    def __init__(self, way: str, model: Model, threads: int):
        self.model, self.threads = model, threads
        name = CLASSES[way]
        if not hasattr(kt_kernel_ext.moe, name):
            raise RuntimeError(f"the extension for {__cpu_variant__} has no class {name}")
        pool = kt_kernel_ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        self.cpu = kt_kernel_ext.CPUInfer(pool)
        on_gpu = torch.zeros(model.experts, dtype=torch.bool)
        config = kt_kernel_ext.moe.MOEConfig(model.experts, model.top_k, model.hidden, model.intermediate, on_gpu.data_ptr())
        config.layer_idx = 0
        config.pool = self.cpu.backend_
        config.max_len = MOST_TOKENS
        kept = {"MXFP4": self._mxfp4, "BF16": self._bf16, "GGUF": self._gguf}[way.split()[0]](config)
        self.moe = getattr(kt_kernel_ext.moe, name)(config)
        identity = torch.arange(model.experts, dtype=torch.int64)
        self._do(self.moe.load_weights_task(identity.data_ptr()))
        self._keep = (on_gpu, identity)
        del kept  # load_weights copied
        self.about = {
            "version": f"kt-kernel {version('kt-kernel')}",
            "weights": way.split()[0],
            "class": f"{name} of the extension for {__cpu_variant__}",
        }

    def _mxfp4(self, config) -> object:
        loaded = MXFP4SafeTensorLoader(str(self.model.folder)).load_experts("model.layers.0")
        for name in ("gate", "up", "down"):
            setattr(config, f"{name}_projs", [[tensor.data_ptr() for tensor in loaded[name]]])
            setattr(config, f"{name}_scales", [[tensor.data_ptr() for tensor in loaded[f"{name}_scale"]]])
        config.quant_config.bits = 4
        config.quant_config.group_size = 32
        config.quant_config.zero_point = False
        return loaded

    def _bf16(self, config) -> object:
        experts = range(self.model.experts)
        loaded = {n: [bfloat16_weights(*self.model.matrix(e, n)) for e in experts] for n in ("gate", "up", "down")}
        for name, arrays in loaded.items():
            setattr(config, f"{name}_projs", [[array.ctypes.data for array in arrays]])
            setattr(config, f"{name}_scales", [[0] * self.model.experts])
        return loaded

    def _gguf(self, config) -> object:
        experts = range(self.model.experts)
        loaded = {n: np.concatenate([mxfp4_blocks(*self.model.matrix(e, n)) for e in experts]) for n in ("gate", "up", "down")}
        for name, array in loaded.items():
            setattr(config, f"{name}_proj", array.ctypes.data)
            setattr(config, f"{name}_type", GGUF_MXFP4)
        config.hidden_type = kt_kernel_ext.kvcache.ggml_type.BF16
        config.m_block, config.group_min_len, config.group_max_len = 32, 10, MOST_TOKENS  # as its wrapper sets them
        return loaded

    def _do(self, task) -> None:
        self.cpu.submit(task)
        self.cpu.sync()

    def settings(self, tokens: int) -> list[str]:
        return [f"{self.threads} threads"]

    def prepare(self, batches: Batches) -> KtCalls:
        return KtCalls(self, batches)


class KtCalls(Calls):
    def __init__(self, worker: KtWorker, batches: Batches):
        self.worker, self.batches = worker, batches
        self.x = np.ascontiguousarray(batches.x)
        self.y = np.zeros_like(self.x)
        self.tokens = np.array([batches.tokens], np.int32)

    def stage(self, batch: int) -> None:
        self.ids, self.weights = self.batches.ids[batch], self.batches.weights[batch]

    def run(self, setting: str) -> None:
        arrays = (self.ids, self.weights, self.x, self.y)
        addresses = [array.ctypes.data for array in arrays]
        self.worker._do(self.worker.moe.forward_task(self.tokens.ctypes.data, self.ids.shape[1], *addresses, False))

    def output(self) -> np.ndarray:
        return float32(self.y)


if __name__ == "__main__":
    serve(KtWorker)
