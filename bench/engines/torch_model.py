"""The models in transformers: written as a checkpoint in MXFP4, and made with the same weights in bfloat16. Needs torch."""

from __future__ import annotations

import json
import math
import re
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

import ktmoe
import ktmoe.torch
from bench.engines import fp8_dense
from bench.peers.workers.weights import bfloat16_weights
from ktmoe import synthetic
from ktmoe.experts import ExpertWeights
from ktmoe.loaders.checkpoint import INDEX_NAME
from ktmoe.synthetic.quantized import Published
from ktmoe.weights.formats import MXFP4

_EXPERTS = re.compile(r"\.layers\.(\d+)\.mlp\.experts$")
#: Qwen3's experts in MXFP4, as Quark and ModelOpt store them.
_QWEN3 = Published("mxfp4", MXFP4, {"codes": (".weight", "U8"), "scales": (".weight_scale", "U8")}, {}, 2048, 768)
#: Random numbers that all parameters are made of, from different places on: drawing each would take minutes.
_POOL = (1 << 24) + 1


def write(folder: Path, config: dict, dense: str = "BF16") -> None:
    """A checkpoint with random weights in a new folder: experts as ktmoe.synthetic has them, all else in bfloat16.

    dense: "FP8" for DeepSeek-V4's dense matrices as they are published. made() has no such model.
    """
    model = _empty(config)
    sizes = {"layers": config["num_hidden_layers"], "hidden": config["hidden_size"], "top_k": config["num_experts_per_tok"]}
    match config["model_type"]:
        case "gpt_oss":
            sizes |= {"num_experts": config["num_local_experts"], "intermediate": config["intermediate_size"]}
            synthetic.write_gpt_oss(folder, **sizes)
        case "qwen3_moe":
            sizes |= {"num_experts": config["num_experts"], "intermediate": config["moe_intermediate_size"]}
            _QWEN3.write(folder, **sizes)
        case _:
            sizes |= {"num_experts": config["n_routed_experts"], "intermediate": config["moe_intermediate_size"]}
            synthetic.write_deepseek_v4(folder, **sizes)
    of_experts = json.loads((folder / "config.json").read_text())
    others = {name: _filled(name, tensor) for name, tensor in model.state_dict().items() if not _of_experts(name)}
    model.save_pretrained(folder / "others", state_dict=others)  # under the names that the published files have
    if dense == "FP8":
        for file in (folder / "others").glob("*.safetensors"):
            fp8_dense.store(file)
    settings = json.loads((folder / "others" / "config.json").read_text())
    kept = {name: of_experts[name] for name in ("quantization_config", "expert_dtype") if name in of_experts}
    (folder / "config.json").write_text(json.dumps(settings | kept))
    for part, found in (("experts", folder.glob("*.safetensors")), ("others", (folder / "others").glob("*.safetensors"))):
        for file in [*found]:
            file.rename(folder / f"{part}-{file.name}")  # transformers would read model.safetensors alone
    index = {name: file.name for file in folder.glob("*.safetensors") for name in _names(file)}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def made(folder: Path, config: dict) -> PreTrainedModel:
    """The model of write()'s checkpoint with experts in bfloat16, which are the same numbers."""
    model = _empty(config)
    kept = [re.compile(name) for name in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    for name, parameter in model.named_parameters():
        if not _of_experts(name):
            value = _filled(name, parameter)
            parameter.data = value.float() if any(pattern.search(name) for pattern in kept) else value
    for name, module in model.named_modules():
        if found := _EXPERTS.search(name):
            _fill_experts(module, ktmoe.load_experts(folder, int(found[1])))
    return model.eval().requires_grad_(False)


def held_bytes(model: PreTrainedModel) -> dict[str, int]:
    """{"experts": bytes, "dense": bytes of all else but the embeddings, "embedding": bytes}, packed where ktmoe holds them."""
    found, counted = {"experts": 0, "dense": 0, "embedding": 0}, set()
    for name, module in model.named_modules():
        of_experts = _EXPERTS.search(f".{name}")
        part = "embedding" if isinstance(module, torch.nn.Embedding) else "experts" if of_experts else "dense"
        held = [*module.parameters(recurse=False), *_packed(module)]
        found[part] += sum(one.nbytes for one in held if id(one) not in counted)
        counted |= {id(one) for one in held}
    return found


def _packed(module: torch.nn.Module) -> list[ktmoe.MoELayer | ktmoe.Linear]:
    """What ktmoe holds for a module."""
    if layer := getattr(module, "ktmoe_layer", None):
        return [layer]
    if isinstance(module, ktmoe.torch.DenseGroupedLinear):
        return list(module.group.linears)
    return [module.linear] if isinstance(module, ktmoe.torch.DenseLinear | ktmoe.torch.DenseEmbedding) else []


def _empty(config: dict) -> PreTrainedModel:
    """Parameters have no values, and take no memory, until something is written into them."""
    fields = {name: value for name, value in config.items() if name != "model_type"}
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields), dtype=torch.bfloat16)
    for name, buffer in model.named_buffers():
        if not torch.isfinite(buffer).all():
            raise RuntimeError(f"{name}: expected a buffer with values")
    return model


def _of_experts(name: str) -> bool:
    return ".mlp.experts." in name


def _names(file: Path) -> list[str]:
    with safe_open(file, "np") as tensors:
        return list(tensors.keys())


def _filled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Values that depend on the name alone: matrices keep the size of what they multiply, norms and scales are 1, biases 0."""
    if tensor.ndim < 2:
        value = 1.0 if "norm" in name or name.endswith("scale") else 0.0
        return torch.full_like(tensor, value)
    deviation = 1.0 if "embed" in name else 1 / math.sqrt(tensor.shape[-1])
    numbers = torch.roll(_pool(), zlib.crc32(name.encode()) % _POOL) * deviation
    value = torch.empty_like(tensor)
    for part in value.view(-1).split(_POOL):
        part.copy_(numbers[: len(part)])
    return value


@cache
def _pool() -> torch.Tensor:
    return torch.randn(_POOL, generator=torch.Generator().manual_seed(0))


def _fill_experts(module: torch.nn.Module, experts: ExpertWeights) -> None:
    """A module's parameters from MXFP4. bfloat16 holds the numbers exactly."""
    half = experts.intermediate
    for expert in range(experts.num_experts):
        for projection in ("gate", "up", "down"):
            stem = "down_proj" if projection == "down" else "gate_up_proj"
            weight, bias = getattr(module, stem)[expert], getattr(module, f"{stem}_bias", None)
            bias = None if bias is None else bias[expert]
            rows = weight.T if module.is_transposed else weight
            if projection != "down":
                up = projection == "up"
                of_half = slice(half * up, half * (up + 1)) if module.is_concatenated else slice(int(up), None, 2)
                rows, bias = rows[of_half], None if bias is None else bias[of_half]
            matrix = experts.matrix(expert, projection)
            bits = bfloat16_weights("MXFP4", np.asarray(matrix.codes), np.asarray(matrix.scales))
            with torch.no_grad():
                rows.copy_(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
                if bias is not None:
                    bias.copy_(torch.from_numpy(np.asarray(matrix.bias)))
