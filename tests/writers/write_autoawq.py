"""write_autoawq.py FOLDER: experts packed by AutoAWQ's linear layer of version "gemm", and its own way back."""

from functools import partial
from pathlib import Path

import numpy as np
import writing
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm


def write(folder: Path, group: int) -> dict[str, np.ndarray]:
    tensors, expected = {}, {}
    for name, linear in writing.linears(writing.experts()).items():
        n, k = linear.weight.shape
        w = linear.weight.data.reshape(n, k // group, group)
        low, high = w.amin(2), w.amax(2)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
        # packing rounds (w + scale * zero point) / scale: w becomes numbers that it has exactly
        codes = (w / scales.float()[:, :, None] + zeros[:, :, None]).round().clamp(0, 15)
        linear.weight.data = ((codes - zeros[:, :, None]) * scales.float()[:, :, None]).reshape(n, k)
        packed = WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.T.contiguous(), zeros=zeros.int().T.contiguous())
        expert, _, projection = name.partition(".")
        base = f"model.layers.0.mlp.experts.{expert}.{writing.STEMS[projection]}"
        tensors |= {f"{base}.{ending}": getattr(packed, ending) for ending in ("qweight", "qzeros", "scales")}
        back = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.double(), 4, group)
        expected[name] = back.T.double().numpy()
    stated = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    writing.save(folder, tensors, stated)
    return expected


if __name__ == "__main__":
    writing.main({f"group {group}": partial(write, group=group) for group in (32, 128)})
