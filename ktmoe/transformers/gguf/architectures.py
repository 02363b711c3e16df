"""GGUF architectures that become models of transformers: a row each, with what config.json would say, and names of tensors.

The facts are those of llama.cpp (conversion/ and src/models/ of what llama-cpp-python 0.3.36 ships) and of the models' classes
in transformers. Names that all rows share are in names.py. An architecture without a row is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ktmoe.errors import FormatError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.gguf_model import ARCHITECTURE
from ktmoe.messages import show
from ktmoe.transformers.gguf.changes import BY_KEY_HEADS, INTERLEAVED, QWEN3_NEXT, Change, Order
from ktmoe.transformers.gguf.metadata import GgufMetadata

#: Values of expert_gating_func.
_SOFTMAX, _SIGMOID = 1, 2


@dataclass(frozen=True)
class TextArchitecture:
    """config: of the metadata, what config.json would have; with model_type.

    names: modules of a layer by GGUF's stems, or parameters by GGUF's names, where they are not those of names.py. If several
    stems are one module, its rows are theirs in this order. orders, changes: what the converter did to modules and parameters
    of a layer, see changes.py.
    """

    config: Callable[[GgufMetadata], dict]
    names: Mapping[str, str] = field(default_factory=dict)
    orders: Mapping[str, Order] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)


def find(checkpoint: Checkpoint) -> TextArchitecture:
    """The row of a checkpoint's architecture. Raises FormatError, which names it, if there is none."""
    name = checkpoint.config.get(ARCHITECTURE)
    row = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if row is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise FormatError(
            f"{checkpoint.path}: {ARCHITECTURE}: text needs one of {known}; found {show(name)}. Of other architectures, "
            "ktmoe.MoEModel.from_checkpoint() reads the experts"
        )
    return row


def _common(of: GgufMetadata) -> dict:
    """What nearly all have."""
    heads = of.count("attention.head_count")
    tied = "output.weight" not in of.checkpoint
    return {
        "vocab_size": of.rows("token_embd.weight"),
        "hidden_size": of.count("embedding_length"),
        "num_hidden_layers": of.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": of.count("attention.head_count_kv", heads),
        "intermediate_size": of.count("feed_forward_length", 0),
        "num_experts_per_tok": of.count("expert_used_count"),
        "max_position_embeddings": of.count("context_length"),
        "rms_norm_eps": of.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(of),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    }


def _rope(of: GgufMetadata) -> dict:
    """rope_parameters. Scaling of another kind than linear and YaRN is refused."""
    found = {"rope_type": "default", "rope_theta": of.number("rope.freq_base", 10000.0)}
    kind, factor = of.text("rope.scaling.type", "linear"), of.number("rope.scaling.factor", 0.0)
    factor = factor or of.number("rope.scale_linear", 0.0)
    if kind not in ("none", "linear", "yarn"):
        raise of.refuse("rope.scaling.type", "'none', 'linear' or 'yarn'")
    if kind == "none" or factor in (0, 1):
        return found
    found |= {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return found
    found["original_max_position_embeddings"] = of.count("rope.scaling.original_context_length", of.count("context_length"))
    found["beta_fast"] = of.number("rope.scaling.yarn_beta_fast", 32.0)
    found["beta_slow"] = of.number("rope.scaling.yarn_beta_slow", 1.0)
    if attention := of.number("rope.scaling.yarn_attn_factor", 0.0):
        found["attention_factor"] = attention
    return found


def _head_dim(of: GgufMetadata, config: dict) -> int:
    """Of keys and of values, which must be the same."""
    size = of.count("attention.key_length", config["hidden_size"] // max(1, config["num_attention_heads"]))
    if of.count("attention.value_length", size) != size:
        raise of.refuse("attention.value_length", f"{size}, as attention.key_length")
    return size


def _rotated(of: GgufMetadata, head_dim: int) -> float:
    """partial_rotary_factor."""
    return of.count("rope.dimension_count", head_dim) / max(1, head_dim)


def _gating(of: GgufMetadata, known: Mapping[int, str], default: int) -> str:
    found = of.count("expert_gating_func", 0) or default
    if found not in known:
        raise of.refuse("expert_gating_func", " or ".join(f"{number} ({name})" for number, name in known.items()))
    return known[found]


def _biased(of: GgufMetadata) -> bool:
    """Whether q, k and v have biases."""
    return of.has("attn_q.bias") or of.has("attn_qkv.bias")


def _dense_layers(of: GgufMetadata) -> list[int]:
    """Layers without a router, which have a dense MLP."""
    return [layer for layer in range(of.layers) if f"blk.{layer}.ffn_gate_inp.weight" not in of.checkpoint]


def _experts_width(of: GgufMetadata, config: dict) -> int:
    return of.count("expert_feed_forward_length", 0) or config["intermediate_size"]


def _without_weights_scale(of: GgufMetadata) -> None:
    if of.number("expert_weights_scale", 0.0) not in (0, 1):
        raise of.refuse("expert_weights_scale", "1")


def _gpt_oss(of: GgufMetadata) -> dict:
    found = _common(of)
    if of.count("attention.sliding_window_pattern", 2) != 2:
        raise of.refuse("attention.sliding_window_pattern", "2: every second layer has a window")
    if found["rope_parameters"]["rope_type"] == "yarn":
        found["rope_parameters"]["truncate"] = False  # as the model has it; the file does not say it
    return found | {
        "model_type": "gpt_oss",
        "head_dim": _head_dim(of, found),
        "num_local_experts": of.count("expert_count"),
        "intermediate_size": _experts_width(of, found),
        "sliding_window": of.count("attention.sliding_window"),
        "attention_bias": _biased(of),
    }


def _qwen(of: GgufMetadata, model_type: str, normalised: bool, **more: object) -> dict:
    found = _common(of)
    _without_weights_scale(of)
    return found | {
        "model_type": model_type,
        "head_dim": _head_dim(of, found),
        "num_experts": of.count("expert_count"),
        "moe_intermediate_size": of.count("expert_feed_forward_length", 0) or _stored_width(of),
        "norm_topk_prob": normalised,
        "mlp_only_layers": _dense_layers(of),
        "decoder_sparse_step": 1,
        "attention_bias": _biased(of),
        "use_sliding_window": False,
        **more,
    }


def _stored_width(of: GgufMetadata) -> int:
    """The experts' width by the first layer's tensors; files of 2024 lack the key."""
    return of.rows("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight")


def _shared_width(of: GgufMetadata) -> int:
    return of.count("expert_shared_feed_forward_length", 0) or of.rows("blk.0.ffn_gate_shexp.weight")


def _qwen2moe(of: GgufMetadata) -> dict:
    return _qwen(of, "qwen2_moe", False, shared_expert_intermediate_size=_shared_width(of), qkv_bias=_biased(of))


def _qwen3moe(of: GgufMetadata) -> dict:
    return _qwen(of, "qwen3_moe", True)


def _qwen3next(of: GgufMetadata) -> dict:
    recurrent, interval = of.flags("attention.recurrent_layers"), of.count("full_attention_interval", 4)
    if recurrent is None:
        recurrent = [bool((layer + 1) % max(1, interval)) for layer in range(of.layers)]
    values = of.count("ssm.time_step_rank")
    found = _qwen(
        of,
        "qwen3_next",
        True,
        shared_expert_intermediate_size=_shared_width(of),
        linear_conv_kernel_dim=of.count("ssm.conv_kernel"),
        linear_key_head_dim=of.count("ssm.state_size"),
        linear_value_head_dim=of.count("ssm.inner_size") // max(1, values),
        linear_num_key_heads=of.count("ssm.group_count"),
        linear_num_value_heads=values,
        layer_types=["linear_attention" if each else "full_attention" for each in recurrent],
    )
    found["rope_parameters"]["partial_rotary_factor"] = _rotated(of, found["head_dim"])
    return found


def _shared_and_scaled(of: GgufMetadata) -> dict:
    """Of the models after DeepSeek-V3: groups of experts, shared experts, and what router weights are multiplied by."""
    return {
        "n_routed_experts": of.count("expert_count"),
        "n_shared_experts": of.count("expert_shared_count", 0),
        "n_group": max(1, of.count("expert_group_count", 1)),
        "topk_group": max(1, of.count("expert_group_used_count", 1)),
        "first_k_dense_replace": of.count("leading_dense_block_count", 0),
        "routed_scaling_factor": of.number("expert_weights_scale", 0.0) or 1.0,
        "moe_intermediate_size": of.count("expert_feed_forward_length"),
    }


def _glm4moe(of: GgufMetadata) -> dict:
    found = _common(of)
    _gating(of, {_SIGMOID: "sigmoid"}, _SIGMOID)
    found["head_dim"] = _head_dim(of, found)
    found["rope_parameters"]["partial_rotary_factor"] = _rotated(of, found["head_dim"])
    return (
        found
        | _shared_and_scaled(of)
        | {
            "model_type": "glm4_moe",
            "norm_topk_prob": of.flag("expert_weights_norm", False),
            "attention_bias": _biased(of),
            "use_qk_norm": of.has("attn_q_norm.weight"),
        }
    )


def _dots1(of: GgufMetadata) -> dict:
    found = _common(of)
    _gating(of, {_SIGMOID: "sigmoid"}, _SIGMOID)
    return (
        found
        | _shared_and_scaled(of)
        | {
            "model_type": "dots1",
            "head_dim": _head_dim(of, found),
            "norm_topk_prob": of.flag("expert_weights_norm", False),
            "attention_bias": _biased(of),
            "sliding_window": None,
        }
    )


def _minimax_m2(of: GgufMetadata) -> dict:
    found = _common(of)
    _gating(of, {_SIGMOID: "sigmoid"}, _SIGMOID)
    _without_weights_scale(of)
    head_dim = _head_dim(of, found)
    rotated = of.count("rope.dimension_count", head_dim)
    found["rope_parameters"]["partial_rotary_factor"] = rotated / max(1, head_dim)
    return found | {
        "model_type": "minimax_m2",
        "head_dim": head_dim,
        "rotary_dim": rotated,
        "num_local_experts": of.count("expert_count"),
        "intermediate_size": _experts_width(of, found),
    }


def _deepseek2(of: GgufMetadata) -> dict:
    """DeepSeek-V2 by softmax, DeepSeek-V3 and Kimi-K2 by sigmoid."""
    found = _common(of) | _shared_and_scaled(of)
    gating = _gating(of, {_SOFTMAX: "softmax", _SIGMOID: "sigmoid"}, _SOFTMAX)
    rotated, lora = of.count("rope.dimension_count"), of.count("attention.kv_lora_rank")
    mla = of.count("attention.key_length_mla", 0)  # key_length is that of the latents then
    key = mla or of.count("attention.key_length")
    value = of.count("attention.value_length_mla", 0) if mla else of.count("attention.value_length")
    rope = found["rope_parameters"]
    if rope["rope_type"] == "yarn" and (scale := of.number("rope.scaling.yarn_log_multiplier", 0.0)):
        # it is a tenth of mscale_all_dim, and llama.cpp too takes mscale to be the same number
        rope["mscale"] = rope["mscale_all_dim"] = round(10 * scale, 6)
    grouped = found["n_group"] > 1
    return found | {
        "model_type": "deepseek_v3" if gating == "sigmoid" else "deepseek_v2",
        "num_key_value_heads": found["num_attention_heads"],
        "q_lora_rank": of.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": lora,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "norm_topk_prob": of.flag("expert_weights_norm", False),
        "topk_method": "noaux_tc" if gating == "sigmoid" else "group_limited_greedy" if grouped else "greedy",
        "attention_bias": False,
    }


def _llama(of: GgufMetadata) -> dict:
    """Mixtral, if it has experts."""
    found = _common(of)
    _without_weights_scale(of)
    if not of.count("expert_count", 0):
        raise of.refuse("expert_count", "a number above 0, as ktmoe is for models with experts")
    return found | {
        "model_type": "mixtral",
        "head_dim": _head_dim(of, found),
        "num_local_experts": of.count("expert_count"),
        "sliding_window": None,
    }


def _olmoe(of: GgufMetadata) -> dict:
    found = _common(of)
    _without_weights_scale(of)
    return found | {
        "model_type": "olmoe",
        "num_experts": of.count("expert_count"),
        "intermediate_size": _experts_width(of, found),
        "norm_topk_prob": False,
        "clip_qkv": of.number("attention.clamp_kqv", None),
    }


def _granitemoe(of: GgufMetadata) -> dict:
    found = _common(of)
    shared = of.rows("blk.0.ffn_gate_shexp.weight", default=0)
    return found | {
        "model_type": "granitemoeshared" if shared else "granitemoe",
        "num_local_experts": of.count("expert_count"),
        "intermediate_size": _experts_width(of, found),
        "shared_intermediate_size": shared,
        "logits_scaling": of.number("logit_scale"),
        "residual_multiplier": of.number("residual_scale", 0.0) or 1.0,
        "embedding_multiplier": of.number("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": of.number("attention.scale", 0.0) or _head_dim(of, found) ** -0.5,
    }


_SHARED_EXPERT = {f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
#: By general.architecture.
ARCHITECTURES = {
    "deepseek2": TextArchitecture(_deepseek2),
    "dots1": TextArchitecture(_dots1),
    "glm4moe": TextArchitecture(_glm4moe),
    "gpt-oss": TextArchitecture(_gpt_oss, {"ffn_gate_inp": "mlp.router"}),
    "granitemoe": TextArchitecture(
        _granitemoe,
        {
            "ffn_gate_inp": "block_sparse_moe.router",
            "ffn_gate_shexp": "shared_mlp.input_linear",
            "ffn_up_shexp": "shared_mlp.input_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        orders=INTERLEAVED,
    ),
    "llama": TextArchitecture(_llama, orders=INTERLEAVED),
    "minimax-m2": TextArchitecture(_minimax_m2, {"exp_probs_b.bias": "mlp.e_score_correction_bias"}),
    "olmoe": TextArchitecture(_olmoe),
    "qwen2moe": TextArchitecture(_qwen2moe, _SHARED_EXPERT),
    "qwen3moe": TextArchitecture(_qwen3moe),
    "qwen3next": TextArchitecture(
        _qwen3next,
        _SHARED_EXPERT | {"attn_qkv": "linear_attn.in_proj_qkvz", "attn_gate": "linear_attn.in_proj_qkvz"},
        BY_KEY_HEADS,
        QWEN3_NEXT,
    ),
}
