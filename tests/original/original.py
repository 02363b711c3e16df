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
