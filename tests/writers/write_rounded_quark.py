"""write_rounded_quark.py FOLDER: a checkpoint of one Qwen3-MoE whose weights Quark rounds, file to file."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import rounded
import tiny_models
import torch
import writing
from quark.torch.quantization.config import config
from quark.torch.quantization.file2file_quantization import quantize_model_per_safetensor
from safetensors.torch import load_file, save_file

NAME = "model.layers.0.mlp.experts.0.gate_proj.weight"
SPECS = {"MXFP4": config.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False)}


def write(folder: Path, source: Path, spec) -> dict[str, np.ndarray]:
    stated = config.QConfig(
        global_quant_config=config.QLayerConfig(weight=spec.to_quantization_spec()),
        exclude=["lm_head", "*self_attn*", "*mlp.gate"],
    )
    quantize_model_per_safetensor(str(source), stated, str(folder), device="cpu")
    tensors = load_file(folder / "model.safetensors")
    return {
        "weights": rounded.weights(),
        "codes": tensors[NAME].view(torch.uint8).numpy(),
        "scales": tensors[f"{NAME}_scale"].numpy(),
    }


if __name__ == "__main__":
    with TemporaryDirectory() as source:
        sizes = {"hidden_size": rounded.COLUMNS, "moe_intermediate_size": rounded.ROWS, "num_experts": 1}
        tiny_models.make("qwen3_moe", sizes).to(torch.bfloat16).save_pretrained(source)
        file = Path(source, "model.safetensors")
        tensors = load_file(file)
        assert tensors[NAME].shape == (rounded.ROWS, rounded.COLUMNS)
        save_file(tensors | {NAME: torch.from_numpy(rounded.weights()).bfloat16()}, file, metadata={"format": "pt"})
        writing.main({name: partial(write, source=Path(source), spec=spec) for name, spec in SPECS.items()})
