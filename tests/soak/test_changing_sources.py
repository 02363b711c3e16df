"""Files that change while they are read: the load gives the old weights or the new ones, or an exception that names a file.

A read is made half, then something else writes into the folder, then the rest is read. Which one is the case's choice. All
numbers differ between the old files and the new ones, so that a mixture is neither.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from adapter_files import QWEN, lora
from cached import outputs

from ktmoe import Linear, MoELayer, MoEModel, synthetic
from ktmoe.adapters import export_adapter, import_adapter
from ktmoe.cache.packing import pack
from ktmoe.errors import KtmoeError
from ktmoe.loaders.base import load_experts

SIZES = {"num_experts": 2, "hidden": 64, "intermediate": 64}
#: Times of change of old and of new files, in ns: none that the test makes is within their ticks.
TIMES = {1: 10**18, 2: 10**18 + 10**9}


def write_index(folder, seed):
    synthetic.write_qwen3(folder, layers=2, shard_bytes=30_000, seed=seed, **SIZES)


def write_files(folder, seed):
    write_index(folder, seed)
    (folder / "model.safetensors.index.json").unlink()


def write_gguf(folder, seed):
    synthetic.write_gguf(folder, types="Q8_0", layers=2, splits=2, seed=seed, **SIZES)


def write_cache(folder, seed):
    write_index(folder / "model", seed)
    write(folder, contents(folder), TIMES[seed])  # which the cache keeps
    pack(folder / "model", folder / "cache")


def write_adapter(folder, seed):
    export_adapter(folder, {0: lora(seed=seed, alpha=3.0 * seed)}, QWEN)


def matrices(folder):
    experts = load_experts(folder, 1)
    chosen = itertools.product(range(2), ("gate", "up", "down"))
    return [array for expert, projection in chosen for array in experts.matrix(expert, projection).stored.values()]


def layer(folder):
    with MoELayer.from_checkpoint(folder, 1) as made:
        return [outputs(made)]


def model(folder):
    with MoEModel.from_checkpoint(folder) as made:
        return [outputs(made[number]) for number in (0, 1)]


def linear(folder):
    with Linear.from_checkpoint(folder, "model.layers.1.mlp.experts.1.down_proj") as made:
        return [made.forward(np.ones((1, 64), np.float32))]


def cache(folder):
    with MoELayer.from_checkpoint(folder / "model", 0, cache=folder / "cache") as made:
        return [outputs(made)]


def adapter(folder):
    (found,) = import_adapter(folder, QWEN).values()
    return [np.array([found.scale]), *itertools.chain(*found.pairs.values())]


#: How a folder is written, and what loads it.
LOADS = {
    "matrices by an index": (write_index, matrices),
    "a layer": (write_files, layer),
    "a model": (write_index, model),
    "a dense matrix": (write_index, linear),
    "GGUF": (write_gguf, matrices),
    "a packed cache": (write_cache, cache),
    "an adapter": (write_adapter, adapter),
}


def rewrite(folder, new, choose):
    """All files, with other bytes of the same size."""
    for path, data in new.items():
        with open(folder / path, "r+b") as file:
            file.write(data)


def truncate(folder, new, choose):
    path = folder / choose.choice(list(new))
    os.truncate(path, choose.randrange(path.stat().st_size))


def replace(folder, new, choose):
    for path, data in new.items():
        beside = folder / f"{path}.new"
        beside.write_bytes(data)
        os.utime(beside, ns=(TIMES[2], TIMES[2]))
        os.replace(beside, folder / path)


def remove(folder, new, choose):
    shutil.rmtree(folder)


def exchange(folder, new, choose):
    """Another folder takes the place of this one."""
    folder.rename(folder.with_name("away"))
    write(folder, new, TIMES[2])


CHANGES = {each.__name__: each for each in (rewrite, truncate, replace, remove, exchange)}


def write(folder, files, time):
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        os.utime(folder / path, ns=(time, time))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def read(load, folder):
    return [array.tobytes() for array in load(folder)]


class Reads:
    """os.preadv, which counts, and makes one read in two halves with a change in between."""

    def __init__(self, monkeypatch):
        self._real, self._lock = os.preadv, threading.Lock()
        self.begin()
        monkeypatch.setattr(os, "preadv", self._read)

    def begin(self, at=-1, change=lambda: None):
        self.count, self.at, self.change = 0, at, change

    def _read(self, descriptor, buffers, offset, *flags):
        with self._lock:
            number, self.count = self.count, self.count + 1
        if number != self.at:
            return self._real(descriptor, buffers, offset, *flags)
        (buffer,) = buffers
        half = memoryview(buffer)[: -(-len(buffer) // 2)]
        done = self._real(descriptor, [half], offset, *flags)
        self.change()
        return done


class Folder:
    """What is loaded, in two versions. old, new: files. results: what each of them gives."""

    def __init__(self, folder: Path, write_one, load, reads: Reads):
        self.path, self.load = folder / "now", load
        versions = []
        for seed in (1, 2):
            write_one(self.path, seed)
            versions.append(contents(self.path))
            shutil.rmtree(self.path)
        self.old, self.new = versions
        self.restore()
        reads.begin()
        self.results = {"old": read(load, self.path)}
        self.reads = reads.count
        write(self.path, self.new, TIMES[2])
        self.results["new"] = read(load, self.path)

    def restore(self):
        for path in (self.path, self.path.with_name("away")):
            shutil.rmtree(path, ignore_errors=True)
        write(self.path, self.old, TIMES[1])

    def outcome(self):
        """ "old", "new" or "refused"; AssertionError."""
        try:
            found = read(self.load, self.path)
        except KtmoeError as error:
            if str(self.path) in str(error):
                return "refused"
            raise
        names = [name for name, result in self.results.items() if result == found]
        assert names, "a mixture was read"
        return names[0]


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


EXHAUSTIVE = pytest.mark.exhaustive
IN_ANY_RUN = ("matrices by an index", "an adapter")


@pytest.mark.parametrize("what", [each if each in IN_ANY_RUN else pytest.param(each, marks=EXHAUSTIVE) for each in LOADS])
def test_changing(repeat, monkeypatch, tmp_path, what):
    reads = Reads(monkeypatch)
    folder = Folder(tmp_path, *LOADS[what], reads)
    before = descriptors()
    for number in repeat(f"changing while it is read: {what}", 200, len(CHANGES)):
        choose, (name, change) = random.Random(number), list(CHANGES.items())[number % len(CHANGES)]
        folder.restore()
        reads.begin(choose.randrange(folder.reads), lambda change=change, by=choose: change(folder.path, folder.new, by))
        found = folder.outcome()
        assert reads.count > reads.at, (number, name, found)
        assert descriptors() == before, (number, name)
