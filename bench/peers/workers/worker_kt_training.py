"""kt-kernel's fine-tuning: the tasks of its wrapper for MXFP4_SFT on its thread pool, without the copies of arguments.

The way is its method's weights, MXFP4. Gradients of the adapter are written anew by each step, as after an optimizer's.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import torch
from kt_kernel import __cpu_variant__
from kt_kernel.sft.amx import AMXSFTMoEWrapper
from protocol import Batches, Calls, Model, Worker, serve
from training import ALPHA, FORWARD, LIMIT, RANK, STEPS, adapter, output_gradient
from weights import float32

#: What its buffers are made for.
MOST_TOKENS = 4096


class KtTrainingWorker(Worker):
    def __init__(self, way: str, model: Model, threads: int):
        if way != "MXFP4":
            raise ValueError(f"expected the weights MXFP4, found {way}")
        self.top_k = model.top_k
        self.wrapper = AMXSFTMoEWrapper(
            layer_idx=0,
            num_experts=model.experts,
            num_experts_per_tok=model.top_k,
            hidden_size=model.hidden,
            moe_intermediate_size=model.intermediate,
            num_gpu_experts=0,
            cpuinfer_threads=threads,
            threadpool_count=1,
            weight_path=str(model.folder),
            chunked_prefill_size=MOST_TOKENS,
            lora_rank=RANK,
            lora_alpha=ALPHA,
            method=f"{way}_SFT",
            group_size=32,
            zero_point=False,
            swiglu_limit=LIMIT,
        )
        lora = [tensor(array) for pair in adapter(model).values() for array in pair]
        self.gradients = [torch.empty_like(each) for each in lora]
        self.wrapper.init_lora_weights(*lora, *self.gradients)
        self.wrapper.load_weights(torch.arange(model.experts))
        self.about = {
            "version": f"kt-kernel {version('kt-kernel')}",
            "weights": way,
            "classes": [type(self.wrapper.moe).__name__],
            "extension for": __cpu_variant__,
        }

    def settings(self, tokens: int) -> list[str]:
        return [*STEPS]

    def prepare(self, batches: Batches) -> KtTrainingCalls:
        if batches.tokens > MOST_TOKENS:
            raise ValueError(f"expected at most {MOST_TOKENS} tokens, found {batches.tokens}")
        return KtTrainingCalls(self, batches)


class KtTrainingCalls(Calls):
    def __init__(self, worker: KtTrainingWorker, batches: Batches):
        self.worker, self.batches = worker, batches
        self.x, self.gradient = np.ascontiguousarray(batches.x), output_gradient(batches)
        self.y, self.x_gradient = np.zeros_like(self.x), np.zeros_like(self.x)
        self.weights_gradient = np.zeros((batches.tokens, worker.top_k), np.float32)
        self.tokens = np.array([batches.tokens], np.int32)
        self.last = self.y

    def stage(self, batch: int) -> None:
        self.ids, self.weights = self.batches.ids[batch], self.batches.weights[batch]

    def run(self, setting: str) -> None:
        cpu, moe = self.worker.wrapper.cpu_infer, self.worker.wrapper.moe
        arguments = [array.ctypes.data for array in (self.ids, self.weights, self.x, self.y)]
        cpu.submit(moe.forward_sft_task(self.tokens.ctypes.data, self.worker.top_k, *arguments, True))
        cpu.sync()
        self.last = self.y
        if setting == FORWARD:  # its one saved forward is the next one's place
            return
        ends = [array.ctypes.data for array in (self.gradient, self.x_gradient)]
        written = [gradient.data_ptr() for gradient in self.worker.gradients]
        no_weights = 0, 0, 0
        again, scale = False, 1.0
        cpu.submit(moe.backward_task(*ends, *written, self.weights_gradient.ctypes.data, *no_weights, again, scale))
        cpu.sync()
        self.last = self.x_gradient

    def output(self) -> np.ndarray:
        return float32(self.last)


def tensor(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


if __name__ == "__main__":
    serve(KtTrainingWorker)
