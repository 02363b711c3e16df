"""Dense matrices of DeepSeek-V4 in FP8, as they are published: E4M3, and a power of two for each 128x128. Needs torch."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

#: The matrices that are published in FP8, by their names in the checkpoint.
_PUBLISHED = re.compile(r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight$|\.shared_experts\.w[123]\.weight$")
_BLOCK, _LARGEST = 128, 448.0


def store(file: Path) -> None:
    """Put codes and scales in the places of a safetensors file's bfloat16 matrices: of those that are published in FP8."""
    tensors = {}
    for name, tensor in load_file(file).items():
        if _PUBLISHED.search(name):
            codes, scales = _encoded(tensor)
            tensors |= {name: codes, name.removesuffix("weight") + "scale": scales}
        else:
            tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})


def _encoded(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, k] -> E4M3 [n, k] and E8M0 [n / 128, k / 128], rounded up. The largest weight of a block becomes 224 to 448."""
    n, k = matrix.shape
    blocks = matrix.float().view(n // _BLOCK, _BLOCK, k // _BLOCK, _BLOCK)
    scales = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((1, 3)) / _LARGEST)))
    codes = (blocks / scales[:, None, :, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return codes.view(n, k), scales.to(torch.float8_e8m0fnu)
