"""Loading: how fast weights are packed and loaded, and what memory that takes. Memory is asserted, speed is not."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ktmoe
from bench import record
from bench.cases import EVERYWHERE
from bench.copying import Copying
from bench.models import models
from ktmoe import synthetic
from ktmoe._native import core
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.matrix import Matrix
from ktmoe.weights.formats import BF16
from ktmoe.weights.order import TRANSPOSED

SHAPE = models()[EVERYWHERE]
SIDES = {"hidden": SHAPE.hidden, "intermediate": SHAPE.intermediate}
EXPERTS = 64  # in the checkpoint that is loaded
PEAK_RSS_LIMIT = 1.15  # of the packed bytes
OVERHEAD_LIMIT = 1.01  # packed over checkpoint bytes
STAGED = 8  # experts in memory to pack from

#: The script that loads; it runs in a process of its own, since VmHWM only ever rises.
LOAD = """
import json, sys, time
import ktmoe
from pathlib import Path
start = time.perf_counter()
with ktmoe.MoELayer.from_checkpoint(sys.argv[1], 0) as layer:
    seconds = time.perf_counter() - start
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(json.dumps({"seconds": seconds, "peak": 1024 * int(status["VmHWM"].split()[0]), "packed": layer.nbytes}))
"""


def _transposed(experts: ExpertWeights) -> ExpertWeights:
    """The same, as tensors that x is multiplied with as they stand have them: Llama-4's, and gpt-oss's in bfloat16."""
    weight_format = replace(BF16, order=TRANSPOSED)

    def read(expert: int, projection: str) -> Matrix:
        matrix = experts.matrix(expert, projection)
        return replace(matrix, format=weight_format, codes=np.ascontiguousarray(matrix.codes.T))

    return ExpertWeights(experts.num_experts, experts.hidden, experts.intermediate, read, weight_format)


PACKED = {
    "packing from memory": lambda: SHAPE.make(STAGED),
    "packing bfloat16 from memory": lambda: synthetic.qwen3_experts(num_experts=STAGED, **SIDES),
    "packing transposed bfloat16 from memory": lambda: _transposed(synthetic.qwen3_experts(num_experts=STAGED, **SIDES)),
    "packing GGUF's Q4_K from memory": lambda: synthetic.gguf_experts(types="Q4_K", num_experts=STAGED, **SIDES),
    "packing GGUF's Q6_K from memory": lambda: synthetic.gguf_experts(types="Q6_K", num_experts=STAGED, **SIDES),
}


@pytest.mark.parametrize("work", PACKED)
def test_packing(benchmark, work):
    """Packing from memory, against copying the same bytes with as many threads in the same rounds."""
    experts = PACKED[work]()
    staged = [{p: experts.matrix(e, p) for p in PROJECTIONS} for e in range(STAGED)]
    source = np.frombuffer(b"".join(a.tobytes() for s in staged for m in s.values() for a in m.stored.values()), np.uint8)
    with MoELayer(experts) as layer, Copying(source) as memcpy:

        def pack():
            for expert, matrices in enumerate(staged):
                layer.packed.pack(expert, matrices)

        benchmark.pedantic(pack, setup=memcpy.copy, rounds=10, warmup_rounds=1)
        unpacked = core.unpack(layer.packed, STAGED - 1, "down")
    for label, array in staged[-1]["down"].stored.items():
        assert np.array_equal(unpacked[label].view(np.uint8), array.view(np.uint8))
    packing = benchmark.stats.stats.data
    shares = memcpy.shares(packing)
    share = statistics.median(shares)
    rate = experts.nbytes / statistics.median(packing) / 1e9
    benchmark.extra_info.update(
        record.shares(
            "load",
            shares,
            work=work,
            gb_s=rate,
            of_memcpy=share,
            figure=f"{rate:.2f} GB/s, {share:.0%} of memcpy with {ktmoe.get_num_threads()} threads",
            contract="at least 50 %",
        )
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    try:
        synthetic.write_deepseek_v4(path, num_experts=EXPERTS, **SIDES)
        yield path
    finally:
        for file in path.iterdir():
            file.unlink()


def test_load_from_page_cache(benchmark, checkpoint):
    """Against reading the files from the page cache by one thread, in the same rounds."""
    reports, read = [], []

    def warm():
        for _ in range(2):  # loading releases them from the page cache, so that the first time brings them back
            start = time.perf_counter()
            for file in checkpoint.iterdir():
                with open(file, "rb", buffering=0) as opened:
                    while opened.read(1 << 22):
                        pass
            seconds = time.perf_counter() - start
        read.append(seconds)

    def load():
        done = subprocess.run([sys.executable, "-c", LOAD, checkpoint], check=True, capture_output=True, text=True)
        reports.append(json.loads(done.stdout))

    benchmark.pedantic(load, setup=warm, rounds=5)
    packed = reports[0]["packed"]
    loads = [report["seconds"] for report in reports]
    seconds = statistics.median(loads)
    peak = max(report["peak"] for report in reports) / packed
    benchmark.extra_info.update(
        record.shares(
            "load",
            [reading / loading for reading, loading in zip(read, loads, strict=True)],
            work=f"loading {packed / 1e9:.2f} GB from the page cache",
            seconds=seconds,
            peak_rss_of_packed=peak,
            figure=f"{seconds:.2f} s, {packed / seconds / 1e9:.2f} GB/s; peak RSS {peak:.3f} x packed",
            contract=f"peak RSS at most {PEAK_RSS_LIMIT} x",
        )
    )
    assert peak <= PEAK_RSS_LIMIT


def test_memory_overhead(benchmark, checkpoint):
    stored = sum(os.stat(file).st_size for file in Path(checkpoint).glob("*.safetensors"))
    with benchmark.pedantic(MoELayer.from_checkpoint, args=(checkpoint, 0), rounds=1) as layer:
        ratio = layer.nbytes / stored
    benchmark.extra_info.update(
        record.shares(
            "load",
            [1 / ratio],
            work="memory of a loaded layer",
            packed_of_checkpoint=ratio,
            figure=f"{ratio:.4f} x the checkpoint's files",
            contract=f"at most {OVERHEAD_LIMIT} x",
        )
    )
    assert ratio <= OVERHEAD_LIMIT
