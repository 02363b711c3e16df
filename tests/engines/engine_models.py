"""Small models of transformers in bfloat16, whose experts matter as much as the rest and whose logits are not flat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tiny_models
import torch
from torch import nn
from transformers import PreTrainedModel

EXPERTS, TOP_K, LAYERS, VOCABULARY = 8, 3, 3, 128
#: What a config is told if it knows the key: no token ends a text, and none is padding unless a test says so.
SIZES = {
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
#: model_type -> what its config is told besides.
ARCHITECTURES = {
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {},
    "glm4_moe": {"first_k_dense_replace": 1},
    "minimax_m2": {},
    "deepseek_v3": {"head_dim": 8, "num_key_value_heads": 4},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "olmoe": {},
    "deepseek_v4": {
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "o_lora_rank": 32,
        "o_groups": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
    },
}


def make(model_type: str, changes: dict | None = None, seed: int = 2, **sizes: object) -> PreTrainedModel:
    """A model in bfloat16, the same each time.

    changes: what its config is told besides those of ARCHITECTURES. seed: of its numbers. sizes: more of them, of which it
    takes those that it knows.
    """
    changes = ARCHITECTURES.get(model_type, {}) | (changes or {})
    model = tiny_models.make(model_type, changes, tiny_models.SIZES | SIZES | sizes)
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            _fill(parameter.data, generator, module is embedding, getattr(module, "is_transposed", False), name)
        for name, buffer in module.named_buffers(recurse=False):
            if name == "tid2eid":  # of each token, other experts
                of_tokens = torch.rand(len(buffer), model.config.n_routed_experts, generator=generator)
                buffer.copy_(of_tokens.argsort(1)[:, : buffer.shape[1]])
            elif name == "e_score_correction_bias":  # choose among the first few: of many, some are nearly as good as others
                buffer[EXPERTS:] = -4
    return model.eval()


def _fill(data: torch.Tensor, generator: torch.Generator, embedding: bool, transposed: bool, name: str) -> None:
    """A matrix turns numbers of size 1 into such numbers, and experts into larger ones, since SiLU and the router weights make
    them smaller. What has one dimension stays as it is made, but for biases."""
    if name.endswith("bias"):
        data.copy_(torch.randn(data.shape, generator=generator) * 0.2)
    elif data.ndim >= 2:
        inputs = 1 if embedding else data.shape[-2] if transposed else data[0].numel() if data.ndim == 2 else data.shape[-1]
        data.copy_(torch.randn(data.shape, generator=generator) * inputs**-0.5)


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of each module of routed experts."""
    for name, module in model.named_modules():
        if hasattr(module, "_apply_gate"):
            yield name, module


def prompts(batch: int = 2, length: int = 24) -> torch.Tensor:
    """Token ids [batch, length], none of them padding."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids).logits
