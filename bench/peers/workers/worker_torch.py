"""torch. Ways: "BF16", as transformers runs a Qwen3-MoE's experts, and "INT4", by torch's product of bfloat16 and INT4.

BF16: the weights are dequantised. transformers' own implementations are tried for each size of call: a loop over experts,
grouped_mm, and batched_mm, which copies the weights of each token's experts and is left out where that would be more than
COPIED_BYTES. INT4: the same loop over experts; a product takes groups of 32 with bfloat16 scales, as the checkpoint has them.
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


class Int4Experts:
    """Called as transformers' experts are."""

    def __init__(self, model: Model):
        self.gate_up, self.down = [], []
        for expert in range(model.experts):
            gate, up, down = (model.matrix(expert, name) for name in ("gate", "up", "down"))
            self.gate_up.append(self._packed(*map(np.concatenate, zip(gate, up, strict=True))))
            self.down.append(self._packed(*down))

    def _packed(self, codes: np.ndarray, scales: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights as the product takes them, and their scales with offsets, which are 0, [k / 32, n, 2]."""
        values = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(values.astype(np.int32)), 1)
        factors = tensor(np.ascontiguousarray(scales.T))
        return packed, torch.stack([factors, torch.zeros_like(factors)], dim=-1)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = self._product(x[token], *self.gate_up[expert]).chunk(2, dim=-1)
            found = self._product(torch.nn.functional.silu(gate) * up, *self.down[expert])
            y.index_add_(0, token, found * weights[token, slot, None])
        return y

    def _product(self, x: torch.Tensor, packed: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, factors)


class TorchWorker(Worker):
    def __init__(self, way: str, model: Model, threads: int):
        self.model, self.way, self.threads = model, way, threads
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.experts = Int4Experts(model) if way == "INT4" else self._bf16()
        self.about = {"version": f"torch {torch.__version__}, transformers {version('transformers')}", "weights": way}

    def _bf16(self) -> Qwen3MoeExperts:
        model = self.model
        config = Qwen3MoeConfig(
            num_experts=model.experts,
            hidden_size=model.hidden,
            moe_intermediate_size=model.intermediate,
            hidden_act="silu",
        )
        torch.set_default_dtype(torch.bfloat16)
        experts = Qwen3MoeExperts(config)
        for expert in range(model.experts):
            matrices = (bfloat16_weights(model.weights, *model.matrix(expert, name)) for name in ("gate", "up", "down"))
            gate, up, down = map(tensor, matrices)
            experts.gate_up_proj[expert].copy_(torch.cat([gate, up]))
            experts.down_proj[expert].copy_(down)
        return experts

    def settings(self, tokens: int) -> list[str]:
        copied = tokens * self.model.top_k * 2 * 3 * self.model.hidden * self.model.intermediate
        names = ["eager", "grouped_mm", *(["batched_mm"] if copied <= COPIED_BYTES else [])]
        names = ["a loop"] if self.way == "INT4" else names
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
        if self.worker.way == "BF16":
            self.worker.experts.config._experts_implementation = implementation
        self.y = self.worker.experts(self.x, self.ids, self.weights)

    def output(self) -> np.ndarray:
        return self.y.float().numpy()


if __name__ == "__main__":
    serve(TorchWorker)
