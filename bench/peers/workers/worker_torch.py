"""torch in bfloat16, as transformers runs a Qwen3-MoE's experts: dequantised weights of exactly the same values.

Its own implementations are tried for each size of call: a loop over experts, grouped_mm, and batched_mm, which copies the
weights of each token's experts and is left out where that would be more than COPIED_BYTES.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import torch
from protocol import Batches, Calls, Model, Worker, count, serve, thread_counts
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from weights import bfloat16_weights

COPIED_BYTES = 1 << 29


def tensor(bits: np.ndarray) -> torch.Tensor:
    """bfloat16 on the same memory."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


class TorchWorker(Worker):
    def __init__(self, way: str, model: Model, threads: int):
        self.model, self.threads = model, threads
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        config = Qwen3MoeConfig(
            num_experts=model.experts,
            hidden_size=model.hidden,
            moe_intermediate_size=model.intermediate,
            hidden_act="silu",
        )
        torch.set_default_dtype(torch.bfloat16)
        self.experts = Qwen3MoeExperts(config)
        for expert in range(model.experts):
            gate, up, down = (tensor(bfloat16_weights(*model.matrix(expert, name))) for name in ("gate", "up", "down"))
            self.experts.gate_up_proj[expert].copy_(torch.cat([gate, up]))
            self.experts.down_proj[expert].copy_(down)
        self.about = {"version": f"torch {torch.__version__}, transformers {version('transformers')}", "weights": "BF16"}

    def settings(self, tokens: int) -> list[str]:
        copied = tokens * self.model.top_k * 2 * 3 * self.model.hidden * self.model.intermediate
        names = ["eager", "grouped_mm", *(["batched_mm"] if copied <= COPIED_BYTES else [])]
        return [f"{name}, {count(threads)}" for name in names for threads in thread_counts(self.threads, tokens)]

    def prepare(self, batches: Batches) -> TorchCalls:
        return TorchCalls(self, batches)


class TorchCalls(Calls):
    def __init__(self, worker: TorchWorker, batches: Batches):
        self.worker, self.batches = worker, batches
        self.x = tensor(batches.x)

    def stage(self, batch: int) -> None:
        self.ids = torch.from_numpy(self.batches.ids[batch])
        self.weights = torch.from_numpy(self.batches.weights[batch]).to(torch.bfloat16)

    def run(self, setting: str) -> None:
        implementation, threads = setting.split(", ")
        torch.set_num_threads(int(threads.split()[0]))
        self.worker.experts.config._experts_implementation = implementation
        self.y = self.worker.experts(self.x, self.ids, self.weights)

    def output(self) -> np.ndarray:
        return self.y.float().numpy()


if __name__ == "__main__":
    serve(TorchWorker)
