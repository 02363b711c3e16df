"""What most GGUF models' config.json would say, by their metadata, and what they must not say."""

from __future__ import annotations

from collections.abc import Mapping

from ktmoe.transformers.gguf.metadata import GgufMetadata

#: Values of expert_gating_func.
SOFTMAX, SIGMOID = 1, 2
#: Special tokens of config.json, and GGUF's words for them.
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
#: Keys that llama.cpp computes with, and transformers' models do not; and their values that change nothing.
_NEUTRAL = {
    "attention.causal": True,
    "attention.temperature_scale": 0,
    "attention.max_alibi_bias": 0,
    "rope.scaling.attn_factor": 1,
}


def common(of: GgufMetadata) -> dict:
    """What nearly all have. Refuses keys that would change what is computed."""
    for key, neutral in _NEUTRAL.items():
        of.without(key, neutral)
    heads, experts = of.count("attention.head_count", least=1), of.count("expert_count", 0)
    shared = of.count("attention.head_count_kv", heads, 1, heads)
    if heads % shared:
        raise of.refuse("attention.head_count_kv", f"a divisor of attention.head_count, {heads}")
    return {
        "vocab_size": of.rows("token_embd.weight"),
        "hidden_size": of.count("embedding_length", least=1),
        "num_hidden_layers": of.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "intermediate_size": of.count("feed_forward_length", 0),
        "num_experts_per_tok": of.count("expert_used_count", least=1, most=max(1, experts)),
        "max_position_embeddings": of.count("context_length", least=1),
        "rms_norm_eps": of.number("attention.layer_norm_rms_epsilon", above=0),
        "rope_parameters": _rope(of),
        "tie_word_embeddings": "output.weight" not in of.checkpoint,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        **{f"{what}_token_id": _token(of, key) for what, key in _TOKENS.items()},
    }


def _token(of: GgufMetadata, key: str) -> int | None:
    """A token's id, as the tokenizer has checked it; None, so that no model's own default stays."""
    found = of.checkpoint.config.get(f"tokenizer.ggml.{key}_token_id")
    return found if type(found) is int else None


def _rope(of: GgufMetadata) -> dict:
    """rope_parameters. Scaling of another kind than linear and YaRN is refused."""
    found = {"rope_type": "default", "rope_theta": of.number("rope.freq_base", 10000.0, above=1)}
    kind, factor = of.text("rope.scaling.type", "linear"), of.number("rope.scaling.factor", 0.0, above=-1)
    factor = factor or of.number("rope.scale_linear", 0.0, above=-1)
    if kind not in ("none", "linear", "yarn"):
        raise of.refuse("rope.scaling.type", "'none', 'linear' or 'yarn'")
    if kind == "none" or factor in (0, 1):
        return found
    if factor < 1:
        raise of.refuse("rope.scaling.factor", "a number, 1 or more")
    found |= {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return found
    original = of.count("rope.scaling.original_context_length", of.count("context_length"), least=1)
    found["original_max_position_embeddings"] = original
    for name, usual in (("fast", 32.0), ("slow", 1.0)):
        key = f"rope.scaling.yarn_beta_{name}"
        found[f"beta_{name}"] = of.number(key, usual, above=0)
        if found[f"beta_{name}"] > original:
            raise of.refuse(key, f"at most the original context, {original}")
    if attention := of.number("rope.scaling.yarn_attn_factor", 0.0, above=-1):
        found["attention_factor"] = attention
    return found


def head_dim(of: GgufMetadata, config: dict, partial: bool = False) -> int:
    """Of keys and of values, which must be the same. partial: whether some dimensions may stay without rotation."""
    size = of.count("attention.key_length", max(1, config["hidden_size"] // config["num_attention_heads"]), least=1)
    if of.count("attention.value_length", size) != size:
        raise of.refuse("attention.value_length", f"{size}, as attention.key_length")
    turned = of.count("rope.dimension_count", size, 2, size)
    if turned % 2 or (turned != size and not partial):
        raise of.refuse("rope.dimension_count", "an even number" if partial else f"{size}, as attention.key_length, and even")
    return size


def rotated(of: GgufMetadata, head_dim: int) -> float:
    """partial_rotary_factor."""
    return of.count("rope.dimension_count", head_dim) / head_dim


def gating(of: GgufMetadata, known: Mapping[int, str], default: int) -> str:
    found = of.count("expert_gating_func", 0) or default
    if found not in known:
        raise of.refuse("expert_gating_func", " or ".join(f"{number} ({name})" for number, name in known.items()))
    return known[found]


def biased(of: GgufMetadata) -> bool:
    """Whether q, k and v have biases."""
    return of.has("attn_q.bias") or of.has("attn_qkv.bias")


def experts_width(of: GgufMetadata, config: dict) -> int:
    return of.count("expert_feed_forward_length", 0) or config["intermediate_size"]
