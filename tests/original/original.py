"""kt-kernel itself: steps for worker.py, run in one process of the environment that has it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ktmoe.experts import PROJECTIONS, ExpertWeights

#: An interpreter that has kt-kernel, by tools/test_kt_kernel.py; read at import, since the suite clears such variables.
INTERPRETER = os.environ.get("KTMOE_TEST_KT_KERNEL")
PATIENCE_SECONDS = 120
needed = pytest.mark.skipif(not INTERPRETER, reason="kt-kernel is not installed: make test-kt-kernel")


def stored(experts: ExpertWeights) -> dict[str, np.ndarray]:
    """All experts' bytes in the form that kt-kernel takes: codes as uint8, or uint16 bits of bfloat16; scales as bfloat16."""
    arrays = {}
    for projection in PROJECTIONS:
        matrices = [experts.matrix(e, projection) for e in range(experts.num_experts)]
        codes = np.stack([matrix.codes for matrix in matrices])
        arrays[f"{projection} codes"] = codes.view(np.uint8 if codes.dtype.itemsize == 1 else np.uint16)
        if matrices[0].scales is not None:
            arrays[f"{projection} scales"] = bfloat16_scales(np.stack([matrix.scales for matrix in matrices]))
    return arrays


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
    bytes_ = {"": {p: np.ascontiguousarray(m.codes).view(np.uint8) for p, m in matrices.items()}}
    if matrices["gate"].scales is not None:
        bytes_[" scales"] = {p: bfloat16_scales(m.scales).view(np.uint8) for p, m in matrices.items()}
    cut = {}
    for kind, arrays in bytes_.items():
        rows = [np.split(arrays[p], parts) for p in ("gate", "up")]
        cut[f"w13{kind}"] = np.stack([np.concatenate(part).ravel() for part in zip(*rows, strict=True)])
        cut[f"w2{kind}"] = np.stack([part.ravel() for part in np.split(arrays["down"], parts, axis=1)])
    return cut


def sizes(cut: dict[str, np.ndarray]) -> list[int]:
    """Bytes of each of the BUFFERS of one part."""
    return [cut[name][0].size if name in cut else 0 for name in BUFFERS]
