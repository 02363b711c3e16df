"""kt-kernel's fine-tuning: the tasks of its wrapper on its thread pool, without the copies of arguments.

The way is its method, MXFP4_SFT. Gradients of the adapters are written anew by each step, as after an optimizer's.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import torch
from kt_kernel import __cpu_variant__
from kt_kernel.sft.amx import AMXSFTMoEWrapper
from protocol import PROJECTIONS, Model
from steps import ALPHA, Inputs, adapter
from training import Steps, TrainingWorker, serve
from weights import bfloat16, float32

#: What its buffers are made for.
MOST_TOKENS = 4096
#: A clamp is needed: one that no number reaches.
LIMIT = 2.0**20


class KtTraining(TrainingWorker):
    def __init__(self, way: str, model: Model, threads: int, rank: int):
        if way != "MXFP4_SFT":
            raise ValueError(f"expected the method MXFP4_SFT, found {way}")
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
            lora_rank=rank,
            lora_alpha=ALPHA,
            method=way,
            group_size=32,
            zero_point=False,
            swiglu_limit=LIMIT,
        )
        pairs = [[adapter(model, rank, name, expert) for expert in range(model.experts)] for name in PROJECTIONS]
        lora = [tensor(np.stack(matrices)) for of_name in pairs for matrices in zip(*of_name, strict=True)]
        self.gradients = [torch.empty_like(each) for each in lora]
        self.wrapper.init_lora_weights(*lora, *self.gradients)
        self.wrapper.load_weights(torch.arange(model.experts))
        self.about = {
            "version": f"kt-kernel {version('kt-kernel')}",
            "classes": [type(self.wrapper.moe).__name__],
            "extension for": __cpu_variant__,
        }

    def settings(self, tokens: int) -> list[str]:
        return [type(self.wrapper.moe).__name__]

    def prepare(self, inputs: Inputs) -> KtSteps:
        if inputs.tokens > MOST_TOKENS:
            raise ValueError(f"expected at most {MOST_TOKENS} tokens, found {inputs.tokens}")
        return KtSteps(self, inputs)


class KtSteps(Steps):
    def __init__(self, worker: KtTraining, inputs: Inputs):
        self.worker, self.inputs = worker, inputs
        self.x, self.grad_y = (np.ascontiguousarray(array) for array in (inputs.x, inputs.grad_y))
        self.y, self.grad_x = np.zeros_like(self.x), np.zeros_like(self.x)
        self.grad_weights = np.zeros((inputs.tokens, worker.top_k), np.float32)
        self.tokens = np.array([inputs.tokens], np.int32)

    def stage(self, batch: int) -> None:
        self.ids, self.weights = self.inputs.ids[batch], self.inputs.weights[batch]

    def forward(self, setting: str) -> None:
        arguments = [array.ctypes.data for array in (self.ids, self.weights, self.x, self.y)]
        saves = True
        self._run("forward_sft_task", self.tokens.ctypes.data, self.worker.top_k, *arguments, saves)

    def backward(self, setting: str) -> None:
        ends = [array.ctypes.data for array in (self.grad_y, self.grad_x)]
        written = [gradient.data_ptr() for gradient in self.worker.gradients]
        no_weights, adds, scale = (0, 0, 0), False, 1.0
        self._run("backward_task", *ends, *written, self.grad_weights.ctypes.data, *no_weights, adds, scale)

    def outputs(self, expert: int) -> dict[str, np.ndarray]:
        found = {"y": float32(self.y), "grad_x": float32(self.grad_x), "grad_weights": self.grad_weights}
        names = [f"{name}_{letter}" for name in PROJECTIONS for letter in "ab"]
        return found | {name: array[expert].float().numpy() for name, array in zip(names, self.worker.gradients, strict=True)}

    def _run(self, task: str, *arguments) -> None:
        cpu, moe = self.worker.wrapper.cpu_infer, self.worker.wrapper.moe
        cpu.submit(getattr(moe, task)(*arguments))
        cpu.sync()


def tensor(numbers: np.ndarray) -> torch.Tensor:
    """float32 as bfloat16."""
    return torch.from_numpy(bfloat16(numbers).view(np.int16)).view(torch.bfloat16)


if __name__ == "__main__":
    serve(KtTraining)
