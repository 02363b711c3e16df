"""Memory of a process that loads a model whose experts take 151 MB in bfloat16: they exist once, and packed ones never so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import engine_models
import pytest
import quantized_checkpoints

SIZES = {
    "hidden_size": 512,
    "moe_intermediate_size": 768,
    "intermediate_size": 768,
    **dict.fromkeys(("num_experts", "num_local_experts"), 32),
    "num_hidden_layers": 2,
}
#: Bytes of the experts in bfloat16, and a bound on what else a model has: buffers, the embedding, a layer's attention.
EXPERTS = 2 * 32 * 3 * 512 * 768 * 2
REST = 40 << 20
#: A process that loads a model in some way, after another of each kind that it imports, and prints bytes that came on top.
CODE = """
import gc, json, os, sys
import torch
from transformers import AutoModelForCausalLM
import ktmoe.transformers

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))

def eager(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="eager")

make = {
    "checkpoint": lambda folder: ktmoe.transformers.load(folder, source="checkpoint"),
    "parameters": lambda folder: ktmoe.transformers.load(folder, source="parameters"),
    "split": lambda folder: ktmoe.transformers.load(folder, source="checkpoint", gpu_experts=2),
    "pack": lambda folder: ktmoe.transformers.pack(eager(folder)),
    "eager": eager,
}[sys.argv[1]]
small, large = sys.argv[2:]
ids = torch.tensor([[5, 6, 7]])
with torch.inference_mode():
    make(small)(input_ids=ids)
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts again
    before = {key: status(key) for key in ("RssAnon", "VmRSS")}
    model = make(large)
    model(input_ids=ids)
    gc.collect()
    anonymous, peak = status("RssAnon") - before["RssAnon"], status("VmHWM") - before["VmRSS"]
print(json.dumps({"anonymous": anonymous, "peak": peak}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The folder of a large checkpoint: "qwen3_moe" or "gpt-oss MXFP4"."""
    folders = {name: tmp_path_factory.mktemp("large") for name in ("qwen3_moe", "gpt-oss MXFP4")}
    engine_models.save(engine_models.make("qwen3_moe", **SIZES), folders["qwen3_moe"])
    quantized_checkpoints.write("gpt-oss MXFP4", folders["gpt-oss MXFP4"], **SIZES)
    return folders


def measured(way: str, small: Path, large: Path) -> dict[str, int]:
    done = subprocess.run([sys.executable, "-c", CODE, way, small, large], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_packed_parameters_are_freed(checkpoint, large):
    """Way (a): afterwards the experts are there once."""
    found = measured("pack", checkpoint("qwen3_moe"), large["qwen3_moe"])
    assert found["anonymous"] <= EXPERTS + REST


def test_packing_while_transformers_loads(checkpoint, large):
    """Way (c): likewise, and on the way there is no second copy but of one of the two layers, and the file's pages."""
    found = measured("parameters", checkpoint("qwen3_moe"), large["qwen3_moe"])
    assert found["anonymous"] <= EXPERTS + REST


@pytest.mark.smoke
def test_experts_are_never_torch_tensors(checkpoint, large):
    """Way (b): even the peak is the experts once."""
    found = measured("checkpoint", checkpoint("qwen3_moe"), large["qwen3_moe"])
    assert EXPERTS < found["peak"] <= EXPERTS + REST


def test_experts_on_a_gpu_are_there_twice(checkpoint, large):
    """Those alone: packed ones and 2 of 32 in bfloat16, without a third copy on the way, but of one expert."""
    found = measured("split", checkpoint("qwen3_moe"), large["qwen3_moe"])
    assert EXPERTS < found["peak"] <= EXPERTS * (1 + 2 / 32) + REST


def test_packed_experts_are_never_bfloat16(checkpoint, large):
    """Way (b) of MXFP4: 4.25 bits a weight of bfloat16's 16."""
    found = measured("checkpoint", checkpoint("gpt-oss MXFP4"), large["gpt-oss MXFP4"])
    assert found["peak"] <= EXPERTS * 4.25 / 16 + REST
