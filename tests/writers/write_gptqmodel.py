"""write_gptqmodel.py FOLDER: experts packed by GPTQModel's linear layer, and its own way back."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
import writing
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

#: case -> bits, columns that share a scale (-1: all), whether symmetric, checkpoint_format.
CASES = {
    "sym": (4, 32, True, "gptq"),
    "asym": (4, 128, False, "gptq"),
    "v2": (4, 32, False, "gptq_v2"),
    "per row": (4, -1, True, "gptq"),
    "8 bits": (8, 32, True, "gptq"),
}


def write(folder: Path, bits: int, group: int, sym: bool, form: str) -> dict[str, np.ndarray]:
    tensors, expected = {}, {}
    for name, linear in writing.linears(writing.experts()).items():
        packed = pack(linear, bits, group, sym)
        back = packed.dequantize_weight().T.double().numpy()
        if form == "gptq":
            convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(bits=bits, group_size=group, sym=sym))
        expert, _, projection = name.partition(".")
        base = f"model.layers.0.mlp.experts.{expert}.{writing.STEMS[projection]}"
        tensors |= {f"{base}.{ending}": getattr(packed, ending) for ending in ("qweight", "qzeros", "g_idx")}
        tensors[f"{base}.scales"] = packed.scales.half()
        expected[name] = back
    stated = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": sym}
    writing.save(folder, tensors, stated | {"checkpoint_format": form})
    return expected


def pack(linear: torch.nn.Linear, bits: int, group: int, sym: bool) -> TorchLinear:
    """Pack by GPTQModel.

    Its scales are float64 in the end, so that its way back does not round. Zero points are above 0, as "gptq" has no 0.
    """
    n, k = linear.weight.shape
    size, largest = (k if group < 0 else group), 2**bits - 1
    w = linear.weight.data.reshape(n, k // size, size)
    if sym:
        scales, zeros = w.abs().amax(2) * 2 / largest, torch.full((n, k // size), 2.0 ** (bits - 1))
    else:
        scales = (w.amax(2) - w.amin(2)) / largest
        zeros = (-w.amin(2) / scales).round().clamp(1, largest)
    packed = TorchLinear(bits, group, sym, False, k, n)
    g_idx = torch.arange(k, dtype=torch.int32) // size
    packed.pack_original(linear, scales.half().float(), zeros, g_idx)
    packed.scales = packed.scales.double()
    return packed


if __name__ == "__main__":
    writing.main({name: partial(write, bits=c[0], group=c[1], sym=c[2], form=c[3]) for name, c in CASES.items()})
