"""kt-kernel: its C++ classes on its thread pool, driven as its Python wrappers do, but for their copies to and from a GPU.

Ways are its methods' weights. Where its wrapper chooses among two classes, the faster one is taken for a size of calls.
"BF16" has one class alone, since another would double so much memory.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import torch
from kt_kernel import __cpu_variant__, kt_kernel_ext
from kt_kernel.utils import loader
from protocol import Batches, Calls, Model, Worker, count, serve
from weights import bfloat16_weights, float32

CLASSES = {
    "MXFP4": {"amx": "AMXFP4_KGroup_MOE", "avx2": "AVX2MXFP4_MOE"},
    "BF16": {"amx": "AMXBF16_MOE", "avx2": "AVX2BF16_MOE"},
    "FP8": {"amx": "AMXFP8_MOE", "avx2": "AVX2FP8_MOE"},
    "INT4": {"amx": "AMXInt4_KGroup_MOE", "amx, blocked": "AMXInt4_KGroupBlocked_MOE"},
}
LOADERS = {"MXFP4": "MXFP4SafeTensorLoader", "FP8": "FP8SafeTensorLoader", "INT4": "CompressedSafeTensorLoader"}
#: Bits of a code, and codes of a scale.
GROUPS = {"MXFP4": (4, 32), "FP8": (8, 128), "INT4": (4, 32)}
#: What its buffers are made for.
MOST_TOKENS = 4096


class KtWorker(Worker):
    def __init__(self, way: str, model: Model, threads: int):
        self.model, self.way = model, way
        self.classes = {name: kind for name, kind in CLASSES[way].items() if hasattr(kt_kernel_ext.moe, kind)}
        if way == "BF16":  # its wrapper takes the first, and another would double so much memory
            self.classes = dict([*self.classes.items()][:1])
        if not self.classes:
            raise RuntimeError(f"the extension for {__cpu_variant__} has none of {', '.join(CLASSES[way].values())}")
        self.on_gpu = torch.zeros(model.experts, dtype=torch.bool)
        self.identity = torch.arange(model.experts, dtype=torch.int64)
        weights, scales = self._bf16() if way == "BF16" else self._own()
        self.layers = {}
        for name, kind in self.classes.items():
            self.layers[f"{name}, {count(threads)}"] = self._layer(kind, threads, weights, scales)
        self.about = {
            "version": f"kt-kernel {version('kt-kernel')}",
            "weights": way,
            "classes": [*self.classes.values()],
            "extension for": __cpu_variant__,
        }

    def _layer(self, kind: str, threads: int, weights: dict, scales: dict) -> tuple:
        """(pool, instance of the class). It copies the weights."""
        model = self.model
        pool = kt_kernel_ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        cpu = kt_kernel_ext.CPUInfer(pool)
        config = kt_kernel_ext.moe.MOEConfig(
            model.experts, model.top_k, model.hidden, model.intermediate, self.on_gpu.data_ptr()
        )
        config.layer_idx = 0
        config.pool = cpu.backend_
        config.max_len = MOST_TOKENS
        for name in ("gate", "up", "down"):
            setattr(config, f"{name}_projs", [[tensor.data_ptr() for tensor in weights[name]]])
            setattr(config, f"{name}_scales", [[tensor.data_ptr() for tensor in scales[name]] or [0] * model.experts])
        if self.way in GROUPS:
            config.quant_config.bits, config.quant_config.group_size = GROUPS[self.way]
            config.quant_config.zero_point = False
        layer = getattr(kt_kernel_ext.moe, kind)(config)
        cpu.submit(layer.load_weights_task(self.identity.data_ptr()))
        cpu.sync()
        return cpu, layer

    def _own(self) -> tuple[dict, dict]:
        """The tensors as kt-kernel's own loader reads them, and their scales."""
        loaded = getattr(loader, LOADERS[self.way])(str(self.model.folder)).load_experts("model.layers.0")
        return loaded, {name: loaded[f"{name}_scale"] for name in ("gate", "up", "down")}

    def _bf16(self) -> tuple[dict, dict]:
        def tensor(expert: int, name: str) -> torch.Tensor:
            return torch.from_numpy(bfloat16_weights(self.model.weights, *self.model.matrix(expert, name)).view(np.int16))

        names = ("gate", "up", "down")
        loaded = {name: [tensor(expert, name) for expert in range(self.model.experts)] for name in names}
        return loaded, {name: [] for name in names}

    def settings(self, tokens: int) -> list[str]:
        return [*self.layers]

    def prepare(self, batches: Batches) -> KtCalls:
        if batches.tokens > MOST_TOKENS:
            raise ValueError(f"expected at most {MOST_TOKENS} tokens, found {batches.tokens}")
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
        cpu, layer = self.worker.layers[setting]
        addresses = [array.ctypes.data for array in (self.ids, self.weights, self.x, self.y)]
        cpu.submit(layer.forward_task(self.tokens.ctypes.data, self.ids.shape[1], *addresses, False))
        cpu.sync()

    def output(self) -> np.ndarray:
        return float32(self.y)


if __name__ == "__main__":
    serve(KtWorker)
