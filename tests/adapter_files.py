"""What the tests of adapters share: made-up ones, and what a file in PEFT's format means, by PEFT's own definition.

Of a parameter of experts, lora_A.reshape(experts, rank, inputs) and lora_B.reshape(outputs, rank, experts) add
einsum("ore,eri->eoi") * scaling to [experts, outputs, inputs]; scaling is alpha / rank, or alpha / sqrt(rank) with rslora.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from ktmoe.training.lora import Lora

BF16 = ml_dtypes.bfloat16
EXPERTS, HIDDEN, INTERMEDIATE = 3, 10, 6
PREFIX = "base_model.model."
MODULE = "model.layers.0.mlp.experts"
QWEN, GPT_OSS, MIXTRAL = ({"model_type": name} for name in ("qwen3_moe", "gpt_oss", "mixtral"))


def shape_of(projection: str, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE) -> tuple[int, int]:
    return (hidden, intermediate) if projection == "down" else (intermediate, hidden)


def lora(projections=("gate", "up", "down"), rank=2, alpha=6.0, seed=0, dtype=np.float32, **sizes) -> Lora:
    """sizes: hidden, intermediate."""
    random, pairs = np.random.default_rng(seed), {}
    for projection in projections:
        n, k = shape_of(projection, **sizes)
        pairs[projection] = tuple(
            random.standard_normal(shape).astype(dtype) for shape in ((EXPERTS, rank, k), (EXPERTS, n, rank))
        )
    return Lora(pairs, alpha)


def numbers(array: np.ndarray) -> np.ndarray:
    return (array.view(BF16) if array.dtype == np.uint16 else array).astype(np.float64)


def change(of: Lora, projection: str) -> np.ndarray:
    """What an adapter adds to the weights [experts, n, k]; 0 where it has no pair."""
    n, k = shape_of(projection)
    if projection not in of.pairs:
        return np.zeros((of.num_experts, n, k))
    a, b = map(numbers, of.pairs[projection])
    return of.alpha / of.rank * np.einsum("enr,erk->enk", b, a)


def scaling(config: dict, name: str) -> tuple[int, float]:
    """PEFT's rank and scaling of a parameter or module: the first pattern that a name ends in counts."""

    def of(pattern: str, usual: str):
        found = (value for key, value in config[pattern].items() if re.match(rf"(.*\.)?({key})$", name))
        return next(found, config[usual])

    rank, alpha = of("rank_pattern", "r"), of("alpha_pattern", "lora_alpha")
    return rank, alpha / (rank**0.5 if config["use_rslora"] else rank)


def of_parameter(folder: Path, module: str, parameter: str, experts: int = EXPERTS) -> np.ndarray:
    """What the files add to a parameter [experts, outputs, inputs]."""
    config, tensors = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")
    both = {f"{module}.gate_up_proj", f"{module}.down_proj"} <= set(config["target_parameters"])
    assert f"{module}.{parameter}" in config["target_parameters"]
    inner = "base_layer." if both and parameter == "gate_up_proj" else ""
    a, b = (tensors[f"{PREFIX}{module}.{inner}lora_{letter}.weight"].astype(np.float64) for letter in "AB")
    rank, scale = scaling(config, f"{module}.{parameter}")
    assert a.shape[0] == b.shape[1] == rank * experts
    return scale * np.einsum("ore,eri->eoi", b.reshape(len(b), rank, experts), a.reshape(experts, rank, -1))


def write(folder: Path, tensors: dict[str, np.ndarray], **config: object) -> Path:
    """An adapter's files, with PEFT's usual values in the config."""
    folder.mkdir(exist_ok=True)
    usual = {
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "r": 2,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": True,
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(usual | config))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def tensors_of(layer: int = 0, rank: int = 2, seed: int = 0, dtype=np.float32) -> dict[str, np.ndarray]:
    """What PEFT trains: one A of gate and up, B full of numbers."""
    random, base = np.random.default_rng(seed), f"{PREFIX}model.layers.{layer}.mlp.experts"
    shapes = {
        f"{base}.base_layer.lora_A.weight": (EXPERTS * rank, HIDDEN),
        f"{base}.base_layer.lora_B.weight": (2 * INTERMEDIATE, EXPERTS * rank),
        f"{base}.lora_A.weight": (EXPERTS * rank, INTERMEDIATE),
        f"{base}.lora_B.weight": (HIDDEN, EXPERTS * rank),
    }
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
