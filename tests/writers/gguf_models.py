"""Tiny models of the architectures that ktmoe reads from one GGUF file: their configs, as published.

Hidden sizes are multiples of 256, so that Q4_K has rows to quantise. gguf_weights.py has the numbers.
"""

from __future__ import annotations

import gguf_tokenizers

#: Ids of a tokenizer and some that it has no token for.
VOCABULARY = 640
EXPERTS = 8
#: Of the length of the text: sliding windows and yarn's original context are shorter.
TOKENS = 100

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": 600,
    "pad_token_id": None,
    "initializer_range": 0.02,
}
_QWEN = _COMMON | {"num_experts": EXPERTS, "intermediate_size": 512, "moe_intermediate_size": 256, "decoder_sparse_step": 1}
_DEEPSEEK = _COMMON | {
    "num_key_value_heads": 4,
    "n_routed_experts": EXPERTS,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 256,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_GRANITE = _COMMON | {
    "num_local_experts": EXPERTS,
    "intermediate_size": 256,
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.05,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

#: name -> (model_type, config, what the published config.json has and transformers' config class does not, tokenizer.ggml.pre)
MODELS: dict[str, tuple[str, dict, dict, str]] = {
    "gpt_oss": (
        "gpt_oss",
        _COMMON
        | {
            "num_local_experts": EXPERTS,
            "intermediate_size": 256,
            "head_dim": 64,
            "num_hidden_layers": 4,
            "sliding_window": 32,
            "rope_parameters": _YARN | {"rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
        {},
        "gpt-4o",
    ),
    "qwen2_moe": (
        "qwen2_moe",
        _QWEN
        | {
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        {},
        "qwen2",
    ),
    "qwen3_moe": (
        "qwen3_moe",
        _QWEN
        | {
            "head_dim": 128,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        {},
        "qwen2",
    ),
    "glm4_moe": (
        "glm4_moe",
        _COMMON
        | {
            "n_routed_experts": EXPERTS,
            "intermediate_size": 512,
            "moe_intermediate_size": 256,
            "head_dim": 64,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_mtp_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
        },
        {"num_nextn_predict_layers": 1},
        "glm4",
    ),
    "minimax_m2": (
        "minimax_m2",
        _COMMON
        | {
            "num_local_experts": EXPERTS,
            "intermediate_size": 256,
            "head_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
        },
        {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
        "minimax-m2",
    ),
    "deepseek_v2": (
        "deepseek_v2",
        _DEEPSEEK
        | {
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
            "rope_parameters": _YARN
            | {"rope_theta": 10000.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {"scoring_func": "softmax"},
        "deepseek-llm",
    ),
    # llama.cpp takes a model without q_lora_rank for one of 26 or 27 layers alone
    "deepseek_v2_lite": (
        "deepseek_v2",
        _DEEPSEEK
        | {
            "q_lora_rank": None,
            "num_hidden_layers": 26,
            "n_routed_experts": 4,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {"scoring_func": "softmax"},
        "deepseek-llm",
    ),
    "deepseek_v3": (
        "deepseek_v3",
        _DEEPSEEK
        | {
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_mtp_layers": 1,
            "rope_parameters": _YARN
            | {"rope_theta": 10000.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1},
        "deepseek-v3",
    ),
    "qwen3_next": (
        "qwen3_next",
        _QWEN
        | {
            "num_hidden_layers": 4,
            "head_dim": 128,
            "shared_expert_intermediate_size": 256,
            "norm_topk_prob": True,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        },
        {"full_attention_interval": 4},
        "qwen2",
    ),
    "mixtral": (
        "mixtral",
        _COMMON
        | {
            "num_local_experts": EXPERTS,
            "intermediate_size": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        {},
        gguf_tokenizers.SENTENCEPIECE,
    ),
    "olmoe": (
        "olmoe",
        _COMMON
        | {
            "num_experts": EXPERTS,
            "num_key_value_heads": 4,
            "intermediate_size": 256,
            "norm_topk_prob": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {},
        "olmo",
    ),
    "granitemoe": ("granitemoe", _GRANITE, {}, "refact"),
    "granitemoeshared": ("granitemoeshared", _GRANITE | {"shared_intermediate_size": 512}, {}, "llama-bpe"),
    "dots1": (
        "dots1",
        _COMMON
        | {
            "num_key_value_heads": 4,  # llama.cpp takes no others
            "n_routed_experts": EXPERTS,
            "intermediate_size": 512,
            "moe_intermediate_size": 256,
            "head_dim": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0},
        },
        {"scoring_func": "sigmoid"},
        "qwen2",
    ),
}
_OTHER: dict[str, tuple[str, dict, dict]] = {
    "gpt_oss_published": ("gpt_oss", {}, {}),
    "deepseek_v2_groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, {}),
    # what llama.cpp and its converter refuse, and would take with the config above
    "deepseek_v2_small": ("deepseek_v2_lite", {"num_hidden_layers": 3}, {}),
    "dots1_published": ("dots1", {}, {"scoring_func": "noaux_tc"}),
}
MODELS |= {
    name: (MODELS[of][0], MODELS[of][1] | config, MODELS[of][2] | published, MODELS[of][3])
    for name, (of, config, published) in _OTHER.items()
}
#: Those whose experts are published in MXFP4.
MXFP4 = ("gpt_oss_published",)
#: Those of which the converter makes a split file, too.
SPLIT = ("qwen2_moe",)
#: What files are made of a model, if not of each type. F16 has experts in MXFP4 if they are published so.
TYPES = ("F16", "Q8_0", "Q4_K_M", "MXFP4")
FEWER = {
    "gpt_oss_published": ("F16",),
    "deepseek_v2_groups": ("F16",),
    "deepseek_v2_small": ("F16",),
    "deepseek_v2_lite": ("F16", "Q4_K_M"),
    "dots1_published": (),
}
#: Models of which llama.cpp computes something else than transformers does: what a config would say if it meant that, ...
AS_LLAMA_CPP = {name: {"rope_parameters": {"truncate": True}} for name in ("gpt_oss", "gpt_oss_published")}
#: ... and how a group of experts is scored, whose probabilities are [..., experts of it].
GROUP_SCORES = {"deepseek_v2_groups": lambda scores: scores.topk(2, -1).values.sum(-1)}
