"""Small models of transformers as whole GGUF files with the same numbers, by the package gguf. Names are told by hand."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from transformers import PreTrainedModel

from ktmoe.synthetic.chat import TEMPLATE

F32, BF16 = GGMLQuantizationType.F32, GGMLQuantizationType.BF16
#: model_type -> general.architecture.
ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "gpt_oss": "gpt-oss",
    "granitemoeshared": "granitemoe",
    "deepseek_v3": "deepseek2",
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
Tensors = dict[str, np.ndarray]


def write(
    model: PreTrainedModel,
    file: Path,
    *,
    fused: bool = False,
    types: Mapping[str, GGMLQuantizationType] | None = None,
    keys: Mapping[str, object] | None = None,
    without: Collection[str] = (),
    change=None,
    architecture: str | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Write a model, whose matrices stay bfloat16.

    fused: q, k and v are one tensor. types: of tensors by parts of their names, in the place of bfloat16. keys: more metadata,
    behind the architecture's name; without: less of it. change: called with the tensors, float32, before they are written.
    split_max_tensors: of a file of several, 0 for one file.
    """
    config = model.config.to_dict()
    architecture = architecture or ARCHITECTURES[config["model_type"]]
    tensors = {name: array for name, array in _tensors(model, config) if array is not None}
    if fused:
        _fuse(tensors, config["num_hidden_layers"])
    made = dict(tensors)
    if change:
        change(tensors)
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split_max_tensors)
    metadata = _metadata(config, made) | dict(keys or {})
    for key, value in metadata.items():
        if key in without:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    add_tokenizer(writer, config["vocab_size"])
    for name, array in tensors.items():
        kind = next((kind for part, kind in (types or {}).items() if part in name), BF16 if _is_matrix(name, array) else F32)
        writer.add_tensor(name, gguf.quantize(array, kind) if kind != F32 else array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_tokenizer(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """Bytes, of which no two are merged but "t" and "h"; the first tokens are special."""
    letters = [chr(byte) for byte in range(33, 127)] + ["Ġ", "Ċ"]
    special = ["<|end|>", "<pad>"]
    tokens = [*special, "th", *letters, *(f"[PAD{number}]" for number in range(vocabulary))][:vocabulary]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (1 + len(letters)) + [5] * max(0, vocabulary - 3 - len(letters)))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(1)
    writer.add_chat_template(TEMPLATE)


def _is_matrix(name: str, array: np.ndarray) -> bool:
    return array.ndim > 1 and "gate_inp" not in name


def _tensors(model: PreTrainedModel, config: dict) -> Iterator[tuple[str, np.ndarray | None]]:
    tied = model.config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        values = parameter.float().numpy()
        if name in _NAMES:
            yield _NAMES[name], None if tied and name == "lm_head.weight" else values
            continue
        _, _, layer, rest = name.split(".", 3)
        module, _, ending = rest.rpartition(".")
        block = f"blk.{layer}."
        if ".experts" in rest:
            yield from _experts(block, rest, values, config)
        elif rest == "self_attn.sinks":
            yield f"{block}attn_sinks.weight", values
        elif ending == "e_score_correction_bias":
            yield f"{block}exp_probs_b.bias", values
        elif module == "shared_mlp.input_linear":
            half = len(values) // 2
            yield f"{block}ffn_gate_shexp.weight", values[:half]
            yield f"{block}ffn_up_shexp.weight", values[half:]
        elif module == "self_attn.kv_b_proj":
            nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
            heads = values.reshape(-1, nope + value, values.shape[1])
            yield f"{block}attn_k_b.weight", np.ascontiguousarray(heads[:, :nope].transpose(0, 2, 1))
            yield f"{block}attn_v_b.weight", np.ascontiguousarray(heads[:, nope:])
        else:
            stem = _NAMES[module]
            if config["model_type"] == "gpt_oss" and stem == "ffn_norm":
                stem = "post_attention_norm"
            if config["model_type"] in ("mixtral", "granitemoeshared") and stem in ("attn_q", "attn_k"):
                heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
                # the two halves of each head's rows in turn
                values = np.stack(np.split(values.reshape(heads, -1, values.shape[1]), 2, 1), 2).reshape(values.shape)
            yield f"{block}{stem}.{ending}", values


def _experts(block: str, rest: str, values: np.ndarray, config: dict) -> Iterator[tuple[str, np.ndarray]]:
    ending = "bias" if rest.endswith("_bias") else "weight"
    if config["model_type"] == "gpt_oss" and ending == "weight":
        values = values.transpose(0, 2, 1)  # [experts, outputs, inputs]
    values = np.ascontiguousarray(values)
    if "down" in rest:
        yield f"{block}ffn_down_exps.{ending}", values
    elif config["model_type"] == "gpt_oss":
        yield f"{block}ffn_gate_exps.{ending}", np.ascontiguousarray(values[:, ::2])
        yield f"{block}ffn_up_exps.{ending}", np.ascontiguousarray(values[:, 1::2])
    else:
        half = values.shape[1] // 2
        yield f"{block}ffn_gate_exps.weight", values[:, :half]
        yield f"{block}ffn_up_exps.weight", values[:, half:]


def _fuse(tensors: Tensors, layers: int) -> None:
    for layer in range(layers):
        for ending in ("weight", "bias"):
            names = [f"blk.{layer}.attn_{part}.{ending}" for part in "qkv"]
            if names[0] in tensors:
                tensors[f"blk.{layer}.attn_qkv.{ending}"] = np.concatenate([tensors.pop(name) for name in names])


def _metadata(config: dict, tensors: Tensors) -> dict[str, object]:
    """What llama.cpp's converter would write."""
    kind, rope = config["model_type"], config["rope_parameters"]
    experts = next(array for name, array in tensors.items() if "ffn_up_exps.weight" in name)
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": experts.shape[1],
        "expert_count": experts.shape[0],
        "expert_used_count": config["num_experts_per_tok"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if kind in ("qwen3_moe", "gpt_oss", "mixtral"):
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        found |= {"attention.key_length": size, "attention.value_length": size}
    if kind == "gpt_oss":
        found["attention.sliding_window"] = config["sliding_window"]
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if kind == "granitemoeshared":
        found |= {
            "logit_scale": float(config["logits_scaling"]),
            "residual_scale": float(config["residual_multiplier"]),
            "embedding_scale": float(config["embedding_multiplier"]),
            "attention.scale": float(config["attention_multiplier"]),
        }
    if kind == "deepseek_v3":
        rotated, latents = config["qk_rope_head_dim"], config["kv_lora_rank"]
        found |= {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": config["q_lora_rank"],
            "attention.kv_lora_rank": latents,
            "attention.key_length": latents + rotated,
            "attention.value_length": latents,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": rotated,
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_gating_func": 2,
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }
    return found


def dequantised(model: PreTrainedModel, types: Mapping[str, GGMLQuantizationType]) -> PreTrainedModel:
    """The model, whose embedding and output layer are those of a file of write() with these types, in its own dtype."""
    for name in ("model.embed_tokens", "lm_head"):
        kind = next(kind for part, kind in types.items() if part in _NAMES[f"{name}.weight"])
        weight = model.get_submodule(name).weight.data
        weight.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(weight.float().numpy(), kind), kind)))
    return model
