"""Whole small models that stand in for those that pages name, where transformers runs them: page_models.py has the rest."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import engine_models
import quantized_checkpoints
import whole_gguf

from ktmoe import synthetic
from ktmoe.synthetic.chat import VOCABULARY


def deepseek_v4(path: Path) -> None:
    """DeepSeek-V4 as published, MXFP4 and FP8, with four layers and a tokenizer."""
    packed = replace(quantized_checkpoints.PACKED["DeepSeek-V4 FP4"], published=lambda name: name.removeprefix("model."))
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"] * 2
    changes = {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "layer_types": kinds}
    changes = engine_models.ARCHITECTURES["deepseek_v4"] | changes
    quantized_checkpoints.write_packed(packed, path, changes=changes, num_hidden_layers=4, vocab_size=VOCABULARY)
    tokenizer(path)


def gpt_oss(path: Path) -> None:
    """gpt-oss in MXFP4 with a tokenizer."""
    quantized_checkpoints.write("gpt-oss MXFP4", path, num_hidden_layers=4, vocab_size=VOCABULARY, max_position_embeddings=1024)
    tokenizer(path)


def gguf(path: Path) -> None:
    model = engine_models.make("qwen3_moe", {"norm_topk_prob": True})
    whole_gguf.write(model, path)


def tokenizer(path: Path) -> None:
    """That of write_chat_model(), whose tokens a model with its vocabulary has."""
    with tempfile.TemporaryDirectory() as folder:
        synthetic.write_chat_model(Path(folder, "model"))
        for file in Path(folder, "model").glob("*.json"):
            if "token" in file.name or "template" in file.name:
                (path / file.name).write_text(file.read_text())


#: What stands in for a name, for all pages and for one.
WRITERS = {
    "DeepSeek-V4-Flash": deepseek_v4,
    **dict.fromkeys(("gpt-oss-20b", "openai/gpt-oss-20b"), gpt_oss),
    **dict.fromkeys(("model.gguf", "MODEL.gguf", "Qwen3-30B-A3B-Q4_K_M.gguf"), gguf),
}
OF_PAGES = {"docs/low-precision.md": {"DIR": gpt_oss}}  # whose weights have the modes of integers
