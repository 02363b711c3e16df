"""What config.json would say of a GGUF model, by its metadata: a function for each architecture of DeepSeek's kind.

The facts are those of llama.cpp (conversion/ and src/models/ of what llama-cpp-python 0.3.36 ships) and of the models' classes
in transformers.
"""

from __future__ import annotations

from ktmoe.transformers.gguf.common_config import SIGMOID, SOFTMAX, biased, common, gating, head_dim, rotated
from ktmoe.transformers.gguf.metadata import GgufMetadata


def _shared_and_scaled(of: GgufMetadata) -> dict:
    """Of the models after DeepSeek-V3: groups of experts, shared experts, and what router weights are multiplied by."""
    experts, groups = of.count("expert_count", least=1), max(1, of.count("expert_group_count", 1))
    if groups > 1 and (experts % groups or experts // groups < 2):
        raise of.refuse("expert_group_count", f"groups of equally many of {experts} experts, of two at least")
    return {
        "n_routed_experts": experts,
        "n_shared_experts": of.count("expert_shared_count", 0),
        "n_group": groups,
        "topk_group": max(1, of.count("expert_group_used_count", 1, most=groups)),
        "first_k_dense_replace": of.count("leading_dense_block_count", 0),
        "routed_scaling_factor": of.number("expert_weights_scale", 0.0) or 1.0,
        "moe_intermediate_size": of.count("expert_feed_forward_length", least=1),
    }


def glm4moe(of: GgufMetadata) -> dict:
    found = common(of)
    gating(of, {SIGMOID: "sigmoid"}, SIGMOID)
    found["head_dim"] = head_dim(of, found, partial=True)
    found["rope_parameters"]["partial_rotary_factor"] = rotated(of, found["head_dim"])
    return (
        found
        | _shared_and_scaled(of)
        | {
            "model_type": "glm4_moe",
            "norm_topk_prob": of.flag("expert_weights_norm", False),
            "attention_bias": biased(of),
            "use_qk_norm": of.has("attn_q_norm.weight"),
        }
    )


def dots1(of: GgufMetadata) -> dict:
    found = common(of)
    gating(of, {SIGMOID: "sigmoid"}, SIGMOID)
    return (
        found
        | _shared_and_scaled(of)
        | {
            "model_type": "dots1",
            "head_dim": head_dim(of, found),
            "norm_topk_prob": of.flag("expert_weights_norm", False),
            "attention_bias": biased(of),
            "sliding_window": None,
        }
    )


def deepseek2(of: GgufMetadata) -> dict:
    """DeepSeek-V2, whose router has a softmax, or DeepSeek-V3, whose router has a sigmoid and corrects its choice."""
    found = common(of) | _shared_and_scaled(of)
    usual = SIGMOID if of.has("exp_probs_b.bias") else SOFTMAX  # files of some models do not say it
    function = gating(of, {SOFTMAX: "softmax", SIGMOID: "sigmoid"}, usual)
    if function == "softmax":  # DeepSeek-V2's class does not know it
        of.without("expert_weights_norm", False)
    mla = of.count("attention.key_length_mla", 0)  # key_length is that of the latents then
    key = mla or of.count("attention.key_length")
    value = of.count("attention.value_length_mla", least=1) if mla else of.count("attention.value_length", least=1)
    turned = of.count("rope.dimension_count", least=2, most=max(2, key - 1))
    if turned % 2:
        raise of.refuse("rope.dimension_count", "an even number")
    rope = found["rope_parameters"]
    if rope["rope_type"] == "yarn" and (scale := of.number("rope.scaling.yarn_log_multiplier", 0.0)):
        # it is a tenth of mscale_all_dim, and llama.cpp too takes mscale to be the same number
        rope["mscale"] = rope["mscale_all_dim"] = round(10 * scale, 6)
    grouped = found["n_group"] > 1
    return found | {
        "model_type": "deepseek_v3" if function == "sigmoid" else "deepseek_v2",
        "num_key_value_heads": found["num_attention_heads"],
        "q_lora_rank": of.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": of.count("attention.kv_lora_rank", least=1),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": value,
        "norm_topk_prob": of.flag("expert_weights_norm", False),
        "topk_method": "noaux_tc" if function == "sigmoid" else "group_limited_greedy" if grouped else "greedy",
        "attention_bias": False,
    }
