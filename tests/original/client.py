"""client.py ktmoe|kt-kernel ANSWER.npz: kt-kernel's own torch layers train a small model on either's KTMoEWrapper.

Run by test_client.py with kt-kernel, torch and ktmoe on the path. The model is kt-kernel's KTMoELayerWrapper around a router
and fused experts, whose adapter its kt_adapt_peft_lora() makes; a step is backward, the optimizer's, update_kt_lora_pointers().
Parts: plain steps; gradient accumulation; its two ways with gradient checkpointing. And a transformers model that it wraps.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import torch
from kt_kernel.sft import (
    KTActivationPolicy,
    KTConfig,
    KTMoELayerWrapper,
    get_activation_checkpoint_context_fn,
    kt_adapt_peft_lora,
    update_kt_lora_pointers,
)
from kt_kernel.sft import wrapper as sft_wrapper
from kt_kernel.sft.arch import MOEArchConfig
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, RANK, ALPHA = 8, 2, 128, 128, 4, 8.0
BATCH, LENGTH, STEPS = 2, 12, 4


def wrapper_class(name: str):
    if name == "ktmoe":
        from ktmoe.compat.kt_kernel import KTMoEWrapper
    else:
        from kt_kernel import KTMoEWrapper
    return KTMoEWrapper


class Model(torch.nn.Module):
    """A linear layer, then the experts beside a residual."""

    def __init__(self, layer: KTMoELayerWrapper, checkpointed: bool):
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)
        self.layer = layer
        self.checkpointed = checkpointed

    def block(self, x):
        x = self.first(x)
        return x + self.layer(x)

    def forward(self, x):
        if self.checkpointed:
            context = get_activation_checkpoint_context_fn()
            return checkpoint(self.block, x, use_reentrant=False, context_fn=context, determinism_check="none")
        return self.block(x)


def made(name: str, policy: KTActivationPolicy | None) -> tuple[Model, object]:
    torch.manual_seed(0)
    gate, up = ((torch.randn(EXPERTS, INTERMEDIATE, HIDDEN) / 8).bfloat16() for _ in range(2))
    down = (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / 8).bfloat16()
    keywords = {"layer_idx": 0, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "hidden_size": HIDDEN}
    keywords |= {"moe_intermediate_size": INTERMEDIATE, "gpu_experts_mask": None, "cpuinfer_threads": 2, "threadpool_count": 1}
    keywords |= {"weight_path": "", "chunked_prefill_size": 64, "method": "AMXBF16_SFT", "mode": "sft", "num_gpu_experts": 0}
    backend = wrapper_class(name)(**keywords, lora_rank=RANK, lora_alpha=ALPHA, max_cache_depth=2)
    backend.reuse_checkpoint_forward = policy is not None and policy.cpu == "retain"
    backend.share_cache_pool = policy is not None and policy.cpu == "recompute"
    backend.load_weights_from_tensors(gate, up, down, torch.arange(EXPERTS))
    original = torch.nn.Module()
    original.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.bfloat16)
    original.experts = torch.nn.Module()
    names = ("gate_proj", "up_proj", "down_proj")
    config = MOEArchConfig("mlp", "gate", "experts", names, EXPERTS, INTERMEDIATE, TOP_K)
    layer = KTMoELayerWrapper(original, backend, None, config, HIDDEN, 0, activation_policy=policy)
    layer._fused_experts, layer._lora_rank = True, RANK
    model = Model(layer, policy is not None)
    model._kt_wrappers = [layer]
    kt_adapt_peft_lora(model)
    with torch.no_grad():
        for number, parameter in enumerate(layer._fused_expert_lora_params):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 16)
    update_kt_lora_pointers(model)
    return model.train(), backend


def train(model: Model, accumulated: int) -> dict[str, np.ndarray]:
    adapter = model.layer._fused_expert_lora_params
    trained = [*adapter, model.first.weight, model.layer.gate.weight]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    generator = torch.Generator().manual_seed(1)
    losses, gradients = [], []
    for step in range(STEPS):
        for _ in range(accumulated):
            x, target = (torch.randn(BATCH, LENGTH, HIDDEN, generator=generator).bfloat16() for _ in range(2))
            loss = (model(x.requires_grad_()).float() - target.float()).square().mean() / accumulated
            loss.backward()
            losses.append(loss.item())
        if not step:
            gradients = [parameter.grad.float().numpy().copy() for parameter in trained] + [x.grad.float().numpy()]
        optimizer.step()
        update_kt_lora_pointers(model)
        for parameter in trained[len(adapter) :]:
            parameter.grad = None
    model.eval()
    with torch.no_grad():
        y = model(x.detach()).float().numpy()
    found = {"losses": np.array(losses), "y": y}
    return found | {f"gradient {number}": array for number, array in enumerate(gradients)}


#: What is trained: the layer's policy, and batches in a step.
PARTS = {
    "plain": (None, 1),
    "accumulated": (None, 3),
    "checkpointed, computed again": (KTActivationPolicy(cpu="recompute", gpu="recompute"), 1),
    "checkpointed, kept": (KTActivationPolicy(cpu="retain", gpu="recompute"), 1),
}


def wrapped(name: str) -> np.ndarray:
    """Losses of a transformers model whose experts kt-kernel has replaced."""
    sft_wrapper.KTMoEWrapper = wrapper_class(name)
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "intermediate_size": INTERMEDIATE, "head_dim": 32}
    sizes |= {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "architectures": ["Qwen3MoeForCausalLM"]}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, initializer_range=0.2, max_position_embeddings=64)).bfloat16()
    keywords = {"kt_backend": "AMXBF16", "kt_num_threads": 2, "kt_threadpool_count": 1, "kt_lora_rank": RANK}
    policy = KTActivationPolicy(cpu="retain", gpu="retain")
    config = KTConfig(**keywords, kt_lora_alpha=ALPHA, kt_activation_policy=policy)
    model._kt_wrappers = sft_wrapper.wrap_moe_layers_with_kt_wrapper(model, config)
    kt_adapt_peft_lora(model)
    model.train()
    optimizer = torch.optim.SGD([p for layer in model._kt_wrappers for p in layer._fused_expert_lora_params], lr=0.5)
    ids, losses = torch.randint(0, sizes["vocab_size"], (BATCH, LENGTH)), []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        update_kt_lora_pointers(model)
        losses.append(loss.item())
    ALIVE.append(model)
    return np.array(losses)


#: What is kept until the end: kt-kernel's destructors may hang.
ALIVE = []


def main(name: str, answer: str) -> None:
    found = {"wrapped: losses": wrapped(name)}
    for part, (policy, accumulated) in PARTS.items():
        model, backend = made(name, policy)
        ALIVE.append((model, backend))
        found |= {f"{part}: {what}": array for what, array in train(model, accumulated).items()}
        found[f"{part}: state"] = np.array(str(backend.checkpoint_cache_state.value))
    np.savez(answer, **found)
    sys.stdout.flush()
    ctypes.CDLL(None)._exit(0)  # kt-kernel's threads are not asked, whose end may hang


if __name__ == "__main__":
    main(*sys.argv[1:])
