"""A checkpoint of torch_model.write() as GGUF files, with the same numbers. Needs torch, and the package gguf.

Experts keep their MXFP4, in ggml's blocks. Dense matrices are bfloat16, as in the checkpoint, or rounded to Q8_0 by gguf.
Routers, norms and biases are float32, which holds the same numbers, as in llama.cpp's own files. A tokenizer is there if one
is asked for, which is byte_tokenizer.py's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors import safe_open

import ktmoe
from bench.engines import byte_tokenizer
from bench.engines.shapes import ARCHITECTURES
from bench.peers.workers.weights import mxfp4_blocks
from ktmoe.experts import ExpertWeights
from ktmoe.loaders.checkpoint import INDEX_NAME

F32, BF16, Q8_0, MXFP4 = (GGMLQuantizationType[name] for name in ("F32", "BF16", "Q8_0", "MXFP4"))
#: Rows of a matrix that are float32 at once while they are rounded.
ROWS = 4096
EMBEDDING = "model.embed_tokens.weight"
#: GGUF's names, without .weight and .bias, by the checkpoint's.
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
}
ROUTERS = ("mlp.router", "mlp.gate")
#: What llama.cpp calls the norm before the experts.
NORMS = {"gpt_oss": "post_attention_norm", "qwen3_moe": "ffn_norm"}


@dataclass(frozen=True)
class Tensor:
    """name: of GGUF. shape: as numpy has it. make: its bytes as a file has them, uint8 or float32."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        block, nbytes = GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // block * nbytes


def write(folder: Path, file: Path, dense: str, tokenizer: bool = False) -> dict:
    """Write a checkpoint as GGUF, tensor by tensor. dense: "BF16" or "Q8_0". tokenizer: whether it has one, as a server needs.

    {"experts": bytes, "dense": bytes of all else but the embeddings, "embedding": bytes}.
    """
    config = json.loads((folder / "config.json").read_text())
    found = [*_dense_tensors(folder, config["model_type"], GGMLQuantizationType[dense])]
    found += [tensor for layer in range(config["num_hidden_layers"]) for tensor in _expert_tensors(folder, layer)]
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    _describe(writer, config)
    _add_tokenizer(writer, config["vocab_size"] if tokenizer else 0)
    for tensor in found:
        stored = tensor.shape if tensor.kind == F32 else (*tensor.shape[:-1], tensor.nbytes // int(np.prod(tensor.shape[:-1])))
        dtype = np.float32 if tensor.kind == F32 else np.uint8
        writer.add_tensor_info(tensor.name, stored, np.dtype(dtype), tensor.nbytes, raw_dtype=tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in found:
        writer.write_tensor_data(tensor.make())
    writer.close()
    parts = {"experts": 0, "dense": 0, "embedding": 0}
    for tensor in found:
        part = "experts" if "_exps" in tensor.name else "embedding" if tensor.name.startswith("token_embd") else "dense"
        parts[part] += tensor.nbytes
    return parts


def _describe(writer: gguf.GGUFWriter, config: dict) -> None:
    rope = config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, tokens: int) -> None:
    """tokens: how many it knows; 0 for none."""
    writer.add_tokenizer_model("gpt2" if tokens else "no_vocab")
    if tokens:
        writer.add_tokenizer_pre("gpt-4o")
        writer.add_token_list(byte_tokenizer.tokens(tokens, characters=True))
        writer.add_token_merges([" ".join(byte_tokenizer.MERGE)])


def _dense_tensors(folder: Path, kind: str, dense: GGMLQuantizationType) -> Iterator[Tensor]:
    """All that is not of experts. The embeddings stay bfloat16: of these a step reads a row."""
    index = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    for name, file in index.items():
        if ".experts." in name:
            continue
        with safe_open(folder / file, "pt") as tensors:
            shape = tuple(tensors.get_slice(name).get_shape())
        matrix = len(shape) > 1 and not any(f"{router}." in name for router in ROUTERS)
        stored = F32 if not matrix else BF16 if name == EMBEDDING else dense
        yield Tensor(_renamed(name, kind), stored, shape, lambda at=folder / file, name=name, to=stored: _read(at, name, to))


def _renamed(name: str, kind: str) -> str:
    stem, _, last = name.rpartition(".")
    if last not in ("weight", "bias"):
        stem, last = name, "weight"
    if stem in NAMES:
        return f"{NAMES[stem]}.{last}"
    _, _, layer, rest = stem.split(".", 3)
    known = OF_LAYER | dict.fromkeys(ROUTERS, "ffn_gate_inp") | {"post_attention_layernorm": NORMS[kind]}
    return f"blk.{layer}.{known[rest]}.{last}"


def _read(file: Path, name: str, kind: GGMLQuantizationType) -> np.ndarray:
    with safe_open(file, "pt") as tensors:
        values = tensors.get_tensor(name)
    if kind == F32:
        return values.float().numpy()
    if kind == BF16:
        return values.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    return np.concatenate([gguf.quantize(part.float().numpy(), kind) for part in values.split(ROWS)])


def _expert_tensors(folder: Path, layer: int) -> Iterator[Tensor]:
    experts = ktmoe.load_experts(folder, layer)
    for name in ("gate", "up", "down"):
        stem, (n, k) = f"blk.{layer}.ffn_{name}_exps", experts.matrix(0, name).shape
        shape = experts.num_experts, n, k
        yield Tensor(f"{stem}.weight", MXFP4, shape, lambda name=name: blocks(ktmoe.load_experts(folder, layer), name))
        if experts.matrix(0, name).bias is not None:
            yield Tensor(f"{stem}.bias", F32, shape[:2], lambda name=name: _biases(ktmoe.load_experts(folder, layer), name))


def blocks(experts: ExpertWeights, name: str) -> np.ndarray:
    """One matrix of each expert in ggml's blocks, uint8 [experts, n, bytes of a row]."""
    found = [experts.matrix(expert, name) for expert in range(experts.num_experts)]
    return np.stack([mxfp4_blocks(np.asarray(m.codes), np.asarray(m.scales)).reshape(m.shape[0], -1) for m in found])


def _biases(experts: ExpertWeights, name: str) -> np.ndarray:
    return np.stack([np.asarray(experts.matrix(expert, name).bias, np.float32) for expert in range(experts.num_experts)])
