"""write_modelopt.py FOLDER: ModelOpt quantizes and exports a Qwen3-MoE of transformers; its own classes dequantise it."""

from functools import partial
from pathlib import Path

import modelopt.torch.quantization as mtq
import numpy as np
import tiny_models
import torch
import writing
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file
from writing import HIDDEN, INTERMEDIATE, STEMS

#: case -> config, class, columns that share a scale, if so many.
CASES = {
    "FP8": ("FP8_DEFAULT_CFG", FP8QTensor, None),
    "FP8 per channel": ("FP8_PER_CHANNEL_PER_TOKEN_CFG", FP8QTensor, None),
    "FP8 per block": ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", FP8QTensor, None),
    "NVFP4": ("NVFP4_DEFAULT_CFG", NVFP4QTensor, 16),
    "MXFP8": ("MXFP8_DEFAULT_CFG", MXFP8QTensor, 32),
    "MXFP4": ("MXFP4_DEFAULT_CFG", MXFP4QTensor, 32),
}


def write(folder: Path, config: str, kind: type, group: int | None) -> dict[str, np.ndarray]:
    model = tiny_models.make(
        "qwen3_moe", {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "num_experts": writing.EXPERTS}
    )
    model.config.architectures = [type(model).__name__]
    model = mtq.quantize(model, getattr(mtq, config), forward_loop=lambda model: model(torch.arange(64)[None]))
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=folder)
    tensors = load_file(folder / "model.safetensors")
    base = "model.layers.0.mlp.experts"
    return {
        f"{expert}.{projection}": numbers(tensors, f"{base}.{expert}.{stem}", kind, group)
        for expert in range(writing.EXPERTS)
        for projection, stem in STEMS.items()
    }


def numbers(tensors: dict[str, torch.Tensor], name: str, kind: type, group: int | None) -> np.ndarray:
    """The numbers by ModelOpt's own class, with scales in float64 so that it does not round."""
    codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    n, k = codes.shape[0], codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
    if scale.ndim == 4:  # [N/128, 1, K/128, 1]
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 2).reshape(n, k)
    elif scale.ndim == 1:
        scale = scale[:, None]
    if scale.dtype != torch.uint8:
        scale = scale.double()
    more = {"double_scale": tensors[f"{name}.weight_scale_2"].double()} if kind is NVFP4QTensor else {}
    if group:
        more["block_sizes"] = {-1: group}
    return kind(torch.Size((n, k)), torch.bfloat16, codes).dequantize(torch.float64, scale=scale, **more).numpy()


if __name__ == "__main__":
    writing.main({name: partial(write, config=case[0], kind=case[1], group=case[2]) for name, case in CASES.items()})
