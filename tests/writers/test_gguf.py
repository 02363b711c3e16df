"""GGUF files of the package gguf: its reader and its dequantize() find what ktmoe finds; and it reads what ktmoe makes."""

from __future__ import annotations

import json
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from conftest import ENVIRONMENTS
from served import check_layer, claimed

from ktmoe.dequantization import dequantize
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.synthetic.gguf import MIXED, write_gguf
from ktmoe.weights.ggml import GGML

EXPERTS, HIDDEN = 3, 512


@pytest.mark.smoke
@pytest.mark.parametrize("name", [*GGML, "Q4_K_M", "split"])
def test_what_gguf_writes(case, name):
    """Names, types, shapes, places and bytes are those of its reader, weights those of its dequantize(), in float32.

    A layer computes with them.
    """
    folder = case("torch", "gguf", name)
    with np.load(folder / "expected.npz") as arrays:
        expected = dict(arrays)
    loader, checkpoint = claimed(folder, "gguf")
    assert list(checkpoint.names()) == expected["names"].tolist()
    for tensor, kind, shape, offset in zip(*(expected[key] for key in ("names", "types", "shapes", "offsets")), strict=True):
        info = checkpoint.info(tensor)
        assert (info.dtype, info.shape, info.offset) == (kind, tuple(shape), offset)
        np.testing.assert_array_equal(checkpoint.read(tensor), expected[f"bytes.{tensor}"])
    assert loader.layers(checkpoint) == [0, 1]
    assert checkpoint.config["num_experts"] == EXPERTS
    experts = loader.load(checkpoint, 1)
    for projection in PROJECTIONS:
        for expert in range(EXPERTS):
            weights, theirs = dequantize(experts.matrix(expert, projection)), expected[f"w.{projection}"][expert]
            # theirs is a float32 product or difference of exact float32 numbers
            assert (np.abs(weights - theirs) <= 2.0**-23 * np.abs(weights)).all()
    check_layer(folder, 1, EXPERTS, HIDDEN)


@pytest.mark.smoke("one")
@pytest.mark.parametrize("types", [*MIXED, *GGML])
def test_gguf_reads_what_is_made(tmp_path, types):
    """ktmoe.synthetic's files, split."""
    home = Path(ENVIRONMENTS or "none") / "torch"
    if not (home / "installed").exists():
        pytest.skip("torch is not installed: make test-writers")
    write_gguf(tmp_path, types=types, num_experts=2, hidden=256, intermediate=512, layers=2, splits=2)
    command = [home / "bin" / "python", Path(__file__).with_name("read_gguf.py"), *sorted(tmp_path.glob("*.gguf"))]
    rows = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=100).stdout)
    with Checkpoint(tmp_path) as checkpoint:
        infos = [checkpoint.info(name) for name in checkpoint.names()]
        ours = [[i.name, i.dtype, list(i.shape), i.offset, zlib.crc32(checkpoint.read(i.name))] for i in infos]
    assert rows == ours
