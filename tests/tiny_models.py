"""transformers' MoE models, as small as their code allows."""

from __future__ import annotations

import re
from collections.abc import Iterator

#: hidden, intermediate, experts: no two sizes of a matrix or of a fused tensor are alike.
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 96, 4, 2
#: What a config may be told; each takes the keys that it knows.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model"), HIDDEN),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"), INTERMEDIATE),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "top_k", "moe_k", "moe_topk"), TOP_K),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "mamba_d_state"), 8),
    **dict.fromkeys(("n_group", "topk_group", "depth", "decoder_sparse_step", "bos_token_id"), 1),
    **dict.fromkeys(
        ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "pad_token_id", "zero_expert_num"), 0
    ),
    **dict.fromkeys(("shared_expert_intermediate_size", "eos_token_id"), 2),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 64),
}

#: model_type -> (loader, changes of its config).
MODELS = {
    "afmoe": ("bf16", {}),
    "aria": ("bf16", {}),
    "axk1": ("bf16", {}),
    "bailing_hybrid": ("bf16", {}),
    "cohere2_moe": ("bf16", {}),
    "deepseek_v2": ("bf16", {}),
    "deepseek_v3": ("bf16", {}),
    "deepseek_v32": ("bf16", {}),
    "deepseek_v4": ("deepseek_v4", {}),
    "dots1": ("bf16", {"n_shared_experts": 1}),
    "ernie4_5_moe": ("bf16", {}),
    "exaone_moe": ("bf16", {}),
    "flex_olmo": ("bf16", {}),
    "glm4_moe": ("bf16", {}),
    "glm4_moe_lite": ("bf16", {}),
    "glm4v_moe": ("bf16", {}),
    "glm5_next_text": (
        "bf16",
        {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "glm_moe_dsa": ("bf16", {}),
    "gpt_oss": ("gpt_oss", {}),
    "granitemoe": ("bf16", {}),
    "granitemoehybrid": ("bf16", {}),
    "granitemoeshared": ("bf16", {}),
    "hunyuan_v1_moe": ("bf16", {}),
    "hy_v3": ("bf16", {}),
    "hy_v4": ("bf16", {}),
    "jamba": ("bf16", {}),
    "kimi_linear": ("bf16", {}),
    "laguna": ("bf16", {}),
    "lfm2_moe": ("bf16", {"layer_types": ["full_attention", "conv"]}),
    "llama4_text": ("bf16", {}),
    "longcat_flash": ("bf16", {}),
    "mellum": ("bf16", {}),
    "mimo_v2_flash": ("bf16", {}),
    "minimax": ("bf16", {}),
    "minimax_m2": ("bf16", {}),
    "minimax_m3_vl": ("bf16", {}),
    "mistral4": ("bf16", {}),
    "mistral_large4": ("bf16", {}),
    "mixtral": ("bf16", {}),
    "olmoe": ("bf16", {}),
    "phimoe": ("bf16", {}),
    "qwen2_moe": ("bf16", {}),
    "qwen3_5_moe_text": ("bf16", {}),
    "qwen3_moe": ("bf16", {}),
    "qwen3_next": ("bf16", {}),
    "qwen3_vl_moe": ("bf16", {}),
    "qwen4_exp": ("bf16", {}),
    "solar_open": ("bf16", {}),
    "zaya": ("bf16", {"num_experts_per_tok": 1}),
}
#: model_type -> (changes of its config, what the message says).
REFUSED = {
    "jetmoe": ({}, r"self_attention\.experts\.bias: expected none beside weight, found one"),
    "kimi_k25": ({}, r"language_model\.model\.blocks\.0\.mlp\.experts\.0\.down_proj\.weight' BF16 \[64, 96\]"),
    "openai_privacy_filter": ({}, r"expected 'gpt_oss' for these names, found 'openai_privacy_filter'"),
    "nemotron_h": ({}, r"backbone\.layers\.1\.mixer\.experts\.0\.down_proj\.weight' BF16 \[64, 96\]"),
}


def config(kind: type, changes: dict, sizes: dict = SIZES):
    """A transformers config of that class with changes, and what it knows of sizes; its own configs, such as that of text,
    likewise."""
    usual = kind()
    known = {*vars(usual), *(getattr(kind, "attribute_map", None) or {})}
    told = {key: value for key, value in sizes.items() if key in known}
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        stated = getattr(usual, name, None)
        part = type(stated) if stated is not None else part
        if part.__name__ != "AutoConfig":
            told[name] = config(part, changes.get(name, {}), sizes).to_dict()
    return kind(**told | {key: value for key, value in changes.items() if key not in told or not isinstance(value, dict)})


def make(model_type: str, changes: dict, sizes: dict = SIZES):
    """A model with bfloat16 weights, of which the experts' are normal numbers. changes, sizes: of its config()."""
    import torch
    import transformers

    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    stated = config(kind, changes, sizes)
    autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText, transformers.AutoModel)
    auto = next(auto for auto in autos if kind in auto._model_mapping)
    torch.manual_seed(1)
    model = auto.from_config(stated, dtype=torch.bfloat16)
    model.set_experts_implementation("eager")  # the module's own code
    for _, module in modules(model):
        for parameter in module.parameters():
            parameter.data.normal_(0, 0.5)
    return model


def modules(model) -> Iterator[tuple[int, object]]:
    """(layer, its module of routed experts)."""
    for name, module in model.named_modules():
        if name.endswith(".experts") and next(module.parameters(), None) is not None:
            yield int(re.search(r"layers\.(\d+)\.", name)[1]), module
