"""Small models in bfloat16 of architectures that vLLM runs on the CPU."""

from __future__ import annotations

from pathlib import Path

import engine_models

#: vLLM's kernels want heads of at least 32, and sizes that 32 divides.
SIZES = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
#: model_type -> what its config is told besides.
CHANGES = {
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4, "topk_method": "noaux_tc"},
    "glm4_moe": {"head_dim": 32},
    "llama4_text": {"num_experts_per_tok": 1},
}


def write(model_type: str, folder: Path, **sizes: object) -> Path:
    return engine_models.save(engine_models.make(model_type, CHANGES.get(model_type), **SIZES | sizes), folder)
