"""write_rounded_torchao.py FOLDER: weights as torchao's to_mx() rounds them."""

from functools import partial
from pathlib import Path

import numpy as np
import rounded
import torch
import writing
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

ELEMENTS = {"MXFP4": torch.float4_e2m1fn_x2, "MXFP8": torch.float8_e4m3fn}
MODES = ("RCEIL", "FLOOR", "EVEN")


def write(_folder: Path, element: str, mode: str) -> dict[str, np.ndarray]:
    w = rounded.weights()
    scales, codes = to_mx(torch.from_numpy(w), ELEMENTS[element], 32, ScaleCalculationMode[mode])
    codes = codes.view(torch.uint8).numpy().reshape(len(w), -1)
    return {"weights": w, "codes": codes, "scales": scales.view(torch.uint8).numpy()}


if __name__ == "__main__":
    writing.main({f"{element} {mode}": partial(write, element=element, mode=mode) for element in ELEMENTS for mode in MODES})
