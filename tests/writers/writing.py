"""What the writers' scripts share. It runs in their environments: it needs numpy alone."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

TOKENS, TOP_K = 5, 2


def main(cases: Mapping[str, Callable[[Path], dict[str, np.ndarray]]]) -> None:
    """Makes a folder for each case. A case writes its files there, and returns the arrays of expected.npz."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    for name, write in cases.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        try:
            np.savez(folder / "expected.npz", **write(folder))
        except Exception:
            (folder / "error").write_text(traceback.format_exc())


def routed(hidden: int, experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [tokens, hidden], ids and router weights [tokens, top_k]: float64 of few bits, int64, float64 of float32 numbers.

    A token has an expert once.
    """
    random = np.random.default_rng(1)
    x = random.integers(-127, 128, (TOKENS, hidden)) / 64  # bfloat16 numbers
    ids = np.stack([random.permutation(experts)[:TOP_K] for _ in range(TOKENS)])
    return x, ids, random.uniform(0.1, 0.9, ids.shape).astype(np.float32).astype(np.float64)
