"""write_rounded_modelopt.py FOLDER: weights as ModelOpt's tensor classes round them."""

from functools import partial
from pathlib import Path

import numpy as np
import rounded
import torch
import writing
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor


def by_mx(_folder: Path, kind: type, zeros: bool) -> dict[str, np.ndarray]:
    w = rounded.weights(zeros=zeros)
    made, scales = kind.quantize(torch.from_numpy(w.copy()), 32) if kind is MXFP4QTensor else kind.quantize(torch.from_numpy(w))
    codes = made._quantized_data.view(torch.uint8).numpy().reshape(len(w), -1)
    return {"weights": w, "codes": codes, "scales": scales.numpy().reshape(len(w), -1)}


def by_nvfp4(_folder: Path) -> dict[str, np.ndarray]:
    """Each row is a matrix, so that there are thousands of factors."""
    w = rounded.weights(bits=24)[:, None]
    made = [NVFP4QTensor.quantize(torch.from_numpy(matrix.copy()), 16) for matrix in w]
    return {
        "weights": w,
        "codes": np.stack([rows._quantized_data.numpy().reshape(1, -1) for rows, _, _ in made]),
        "scales": np.stack([scales.view(torch.uint8).numpy().reshape(1, -1) for _, scales, _ in made]),
        "factor": np.stack([factor.numpy().reshape(1) for _, _, factor in made]),
    }


def by_fp8(_folder: Path, rows: bool) -> dict[str, np.ndarray]:
    """ModelOpt divides a group of zeros by zero: there is none here."""
    w = rounded.weights(bits=24, zeros=False)
    how = {"axis": 0} if rows else {"block_sizes": dict(zip((-2, -1), rounded.BLOCK, strict=True))}
    made, scales = FP8QTensor.quantize(torch.from_numpy(w), **how)
    scales = {"factor": scales.numpy().reshape(-1)} if rows else {"scales": scales.numpy()}
    return {"weights": w, "codes": made._quantized_data.view(torch.uint8).numpy()} | scales


if __name__ == "__main__":
    writing.main(
        {
            "MXFP4": partial(by_mx, kind=MXFP4QTensor, zeros=False),
            "MXFP8": partial(by_mx, kind=MXFP8QTensor, zeros=True),
            "NVFP4": by_nvfp4,
            "FP8 rows": partial(by_fp8, rows=True),
            "FP8 blocks": partial(by_fp8, rows=False),
        }
    )
