"""write_rounded_compressed_tensors.py FOLDER: weights as compressed-tensors rounds them, with bfloat16 scales.

Weights and scales are handed over in float32, in which it then divides. In bfloat16 it would round each quotient to that.
"""

from functools import partial
from pathlib import Path

import numpy as np
import rounded
import torch
import writing
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

#: case -> preset, what its weights have instead.
CASES = {
    "MXFP4": ("MXFP4", {}),
    "MXFP8": ("MXFP8", {}),
    "NVFP4": ("NVFP4", {}),
    "FP8": ("FP8_DYNAMIC", {}),
    "INT8": ("INT8", {}),
    "W8A16 group": ("W8A16", {"strategy": "group", "group_size": 128}),
    "W4A16 group 32": ("W4A16", {"group_size": 32}),
    "W4A16_ASYM": ("W4A16_ASYM", {}),
}


def write(_folder: Path, preset: str, changes: dict) -> dict[str, np.ndarray]:
    """In NVFP4 each row is a matrix, so that there are thousands of factors."""
    arguments = PRESET_SCHEMES[preset]["weights"]
    arguments = type(arguments)(**{**arguments.model_dump(), **changes})
    if preset != "NVFP4":
        return of_matrix(rounded.weights(signed_zeros=preset != "MXFP4"), preset, arguments)
    made = [of_matrix(matrix, preset, arguments) for matrix in rounded.weights(bits=24)[:, None]]
    return {label: np.stack([each[label] for each in made]) for label in made[0]}


def of_matrix(weights: np.ndarray, preset: str, arguments: QuantizationArgs) -> dict[str, np.ndarray]:
    nvfp4 = preset == "NVFP4"
    w = torch.from_numpy(weights)
    groups = w.reshape(len(w), -1, arguments.group_size or w.shape[1])
    whole = generate_gparam(w.min(), w.max()) if nvfp4 else None
    low, high = (of_groups if nvfp4 else of_groups.bfloat16() for of_groups in (groups.amin(2), groups.amax(2)))
    scale, point = calculate_qparams(low, high, arguments, whole)
    found = quantize(w, scale.float(), point.float() if not arguments.symmetric else None, arguments, global_scale=whole)
    if arguments.type == "int":
        codes = found.to(torch.int8).view(torch.uint8)
    elif arguments.num_bits == 8:
        codes = found.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = pack_fp4_to_uint8(found)
    made = {"weights": w.numpy(), "codes": codes.numpy()}
    if preset.startswith("MX"):
        made["scales"] = (torch.log2(scale.double()) + 127).to(torch.uint8).numpy()
    elif nvfp4:
        made["scales"], made["factor"] = scale.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), whole.numpy().reshape(1)
    else:
        made["scales"] = scale.bfloat16().view(torch.int16).numpy()
    if not arguments.symmetric:
        made["offsets"] = point.numpy().astype(np.int8)
    return made


if __name__ == "__main__":
    writing.main({name: partial(write, preset=preset, changes=changes) for name, (preset, changes) in CASES.items()})
