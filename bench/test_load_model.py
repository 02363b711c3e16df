"""Opening and loading a whole model, against reading the same files. Memory is asserted, speed is not."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
import time

import pytest

from bench import machine, reading, record
from bench.cases import EVERYWHERE
from bench.models import models
from ktmoe import model, synthetic
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import INDEX_NAME, Checkpoint

SHAPE = models()[EVERYWHERE]
LAYERS = 20
PEAK_RSS_LIMIT = 1.05  # of the packed bytes, beside what is read ahead
TIME_TARGET = 1.3  # of reading the files
ROUNDS = 3

#: The script that loads; it runs in a process of its own, since VmHWM only ever rises.
LOAD = """
import json, sys, time
import ktmoe
from pathlib import Path
start = time.perf_counter()
with ktmoe.MoEModel.from_checkpoint(sys.argv[1]) as model:
    seconds = time.perf_counter() - start
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(json.dumps({"seconds": seconds, "peak": 1024 * int(status["VmHWM"].split()[0]), "packed": model.nbytes}))
"""


OPEN_LAYERS, OPEN_EXPERTS = 43, 256  # DeepSeek-V4-Flash's, six tensors each
OPEN_TARGET = 2.0  # seconds


def test_open(benchmark, tmp_path):
    """Index, headers and their checks, of 66,048 tiny tensors in 46 files; against reading and parsing their JSON alone."""
    shape = {"num_experts": OPEN_EXPERTS, "hidden": 32, "intermediate": 32, "layers": OPEN_LAYERS}
    synthetic.write_deepseek_v4(tmp_path, **shape, shard_bytes=400_000)
    parsed = []

    def parse():
        start = time.perf_counter()
        json.loads((tmp_path / INDEX_NAME).read_bytes())
        for file in reading.files(tmp_path):
            with open(file, "rb") as opened:
                json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        parsed.append(time.perf_counter() - start)

    def open_all():
        with Checkpoint(tmp_path) as checkpoint:
            loader = find_loader(checkpoint)
            return [loader.load(checkpoint, layer) for layer in loader.layers(checkpoint)]

    assert len(benchmark.pedantic(open_all, setup=parse, rounds=10, warmup_rounds=1)) == OPEN_LAYERS
    seconds = benchmark.stats.stats.data
    benchmark.extra_info.update(
        record.shares(
            "load",
            [limit / opening for limit, opening in zip(parsed[-len(seconds) :], seconds, strict=True)],
            work=f"opening {6 * OPEN_LAYERS * OPEN_EXPERTS:,} tensors",
            seconds=statistics.median(seconds),
            parsing_seconds=statistics.median(parsed),
            figure=f"{statistics.median(seconds):.2f} s, parsing JSON alone {statistics.median(parsed):.2f} s",
            contract=f"below {OPEN_TARGET:g} s",
        )
    )


@pytest.fixture(scope="module")
def checkpoint(request, tmp_path_factory):
    """LAYERS layers of about as many GB as --load-gb says."""
    wanted = request.config.getoption("--load-gb") * 1e9
    experts = max(1, round(wanted / LAYERS / SHAPE.expert_bytes))
    nbytes = LAYERS * experts * SHAPE.expert_bytes
    path = tmp_path_factory.mktemp("model")
    if (free := shutil.disk_usage(path).free) < 1.1 * nbytes:
        pytest.skip(f"a checkpoint of {nbytes / 1e9:.1f} GB needs more disk than the {free / 1e9:.1f} GB that are free")
    if (most := machine.usable_bytes(0.9)) < 2 * nbytes:  # packed weights and page cache
        pytest.skip(f"a model of {nbytes / 1e9:.1f} GB beside its files takes more than {most / 1e9:.1f} GB of memory")
    try:
        sides = {"hidden": SHAPE.hidden, "intermediate": SHAPE.intermediate}
        synthetic.write_deepseek_v4(path, num_experts=experts, layers=LAYERS, shard_bytes=1 << 30, **sides)
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture(scope="module")
def readers(checkpoint):
    """The number of threads that reads the checkpoint fastest."""
    return reading.fastest(checkpoint)


@pytest.mark.parametrize("source", ["disk", "page cache"])
def test_load_model(benchmark, checkpoint, readers, source):
    """Against reading into one buffer and into memory that is kept, in the same rounds."""
    reused, kept, reports = [], [], []

    def prepare():
        if source == "disk":
            reading.forget(checkpoint)
        else:
            for _ in range(2):  # loading releases them, so that the first time brings them back
                reading.read(checkpoint, readers)
        reading.touch(3 * reading.total_bytes(checkpoint) // 2)  # packed weights, and what is on its way

    def measure(*command) -> str:
        prepare()
        done = subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True, text=True)
        return done.stdout

    def read():
        reused.append(float(measure("-m", "bench.reading", checkpoint, readers, "reuse")))
        kept.append(float(measure("-m", "bench.reading", checkpoint, readers, "keep")))

    def load():
        reports.append(json.loads(measure("-c", LOAD, checkpoint)))

    benchmark.pedantic(load, setup=read, rounds=ROUNDS)
    packed = reports[0]["packed"]
    staged = model.AT_ONCE * model.STAGED_EXPERTS * SHAPE.expert_bytes
    loads = [report["seconds"] for report in reports]
    seconds = statistics.median(loads)
    peak = max(report["peak"] for report in reports)
    of_reading, of_keeping = (
        statistics.median(loading / limit for loading, limit in zip(loads, limits, strict=True)) for limits in (reused, kept)
    )
    benchmark.extra_info.update(
        record.shares(
            "load",
            [limit / loading for limit, loading in zip(reused, loads, strict=True)],
            work=f"loading {LAYERS} layers, {packed / 1e9:.2f} GB, from the {source}",
            seconds=seconds,
            of_reading=of_reading,
            of_reading_into_new_memory=of_keeping,
            readers=readers,
            peak_rss_of_packed=peak / packed,
            staged_bytes=staged,
            figure=f"{seconds:.1f} s, {packed / seconds / 1e9:.2f} GB/s, {of_reading:.2f} x reading, {of_keeping:.2f} x "
            f"reading into new memory; peak RSS {peak / packed:.3f} x packed",
            contract=f"time at most {TIME_TARGET} x, peak RSS at most {PEAK_RSS_LIMIT} x and {math.ceil(staged / 1e6)} MB",
        )
    )
    assert peak <= PEAK_RSS_LIMIT * packed + staged
