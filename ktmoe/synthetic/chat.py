"""A whole tiny model that generates text: every tensor of a Qwen3-MoE, a tokenizer of bytes and a chat template."""

from __future__ import annotations

import json
import math
import os
import string
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ktmoe.errors import InputError
from ktmoe.loaders.naming import PROJ_STEMS
from ktmoe.synthetic.files import Model, check, write
from ktmoe.synthetic.models import bases, matrices
from ktmoe.synthetic.tensors import Shaper, Tensor, bf16_numbers, constant

HEAD = 32
#: The only tokens that are ever likely, so that what is generated can be read.
LIKELY = (string.ascii_lowercase + "  .,").encode()
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = {START: 256, END: 257, PAD: 258}
VOCABULARY = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_chat_model(
    path: str | os.PathLike[str],
    *,
    num_experts: int = 8,
    hidden: int = 128,
    intermediate: int = 64,
    layers: int = 2,
    top_k: int = 2,
    **writing: Any,
) -> None:
    """Qwen3-MoE in bfloat16 with random weights, which answers in lower-case letters and never stops by itself.

    path: a new or empty folder. hidden: a multiple of 64. writing: `seed`, `shard_bytes` and `progress`, see
    ktmoe.synthetic.files.write. Raises InputError for a size that is not possible and a folder that already holds a model.

    Examples:
        >>> synthetic.write_chat_model("tiny", num_experts=4)
        >>> "tokenizer.json" in os.listdir("tiny")
        True
    """
    check(hidden=(hidden, 2 * HEAD), intermediate=(intermediate, 1), num_experts=(num_experts, 1))
    if not 1 <= top_k <= num_experts:
        raise InputError(f"top_k: expected 1 to {num_experts}, the number of experts, found {top_k}")
    tensors = _tensors(num_experts, hidden, intermediate, layers)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": HEAD,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD // 2,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "moe_intermediate_size": intermediate,
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": SPECIAL[END],
        "pad_token_id": SPECIAL[PAD],
    }
    write(path, Model("bf16", config, tensors), **writing)
    folder = Path(path)
    for name, content in _tokenizer_files().items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _tensors(num_experts: int, hidden: int, intermediate: int, layers: int) -> list[Tensor]:
    def matrix(name: str, n: int, k: int) -> Tensor:
        return Tensor(f"{name}.weight", "BF16", (n, k), bf16_numbers(1 / math.sqrt(k)))

    def norm(name: str, n: int) -> Tensor:
        return Tensor(f"{name}.weight", "BF16", (n,), constant(np.ones(n, ml_dtypes.bfloat16)))

    # small, so that what the layers add decides on the next token
    tensors = [Tensor("model.embed_tokens.weight", "BF16", (VOCABULARY, hidden), bf16_numbers(0.1))]
    for base in bases("model.", layers):
        tensors += [norm(f"{base}.{name}", hidden) for name in ("input_layernorm", "post_attention_layernorm")]
        tensors += [norm(f"{base}.self_attn.{name}", HEAD) for name in ("q_norm", "k_norm")]
        tensors += [matrix(f"{base}.self_attn.{name}", hidden, hidden) for name in ("q_proj", "o_proj")]
        tensors += [matrix(f"{base}.self_attn.{name}", hidden // 2, hidden) for name in ("k_proj", "v_proj")]
        tensors.append(matrix(f"{base}.mlp.gate", num_experts, hidden))
        experts = matrices(f"{base}.mlp.experts", PROJ_STEMS, num_experts, hidden, intermediate)
        tensors += [matrix(name, n, k) for name, n, k in experts]
    return [*tensors, norm("model.norm", hidden), Tensor("lm_head.weight", "BF16", (VOCABULARY, hidden), _likely_rows(hidden))]


def _likely_rows(hidden: int) -> Shaper:
    """Random rows for LIKELY's tokens; zeros for all others, whose logits are 0, less than the greatest of the likely."""
    random = bf16_numbers(4 / math.sqrt(hidden))

    def shape(out: np.ndarray) -> None:
        random(out)
        rows = out.reshape(VOCABULARY, -1)
        rows[~np.isin(np.arange(VOCABULARY), list(LIKELY))] = 0

    return shape


def _tokenizer_files() -> dict[str, dict[str, Any]]:
    """tokenizer.json: BPE without merges, so that a byte is a token; what it stands for; how generation ends."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": content, **flags} for content, token in SPECIAL.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {name: byte for byte, name in enumerate(_byte_names())} | SPECIAL, "merges": []},
    }
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
        "generation_config.json": {"eos_token_id": SPECIAL[END], "pad_token_id": SPECIAL[PAD]},
    }


def _byte_names() -> list[str]:
    """What byte-level tokenizers call each byte, as GPT-2 does: itself where it can be printed, else a character above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
