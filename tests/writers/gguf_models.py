"""Tiny models of the architectures that ktmoe reads from one GGUF file: their configs as published, and random weights.

Hidden sizes are multiples of 256, so that Q4_K has rows to quantise. Weights are such that an error shows: norms and biases
are no identities, logits have spread. And such that rounding decides nothing: eight dimensions of the residual stream say
which two experts a token likes best, all routers read them, and no layer writes much into them.
"""

from __future__ import annotations

import functools
import re

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


def make(name: str):
    """The model, in bfloat16, as checkpoints are published."""
    import torch
    import transformers

    model_type, config, _, _ = MODELS[name]
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    model = transformers.AutoModelForCausalLM.from_config(kind(**config), dtype=torch.bfloat16).eval()
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(sum(name.encode()))
    size = 2.0
    if any("correction_bias" in key for key in model.state_dict()):
        size = 0.6  # a sigmoid makes large numbers alike
    elif config.get("n_group"):
        size = 0.3  # with large ones, an expert outweighs the others of its group
    depth = model.config.num_hidden_layers / 3
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if re.search(ROUTER, key):
                value.copy_(_router(value.shape, size, generator))
            elif not re.search(r"inv_freq|A_log", key):
                value.copy_(_values(key, value.shape, generator, model_type) / (depth if re.search(WRITES, key) else 1))
    return model


#: A router's class.
ROUTERS = "Top[kK]Router$"
#: A router's matrix.
ROUTER = r"(mlp\.gate|router|router\.layer)\.weight$"


#: What is added to what a router reads, in parts of it. llama.cpp's rounding of what Q4_K multiplies adds 0.03.
NOISE = 0.05
#: A matrix or bias whose result is added to the residual stream.
WRITES = r"(o_proj|out_proj|down_proj|output_linear)(\.weight|\.bias|_bias)?$"


def _router(shape, size: float, generator):
    """Each expert reads one of the first dimensions, and a little of all."""
    import torch

    values = 0.1 * size * shape[-1] ** -0.5 * torch.randn(shape, generator=generator)
    for expert, dimension in enumerate(torch.randperm(EXPERTS, generator=generator)[: len(values)]):
        values[expert, dimension] += size
    return values


def _values(key: str, shape, generator, model_type: str):
    """Of a parameter or a buffer of that name, in float32."""
    import torch

    values = torch.randn(shape, generator=generator)
    qwen3_next = model_type == "qwen3_next"
    if key.endswith("correction_bias"):
        # one expert is chosen for its bias alone, and one never
        first, last = torch.randperm(len(values), generator=generator)[:2]
        values *= 0.01
        values[first] += 1
        values[last] -= 1
    elif key.endswith("norm.weight"):
        values = 0.2 * values.clamp(-3, 3) + (0 if qwen3_next and "linear_attn" not in key else 1)
    elif key.endswith("embed_tokens.weight"):
        grades = torch.arange(EXPERTS, dtype=torch.float32) - 3
        for row in values:
            row[:EXPERTS] = 0.9 * grades[torch.randperm(EXPERTS, generator=generator)]
    elif len(shape) == 1 or key.endswith("_bias"):
        values *= 0.3
    else:
        values *= shape[-1] ** -0.5
        values *= 3 if key.endswith("lm_head.weight") else 2 if "gate_up_proj" in key else 1
    if re.search(WRITES, key):
        if (model_type == "gpt_oss" and key.endswith("experts.down_proj")) or len(shape) == 1 or key.endswith("_bias"):
            values[..., :EXPERTS] *= 0.05
        else:
            values[..., :EXPERTS, :] *= 0.05
    return values


def text(model):
    """Token ids, int64 [TOKENS], for which each router chooses the same experts if what it reads is a little another,
    but for three tokens at most.

    model: in float32. Raises ValueError if none is found.
    """
    import torch

    generator = torch.Generator().manual_seed(7)
    ids = torch.randperm(gguf_tokenizers.TRAINED, generator=generator)
    usual = ids[_steady(model, ids)]
    ids = usual[torch.randint(len(usual), (TOKENS,), generator=generator)]
    for allowed in (0, 0, 0, 0, 0, 1, 2, 3):
        bad = ~_steady(model, ids)
        if bad.sum() <= allowed:
            return ids.numpy()
        ids[bad] = usual[torch.randint(len(usual), (int(bad.sum()),), generator=generator)]
    raise ValueError(f"{type(model).__name__}: {bad.sum()} tokens are not steady")


def _steady(model, ids):
    """For each token of a text, whether noise changes no router's choice: bool [tokens]."""
    import torch

    read = []
    routers = [module for module in model.modules() if re.search(ROUTERS, type(module).__name__)]
    hooks = [router.register_forward_pre_hook(lambda module, given: read.append((module, given))) for router in routers]
    with torch.no_grad():
        model(ids[None])
        for hook in hooks:
            hook.remove()
        noise = NOISE * torch.randn((12, *read[0][1][0].shape[-2:]), generator=torch.Generator().manual_seed(8))
        good = torch.ones(len(ids), dtype=torch.bool)
        for router, (hidden, *rest) in read:
            noisy = hidden + hidden.square().mean().sqrt() * noise.view(-1, len(ids), hidden.shape[-1])
            chosen = _chosen(router, noisy.flatten(0, 1), *rest).view(len(noisy), len(ids), -1)
            good &= (chosen == _chosen(router, hidden, *rest)).all(-1).all(0)
    return good


def _chosen(router, *given):
    """Experts of each token, sorted: int64 [tokens, experts]."""
    *_, chosen = router(*given)
    return chosen.reshape(-1, chosen.shape[-1]).sort(-1).values


def score_groups(model, score) -> None:
    """DeepSeek-V2's routers choose groups of experts by another score. score: see GROUP_SCORES."""
    import torch

    def route(router, hidden):
        scores = (hidden.reshape(-1, hidden.shape[-1]).float() @ router.weight.float().T).softmax(-1)
        groups = scores.unflatten(-1, (router.num_group, -1))
        chosen = score(groups).topk(router.topk_group, -1).indices
        kept = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter_(1, chosen, True)
        weights, experts = (groups * kept[..., None]).flatten(-2).topk(router.top_k, -1)
        return scores, weights * router.routed_scaling_factor, experts

    for module in model.modules():
        if re.search(ROUTERS, type(module).__name__):
            module.forward = functools.partial(route, module)


def beside(name: str, tensors: dict) -> dict:
    """What a published checkpoint has and transformers leaves out: a layer that predicts the token after next."""
    import torch

    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    def layer(last: int, into: str):
        return {
            key.replace(f"model.layers.{last}.", into): value.clone()
            for key, value in tensors.items()
            if f"layers.{last}." in key
        }

    if name in ("glm4_moe", "deepseek_v3"):
        into = "model.layers.3."
        more = {f"{into}{key}.weight": normal(256) for key in ("enorm", "hnorm", "shared_head.norm")}
        more |= {f"{into}{key}.weight": normal(VOCABULARY, 256) for key in ("embed_tokens", "shared_head.head")}
        return layer(2, into) | more | {f"{into}eh_proj.weight": normal(256, 512)}
    if name == "qwen3_next":
        more = {f"mtp.{key}.weight": normal(256) for key in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        return layer(3, "mtp.layers.0.") | more | {"mtp.fc.weight": normal(256, 512)}
    return {}
