"""Small checkpoints and other files that stand in for the names that pages of documentation use."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from checkpoints import write
from helpers import BF16
from pages import Block, commands

import ktmoe
from ktmoe import synthetic
from ktmoe.adapters import export_adapter
from ktmoe.training import Lora

Writer = Callable[[Path], object]
Writers = Mapping[str, Writer]


def qwen3(path: Path) -> None:
    """A whole model in bfloat16 with a tokenizer."""
    synthetic.write_chat_model(path, layers=4)


def deepseek_v4(path: Path) -> None:
    """Experts of four layers in MXFP4, and one dense matrix of each layer in FP8."""
    synthetic.write_deepseek_v4(path, layers=4, num_experts=8, hidden=128, intermediate=128)
    rng, dense = np.random.default_rng(2), {}
    for layer in range(4):
        name = f"layers.{layer}.attn.wq_b"
        dense[f"{name}.weight"] = ["F8_E4M3", rng.integers(0, 0x40, (128, 128), np.uint8)]
        dense[f"{name}.scale"] = ["F8_E8M0", np.full((1, 1), 120, np.uint8)]
    write(path, dense, file="model-dense.safetensors")


def gguf(path: Path) -> None:
    synthetic.write_gguf(path, num_experts=8, hidden=256, intermediate=256, layers=2, top_k=2)


def dense_matrices(path: Path) -> None:
    """Those of docs/linear.md."""
    rng = np.random.default_rng(1)
    shapes = {f"model.layers.0.self_attn.{name}_proj": (rows, 64) for name, rows in (("q", 70), ("k", 32), ("v", 32))}
    shapes |= {"layers.0.attn.wo_a": (80, 64), "model.embed_tokens": (100, 64)}
    path.mkdir()
    write(path, {f"{name}.weight": ["BF16", rng.standard_normal(shape).astype(BF16)] for name, shape in shapes.items()})


def adapter(path: Path) -> None:
    """LoRA of all experts of qwen3()."""
    with tempfile.TemporaryDirectory() as folder:
        qwen3(Path(folder, "model"))
        with ktmoe.MoEModel.from_checkpoint(Path(folder, "model"), activations="bf16") as model:
            loras = {number: Lora.initial(model[number].spec, rank=4, alpha=8) for number in model}
        export_adapter(path, loras, Path(folder, "model"))


def nothing(path: Path) -> None:
    pass


def text(path: Path) -> None:
    path.write_text("the sky is blue because the light of the sun is scattered by the air. " * 40)


def blocks_checkpoint(path: Path) -> None:
    """What the loader of examples/loader_plugin reads."""
    rng, tensors = np.random.default_rng(3), {}
    for name, n, k in (("gate", 96, 64), ("up", 96, 64), ("down", 64, 96)):
        tensors[f"blocks.0.moe.{name}.codes"] = ["U8", rng.integers(0, 256, (3, n, k // 2), np.uint8)]
        tensors[f"blocks.0.moe.{name}.scales"] = ["U8", rng.integers(119, 124, (3, n, k // 32), np.uint8)]
    path.mkdir()
    write(path, tensors)


_CHAT = ("DIR", "MODEL", "model", "Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", "gpt-oss-20b", "openai/gpt-oss-20b")
#: What stands in for a name in a page's folder.
WRITERS: dict[str, Writer] = {
    **dict.fromkeys(_CHAT, qwen3),
    "DeepSeek-V4-Flash": deepseek_v4,
    **dict.fromkeys(("model.gguf", "MODEL.gguf", "Qwen3-30B-A3B-Q4_K_M.gguf"), gguf),
    **dict.fromkeys(("FILE", "text.txt"), text),
    **dict.fromkeys(("ADAPTER", "ATTENTION"), adapter),
}
#: The same for one page.
OF_PAGES: dict[str, dict[str, Writer]] = {
    "docs/linear.md": {"model": dense_matrices},
    "docs/add-a-loader.md": {"DIR": blocks_checkpoint},
    "docs/adapters.md": {"ADAPTER": nothing},  # the page writes it
}
#: What else is compared when a page has run: "module:function" of tests/, called with the names after each Python block.
CHECKS: dict[str, str] = {
    "README.md": "page_checks:readme",
    "docs/fine-tuning.md": "page_checks:fine_tuning",
    "docs/linear.md": "page_checks:linear",
    "docs/two-stage.md": "page_checks:two_stage",
}


def words(blocks: Iterable[Block], before: str) -> set[str]:
    """Strings of Python code and words of commands: what may name a file."""
    found = {word for block in blocks if block.language == "sh" for command in commands(block.text) for word in command}
    for code in (before, *(block.text for block in blocks if block.language == "python")):
        constants = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
        found |= {value for value in constants if isinstance(value, str)}
    return found


def prepare(folder: Path, writers: Writers, blocks: Iterable[Block], before: str) -> None:
    """Write into a page's folder what its blocks name, and the code that runs before them."""
    named = words(blocks, before)
    for name, writer in writers.items():
        if any(word == name or word.startswith(f"{name}/") for word in named):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            writer(folder / name)
