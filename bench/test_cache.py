"""Packed caches: how fast a layer starts and computes from one, beside packing anew; and what small pages and a disk cost."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import statistics
import time

import numpy as np
import pytest

from bench import machine, overcommit, reading, record
from bench.cases import EVERYWHERE
from bench.models import models
from ktmoe import MoELayer, synthetic
from ktmoe.cache.packing import pack

SHAPE = models()[EVERYWHERE]
EXPERTS, TOP_K = 32, 6
ROUNDS = 5
#: Calls of a round, of which the median counts, by their tokens.
CALLS = {1: 100, 256: 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint of one layer, and its cache: (path, path)."""
    folder = tmp_path_factory.mktemp("cached")
    nbytes = EXPERTS * SHAPE.expert_bytes
    if (most := machine.usable_bytes(0.9)) < 4 * nbytes:
        pytest.skip(f"a layer of {nbytes / 1e9:.1f} GB, packed and in two files, takes more than {most / 1e9:.1f} GB of memory")
    try:
        sides = {"hidden": SHAPE.hidden, "intermediate": SHAPE.intermediate}
        synthetic.write_deepseek_v4(folder / "model", num_experts=EXPERTS, **sides)
        pack(folder / "model", folder / "cache")
        yield folder / "model", folder / "cache"
    finally:
        shutil.rmtree(folder)


def batch(tokens: int, seed: int):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
    return rng.standard_normal((tokens, SHAPE.hidden)).astype(np.float32), ids, np.full((tokens, TOP_K), 1 / TOP_K, np.float32)


def seconds_of(layers: tuple[MoELayer, ...], tokens: int, calls: int, seed: int) -> list[float]:
    """The seconds of a call of each layer, by turns: the medians of some calls with other experts each."""
    took = [[] for _ in layers]
    for call in range(calls):
        arguments = batch(tokens, 1000 * seed + call)
        for layer, seconds in zip(layers, took, strict=True):
            start = time.perf_counter()
            layer.forward(*arguments)
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in took]


@pytest.mark.parametrize("source", ["disk", "page cache"])
@pytest.mark.parametrize("way", ["mapping", "packing anew"])
def test_start(benchmark, model, way, source):
    """Time until the layer is there, and then until it has computed its first token; against reading the same files."""
    path, cache = model
    files = cache if way == "mapping" else path
    options = {"cache": cache} if way == "mapping" else {}
    there, first, read = [], [], []

    def prepare():
        for folder in model:
            reading.forget(folder)
        read.append(reading.read(files, 2))
        if source == "disk":
            reading.forget(files)
        elif way == "mapping":  # as mapping reads it, in huge pages
            reading.forget(files)
            with MoELayer.from_checkpoint(path, 0, cache=cache) as layer:
                layer.forward(*batch(EXPERTS, 1))

    def start():
        begun = time.perf_counter()
        with MoELayer.from_checkpoint(path, 0, **options) as layer:
            there.append(time.perf_counter() - begun)
            layer.forward(*batch(1, 1))
            first.append(time.perf_counter() - begun)

    benchmark.pedantic(start, setup=prepare, rounds=ROUNDS)
    layer_seconds, token_seconds = statistics.median(there), statistics.median(first)
    benchmark.extra_info.update(
        record.shares(
            "load",
            [limit / took for limit, took in zip(read, first, strict=True)],
            work=f"start by {way}, from {source}",
            seconds=layer_seconds,
            first_token_seconds=token_seconds,
            figure=f"{layer_seconds * 1e3:.0f} ms, first token after {token_seconds * 1e3:.0f} ms",
            contract="",
        )
    )


def in_small_pages(cache, folder):
    """A copy of a cache whose pages in the page cache are of 4 KiB each."""
    shutil.copytree(cache, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in reading.files(cache):
        with open(file, "rb") as source, open(folder / file.name, "wb", buffering=0) as to:
            while piece := source.read(mmap.PAGESIZE):
                to.write(piece)
    os.sync()
    return folder


@pytest.mark.parametrize("tokens", CALLS)
@pytest.mark.parametrize("pages", ["huge pages", "pages of 4 KiB"])
def test_calls(benchmark, model, tmp_path, pages, tokens):
    """Calls of a mapped layer whose file is in the page cache, against the same layer packed, in the same rounds."""
    path, cache = model
    reading.forget(cache)
    cache = cache if pages == "huge pages" else in_small_pages(cache, tmp_path / "small")
    mapped_seconds, packed_seconds = [], []
    with MoELayer.from_checkpoint(path, 0) as packed, MoELayer.from_checkpoint(path, 0, cache=cache) as mapped:
        for layer in (mapped, packed):
            layer.forward(*batch(EXPERTS, 1))

        def calls():
            found = seconds_of((mapped, packed), tokens, CALLS[tokens], len(mapped_seconds))
            mapped_seconds.append(found[0])
            packed_seconds.append(found[1])

        benchmark.pedantic(calls, rounds=ROUNDS, warmup_rounds=1)
    rounds = [limit / took for limit, took in zip(packed_seconds, mapped_seconds, strict=True)]
    benchmark.extra_info.update(
        record.shares(
            "load",
            rounds,
            work=f"{tokens} tokens from mapped {pages}",
            seconds=statistics.median(mapped_seconds),
            figure=f"{statistics.median(mapped_seconds) * 1e3:.2f} ms, packed {statistics.median(packed_seconds) * 1e3:.2f} ms",
            contract="",
        )
    )


class Eviction:
    """Takes experts of a mapped layer out of memory and out of the page cache, as the system does where memory is short."""

    def __init__(self, file, layer: MoELayer):
        with open("/proc/self/maps") as maps:
            line = next(line for line in maps if line.rstrip().endswith(str(file)))
        self._start, self._offset = int(line.split("-")[0], 16), int(line.split()[2], 16)
        self._expert_bytes = layer.nbytes // EXPERTS
        self._file = os.open(file, os.O_RDONLY)
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def evict(self, expert: int) -> None:
        first = expert * self._expert_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        assert self._madvise(self._start + first, self._expert_bytes, mmap.MADV_DONTNEED) == 0
        os.posix_fadvise(self._file, self._offset + first, self._expert_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._file)


def test_half_of_the_experts_are_on_disk(benchmark, model):
    """One token a call, half of whose experts are in memory: as if a model were twice as large as memory, and routing random.

    Nothing is reclaimed here: what a call needs was evicted before it. Against reading what is missing.
    """
    path, cache = model
    file = reading.files(cache)[0]
    reading.forget(cache)
    missing = TOP_K // 2
    limit = reading.read(cache, 2) / EXPERTS * missing
    took = []
    with MoELayer.from_checkpoint(path, 0, cache=cache) as layer:
        layer.forward(*batch(EXPERTS, 1))
        eviction = Eviction(file, layer)

        def calls():
            seconds = []
            for call in range(10):
                x, ids, weights = batch(1, 100 * len(took) + call)
                for expert in ids[0, :missing]:
                    eviction.evict(int(expert))
                start = time.perf_counter()
                layer.forward(x, ids, weights)
                seconds.append(time.perf_counter() - start)
            took.append(statistics.median(seconds))

        benchmark.pedantic(calls, rounds=ROUNDS, warmup_rounds=1)
        eviction.close()
    seconds = statistics.median(took)
    benchmark.extra_info.update(
        record.shares(
            "load",
            [limit / one for one in took],
            work="1 token, half of its experts on disk",
            seconds=seconds,
            reading_seconds=limit,
            figure=f"{seconds * 1e3:.1f} ms, reading them alone {limit * 1e3:.1f} ms",
            contract="",
        )
    )


def test_a_layer_twice_as_large_as_its_memory(benchmark, model):
    """One token a call, random routing, in a control group that has memory for half of the layer. Against reading half of a
    token's experts, which is what is missing on average."""
    path, cache = model
    nbytes, calls = EXPERTS * SHAPE.expert_bytes, 100
    reading.forget(cache)
    limit = reading.read(cache, 2) / EXPERTS * TOP_K / 2
    took = []

    def run():
        reading.forget(cache)
        with overcommit.limited(nbytes // 2 + overcommit.PROCESS_BYTES) as group:
            seconds = overcommit.seconds_of_calls(path, cache, EXPERTS, calls, group)
        took.append(statistics.median(seconds[calls // 2 :]))  # the first ones fill the memory

    try:
        benchmark.pedantic(run, rounds=ROUNDS)
    except overcommit.NoGroupError as error:
        pytest.skip(str(error))
    reading.forget(cache)
    free = statistics.median(overcommit.seconds_of_calls(path, cache, EXPERTS, calls, None)[calls // 2 :])
    seconds = statistics.median(took)
    benchmark.extra_info.update(
        record.shares(
            "load",
            [limit / one for one in took],
            work="1 token, memory for half of the experts",
            seconds=seconds,
            free_seconds=free,
            reading_seconds=limit,
            figure=f"{seconds * 1e3:.1f} ms, in enough memory {free * 1e3:.1f} ms, reading them alone {limit * 1e3:.1f} ms",
            contract="",
        )
    )
