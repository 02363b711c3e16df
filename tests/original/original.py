"""kt-kernel itself: steps for worker.py, run in one process of the environment that has it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers import BF16

from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.matrix import Matrix

#: An interpreter that has kt-kernel, by tools/test_kt_kernel.py; read at import, since the suite clears such variables.
INTERPRETER = os.environ.get("KTMOE_TEST_KT_KERNEL")
PATIENCE_SECONDS = 120
needed = pytest.mark.skipif(not INTERPRETER, reason="kt-kernel is not installed: make test-kt-kernel")


def stored(experts: ExpertWeights) -> dict[str, np.ndarray]:
    """All experts' bytes as kt-kernel takes them: codes as they are, bfloat16 as uint16 bits; scales by scales_of()."""
    arrays = {}
    for projection in PROJECTIONS:
        matrices = [experts.matrix(e, projection) for e in range(experts.num_experts)]
        codes = np.stack([matrix.codes for matrix in matrices])
        arrays[f"{projection} codes"] = codes if codes.dtype.kind in "iu" else codes.view(np.uint16)
        if scales_of(matrices[0]) is not None:
            arrays[f"{projection} scales"] = np.stack([scales_of(matrix) for matrix in matrices])
    return arrays


def scales_of(matrix: Matrix) -> np.ndarray | None:
    """A matrix's scales as kt-kernel's loader gives them to its classes; None if there are none.

    UE8M0 bytes of 8-bit codes; float32 of other 8-bit codes and GPTQ's; else uint16, bits of bfloat16.
    """
    form, scales = matrix.format, matrix.scales
    if scales is None:
        return matrix.factor
    if form.factor:  # both levels of NVFP4
        scales = (form.scale.numbers(scales).astype(np.float32) * matrix.factor[0]).astype(BF16)
    if form.element.bits == 8 or not form.order.rows:
        return scales if scales.dtype == np.uint8 else scales.astype(np.float32)
    return bfloat16_scales(scales)


def bfloat16_scales(scales: np.ndarray) -> np.ndarray:
    """Bits of the bfloat16 numbers that scales are; a UE8M0 byte b is 2**(b - 127), so that 0 is denormal, and 255 infinite."""
    if scales.dtype.itemsize == 2:
        return scales.view(np.uint16)
    return np.where(scales == 0, 0x0040, scales.astype(np.uint16) << 7).astype(np.uint16)


class Original:
    """Steps, which are Session's methods in worker.py, and the arrays that they name. run() does them all and answers."""

    def __init__(self, experts: ExpertWeights | None = None):
        self.arrays, self.steps = stored(experts) if experts else {}, []

    def __getattr__(self, step: str):
        if step.startswith("_"):
            raise AttributeError(step)

        def add(**keywords):
            named = {name: self._name(value) if isinstance(value, np.ndarray) else value for name, value in keywords.items()}
            self.steps.append([step, named])

        return add

    def _name(self, array: np.ndarray) -> str:
        name = f"array {len(self.arrays)}"
        self.arrays[name] = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
        return name

    def run(self, folder: Path) -> dict[str, np.ndarray]:
        """The answers by name. Its process must end well; what it printed is in the failure."""
        request, answer = folder / "request.npz", folder / "answer.npz"
        np.savez(request, steps=json.dumps(self.steps), **self.arrays)
        command = [INTERPRETER, Path(__file__).with_name("worker.py"), request, answer]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS, cwd=folder)
        assert done.returncode == 0, f"kt-kernel ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        with np.load(answer) as file:
            return {name: file[name] for name in file.files}


#: The buffers of an export, in the order of its arguments.
BUFFERS = ("w13", "w13 scales", "w2", "w2 scales")


def exported(weights: ExpertWeights, expert: int, parts: int) -> dict[str, np.ndarray]:
    """An expert's bytes [parts, bytes] by the definition: gate's rows, then up's; of down a part of each row."""
    matrices = {projection: weights.matrix(expert, projection) for projection in ("gate", "up", "down")}
    kinds = {"": {p: matrix.codes for p, matrix in matrices.items()}}
    if scales_of(matrices["gate"]) is not None:
        kinds[" scales"] = {p: scales_of(matrix) for p, matrix in matrices.items()}
    cut = {}
    for kind, arrays in kinds.items():
        rows = [np.split(arrays[p], parts) for p in ("gate", "up")]
        down = arrays["down"]
        columns = np.split(down, parts, axis=1) if down.ndim > 1 else [down] * parts  # a scale per row is in every part
        cut[f"w13{kind}"] = np.stack([raw(np.concatenate(part)) for part in zip(*rows, strict=True)])
        cut[f"w2{kind}"] = np.stack([raw(part) for part in columns])
    return cut


def raw(array: np.ndarray) -> np.ndarray:
    """The bytes of an array."""
    return np.ascontiguousarray(array).view(np.uint8).ravel()


def sizes(cut: dict[str, np.ndarray]) -> list[int]:
    """Bytes of each of the BUFFERS of one part."""
    return [cut[name][0].size if name in cut else 0 for name in BUFFERS]
