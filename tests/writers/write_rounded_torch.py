"""write_rounded_torch.py FOLDER: weights as gguf, torch's casts and transformers round them."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import rounded
import torch
import writing
from gguf import GGMLQuantizationType
from transformers.integrations.finegrained_fp8 import Fp8Quantize


def by_gguf(_folder: Path, kind: GGMLQuantizationType, **options) -> dict[str, np.ndarray]:
    """Records: the scale, then the codes; 4-bit ones have k and k + 16 in a byte."""
    w = rounded.weights(**options)
    records = gguf.quants.quantize(w, kind).reshape(*w.shape[:1], w.shape[1] // 32, -1)
    if kind == GGMLQuantizationType.Q8_0:
        scales, codes = np.ascontiguousarray(records[..., :2]).view(np.float16), records[..., 2:]
    else:
        scales, halves = records[..., :1], np.concatenate([records[..., 1:] & 15, records[..., 1:] >> 4], axis=-1)
        codes = halves[..., 0::2] | halves[..., 1::2] << 4
    return {"weights": w, "codes": codes.reshape(len(w), -1), "scales": scales.squeeze(-1)}


def by_cast(_folder: Path) -> dict[str, np.ndarray]:
    """Every bfloat16 number that E4M3 reaches; each row has 448, so that its scale is 1."""
    bits = np.arange(1, 0x43E1, dtype=np.uint32)
    numbers = np.resize((bits << 16).view(np.float32), (136, 128))
    numbers[:, 0] = 448
    numbers[:, 1::2] *= -1
    cast = torch.from_numpy(numbers).to(torch.float8_e4m3fn).view(torch.uint8)
    return {"weights": numbers, "codes": cast.numpy(), "factor": np.ones(len(numbers), np.float32)}


def by_blocks(_folder: Path) -> dict[str, np.ndarray]:
    """Blocks divided by their largest weight / 448, then torch's cast: DeepSeek-V3's kernel says the same."""
    w = rounded.weights(bits=24)
    rows, columns = rounded.BLOCK
    blocks = torch.from_numpy(w).reshape(w.shape[0] // rows, rows, w.shape[1] // columns, columns)
    scales = blocks.abs().amax((1, 3)) / 448.0
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).reshape(w.shape)
    return {"weights": w, "codes": codes.view(torch.uint8).numpy(), "scales": scales.numpy()}


def by_transformers(_folder: Path) -> dict[str, np.ndarray]:
    w = rounded.weights(bits=24)
    config = SimpleNamespace(weight_block_size=list(rounded.BLOCK), scale_fmt=None)
    config.get = lambda key: getattr(config, key)
    made = Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("a.weight", torch.from_numpy(w))
    return {
        "weights": w,
        "codes": made["a.weight"].view(torch.uint8).numpy(),
        "scales": made["a.weight_scale_inv"].numpy(),
    }


if __name__ == "__main__":
    writing.main(
        {
            "gguf MXFP4": partial(by_gguf, kind=GGMLQuantizationType.MXFP4),
            "gguf Q8_0": partial(by_gguf, kind=GGMLQuantizationType.Q8_0, exponents=rounded.NARROW),
            "torch cast": by_cast,
            "torch blocks": by_blocks,
            "transformers FP8": by_transformers,
        }
    )
