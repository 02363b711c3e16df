"""Headers from which hostile ones are made: good ones by writers, and those of tests/corpus, which tools/fuzz.py found."""

from __future__ import annotations

import json
from pathlib import Path

import adapter_files
import checkpoints
import gguf_files
import numpy as np
from hostile_parsers import IDENTITY, SCHEMES

from ktmoe import synthetic
from ktmoe.cache import manifest
from ktmoe.cache.packing import pack

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
#: quantization_config by scheme.
_QUANTIZATION = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": "gptq"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    },
    "int4 zero points": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS | {"symmetric": False}}},
        "transform_config": {"config_groups": {}},
        "algo_config": [{"online_config": {"online_rotation_layers": ["*.q_proj"]}}],
    },
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
    "gpt_oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "deepseek_v4": {"quant_method": "fp8"},
}


def seeds(name: str, folder: Path) -> tuple[list[bytes], list[bytes]]:
    """Headers that the parser of that name takes, and what the corpus has for it. folder: an empty one."""
    return _WRITERS[name](folder), [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def _text(value: object) -> bytes:
    return json.dumps(value).encode()


def _safetensors(folder: Path) -> list[bytes]:
    made = []
    for number, scheme in enumerate(("gpt_oss", "int4", "bf16 fused")):
        tensors = checkpoints.SCHEMES[scheme].layer("model.layers.0", hidden=32, intermediate=32)
        checkpoints.write(folder, tensors, file=f"{number}.safetensors").close()
        (folder / f"{number}.safetensors").rename(folder / f"{number}.seed")
        made.append((folder / f"{number}.seed").read_bytes())
    adapter_files.write(folder / "adapter", adapter_files.tensors_of())
    return [*made, (folder / "adapter" / "adapter_model.safetensors").read_bytes()]


def _gguf(folder: Path) -> list[bytes]:
    kinds = [dict.fromkeys(("gate", "up", "down"), gguf_files.MXFP4), {"gate": gguf_files.Q4_K, "down": gguf_files.F32}]
    names = gguf_files.array(8, [gguf_files.text(word) for word in ("<s>", "a", "b c")])
    numbers = gguf_files.array(6, [np.float32(number).tobytes() for number in range(3)])
    inner = gguf_files.array(9, [gguf_files.array(4, [bytes(4)])[4:]])
    more = {
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": numbers,
        "nested": inner,
        "general.alignment": gguf_files.u32(64),
        "split.count": gguf_files.u32(1),
        "truth": gguf_files.struct.pack("<IB", 7, 1),
    }
    made = []
    for number, of in enumerate(kinds):
        keys = gguf_files.metadata(expert_count=2, block_count=1) | (more if number else {})
        layer = gguf_files.layer(number, of, hidden=256 if number else 32, intermediate=256 if number else 32, experts=1)
        path = gguf_files.write(folder / f"{number}.seed", keys, layer, alignment=64 if number else 32)
        made.append(path.read_bytes())
    return made


def _index(folder: Path) -> list[bytes]:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in range(2) for expert in range(3)]
    weight_map = {name: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, name in enumerate(names)}
    return [_text({"metadata": {"total_size": 1234}, "weight_map": weight_map})]


def _config(folder: Path) -> list[bytes]:
    made = []
    for number, scheme in enumerate(SCHEMES):
        stated = {
            "architectures": ["X"],
            "model_type": {"llama4": "llama4", "deepseek_v4": "deepseek_v4", "gpt_oss": "gpt_oss"}.get(scheme, "qwen3_moe"),
            checkpoints.SCHEMES[scheme].count: checkpoints.EXPERTS,
            "hidden_act": "silu",
            "swiglu_limit": None,
            "text_config": {"num_experts": checkpoints.EXPERTS, "rope_scaling": {"factor": 1.5}},
        }
        if scheme in _QUANTIZATION:
            stated["quantization_config"] = _QUANTIZATION[scheme]
        if scheme in ("gpt_oss", "deepseek_v4"):
            stated |= {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
        made.append(bytes([number]) + _text(stated))
    return made


def _adapter(folder: Path) -> list[bytes]:
    adapter_files.write(folder / "a", adapter_files.tensors_of())
    patterns = {"rank_pattern": {"mlp.experts.gate_up_proj": 4, r".*\.down_proj": 2}, "alpha_pattern": {r"layers\.\d+\.x": 3.5}}
    adapter_files.write(folder / "b", adapter_files.tensors_of(), use_rslora=True, **patterns)
    return [(folder / name / "adapter_config.json").read_bytes() for name in "ab"]


def _cache(folder: Path) -> list[bytes]:
    synthetic.write_deepseek_v4(folder / "model", layers=1, num_experts=2, hidden=32, intermediate=64)
    pack(folder / "model", folder / "packed")
    return [(folder / "packed" / manifest.NAME).read_bytes()]


def _journal(folder: Path) -> list[bytes]:
    finished = {"model-00001.safetensors": [[0, [1.5, 0.25]], ["mtp.0", [2.0, 0.5]]], "model-00002.safetensors": []}
    return [_text({"weight_map": "not yet", "ktmoe_convert": {"identity": IDENTITY, "finished": finished}})]


_WRITERS = {
    "safetensors": _safetensors,
    "gguf": _gguf,
    "index": _index,
    "config": _config,
    "adapter": _adapter,
    "cache": _cache,
    "journal": _journal,
}
