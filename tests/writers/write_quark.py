"""write_quark.py FOLDER: Quark quantizes a Qwen3-MoE that transformers saved; its own unpacking gives the codes."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tiny_models
import torch
import writing
from quark.torch.quantization.config import config
from quark.torch.quantization.file2file_quantization import quantize_model_per_safetensor
from quark.torch.utils.pack import create_pack_method
from safetensors.torch import load_file
from writing import HIDDEN, INTERMEDIATE, STEMS

#: case -> what a weight is quantized to.
CASES = {
    "MXFP4": config.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
    "FP8": config.FP8E4M3PerTensorSpec(is_dynamic=False),
    "FP8 per channel": config.FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0),
    "INT8 per channel": config.Int8PerChannelSpec(
        symmetric=True, is_dynamic=False, ch_axis=0, round_method="half_even", scale_type="float"
    ),
    "INT4 per group": config.Int4PerGroupSpec(
        symmetric=True, is_dynamic=False, ch_axis=1, group_size=32, round_method="half_even", scale_type="float"
    ),
}
EXCLUDED = ["lm_head", "*self_attn*", "*mlp.gate"]


def write(folder: Path, source: Path, spec) -> dict[str, np.ndarray]:
    quantization = spec.to_quantization_spec()
    stated = config.QConfig(global_quant_config=config.QLayerConfig(weight=quantization), exclude=EXCLUDED)
    quantize_model_per_safetensor(str(source), stated, str(folder), device="cpu")
    tensors = load_file(folder / "model.safetensors")
    method = create_pack_method(quantization.qscheme.value, quantization.dtype.value)
    return {
        f"{expert}.{projection}": numbers(tensors, f"model.layers.0.mlp.experts.{expert}.{stem}", method)
        for expert in range(writing.EXPERTS)
        for projection, stem in STEMS.items()
    }


def numbers(tensors: dict[str, torch.Tensor], name: str, method) -> np.ndarray:
    """Codes by Quark's unpacking, times scales in float64."""
    codes = method.unpack(tensors[f"{name}.weight"], reorder=True).double()
    scale = tensors[f"{name}.weight_scale"]
    scale = torch.exp2(scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
    if scale.ndim == 1:
        scale = scale[:, None]
    if scale.ndim == 2:
        scale = scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    return (codes * scale).numpy()


if __name__ == "__main__":
    with TemporaryDirectory() as source:
        sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "num_experts": writing.EXPERTS}
        tiny_models.make("qwen3_moe", sizes).save_pretrained(source)
        writing.main({name: partial(write, source=Path(source), spec=spec) for name, spec in CASES.items()})
