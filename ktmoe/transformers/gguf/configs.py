"""What config.json would say of a GGUF model, by its metadata: a function for each architecture but those of DeepSeek's kind.

The facts are those of llama.cpp (conversion/ and src/models/ of what llama-cpp-python 0.3.36 ships) and of the models' classes
in transformers.
"""

from __future__ import annotations

from ktmoe.transformers.gguf.common_config import SIGMOID, biased, common, experts_width, gating, head_dim, rotated
from ktmoe.transformers.gguf.metadata import GgufMetadata


def gpt_oss(of: GgufMetadata) -> dict:
    found = common(of)
    of.without("attention.sliding_window_pattern", 2, [layer % 2 == 0 for layer in range(of.layers)])
    if found["rope_parameters"]["rope_type"] == "yarn":
        found["rope_parameters"]["truncate"] = False  # as the model has it; the file does not say it
    return found | {
        "model_type": "gpt_oss",
        "head_dim": head_dim(of, found),
        "num_local_experts": of.count("expert_count"),
        "intermediate_size": experts_width(of, found),
        "sliding_window": of.count("attention.sliding_window"),
        "attention_bias": biased(of),
    }


def _dense_layers(of: GgufMetadata) -> list[int]:
    """Layers without a router, which have a dense MLP."""
    return [layer for layer in range(of.layers) if f"blk.{layer}.ffn_gate_inp.weight" not in of.checkpoint]


def _qwen(of: GgufMetadata, model_type: str, normalised: bool, partial: bool = False, **more: object) -> dict:
    found = common(of)
    of.without("expert_weights_scale", 0, 1)
    return found | {
        "model_type": model_type,
        "head_dim": head_dim(of, found, partial),
        "num_experts": of.count("expert_count"),
        "moe_intermediate_size": of.count("expert_feed_forward_length", 0) or _stored_width(of),
        "norm_topk_prob": normalised,
        "mlp_only_layers": _dense_layers(of),
        "decoder_sparse_step": 1,
        "attention_bias": biased(of),
        "use_sliding_window": False,
        **more,
    }


def _stored_width(of: GgufMetadata) -> int:
    """The experts' width by the first layer's tensors; files of 2024 lack the key."""
    return of.rows("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight")


def _shared_width(of: GgufMetadata) -> int:
    return of.count("expert_shared_feed_forward_length", 0) or of.rows("blk.0.ffn_gate_shexp.weight")


def qwen2moe(of: GgufMetadata) -> dict:
    return _qwen(of, "qwen2_moe", False, shared_expert_intermediate_size=_shared_width(of), qkv_bias=biased(of))


def qwen3moe(of: GgufMetadata) -> dict:
    return _qwen(of, "qwen3_moe", True)


def qwen3next(of: GgufMetadata) -> dict:
    recurrent, interval = of.flags("attention.recurrent_layers"), of.count("full_attention_interval", 4, least=1)
    if recurrent is None:
        recurrent = [bool((layer + 1) % interval) for layer in range(of.layers)]
    if all(recurrent):  # transformers takes the length of a text from such a layer's cache
        raise of.refuse("full_attention_interval", f"one of {of.layers} layers, at least, with full attention")
    keys, values = of.count("ssm.group_count", least=1), of.count("ssm.time_step_rank", least=1)
    if values % keys:
        raise of.refuse("ssm.time_step_rank", f"a multiple of ssm.group_count, {keys}")
    found = _qwen(
        of,
        "qwen3_next",
        True,
        partial=True,
        shared_expert_intermediate_size=_shared_width(of),
        linear_conv_kernel_dim=of.count("ssm.conv_kernel", least=1),
        linear_key_head_dim=of.count("ssm.state_size", least=1),
        linear_value_head_dim=of.count("ssm.inner_size", least=values) // values,
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        layer_types=["linear_attention" if each else "full_attention" for each in recurrent],
    )
    found["rope_parameters"]["partial_rotary_factor"] = rotated(of, found["head_dim"])
    return found


def minimax_m2(of: GgufMetadata) -> dict:
    found = common(of)
    gating(of, {SIGMOID: "sigmoid"}, SIGMOID)
    of.without("expert_weights_scale", 0, 1)
    size = head_dim(of, found, partial=True)
    found["rope_parameters"]["partial_rotary_factor"] = rotated(of, size)
    return found | {
        "model_type": "minimax_m2",
        "head_dim": size,
        "rotary_dim": of.count("rope.dimension_count", size),
        "num_local_experts": of.count("expert_count"),
        "intermediate_size": experts_width(of, found),
    }


def llama(of: GgufMetadata) -> dict:
    """Mixtral, if it has experts."""
    found = common(of)
    of.without("expert_weights_scale", 0, 1)
    if not of.count("expert_count", 0):
        raise of.refuse("expert_count", "a number above 0, as ktmoe is for models with experts")
    return found | {
        "model_type": "mixtral",
        "head_dim": head_dim(of, found),
        "num_local_experts": of.count("expert_count"),
        "sliding_window": None,
    }


def olmoe(of: GgufMetadata) -> dict:
    found = common(of)
    of.without("expert_weights_scale", 0, 1)
    return found | {
        "model_type": "olmoe",
        "num_experts": of.count("expert_count"),
        "intermediate_size": experts_width(of, found),
        "norm_topk_prob": False,
        "clip_qkv": of.number("attention.clamp_kqv", None),
    }


def granitemoe(of: GgufMetadata) -> dict:
    found = common(of)
    shared = of.rows("blk.0.ffn_gate_shexp.weight", default=0)
    return found | {
        "model_type": "granitemoeshared" if shared else "granitemoe",
        "num_local_experts": of.count("expert_count"),
        "intermediate_size": experts_width(of, found),
        "shared_intermediate_size": shared,
        "logits_scaling": of.number("logit_scale"),
        "residual_multiplier": of.number("residual_scale", 0.0) or 1.0,
        "embedding_multiplier": of.number("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": of.number("attention.scale", 0.0) or head_dim(of, found) ** -0.5,
    }
