"""What the tests of packed caches share: a layer's file of given experts, a small checkpoint with its cache, and batches."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ktmoe import MoELayer, MoEModel, backends, synthetic
from ktmoe.backends.base import Plan
from ktmoe.backends.choice import choose_backend
from ktmoe.cache import manifest
from ktmoe.cache.manifest import Item
from ktmoe.cache.packed_file import PackedFileWriter, open_packed
from ktmoe.cache.packing import pack
from ktmoe.errors import CacheError
from ktmoe.machine import numa
from ktmoe.machine.numa import placement_of

SIZES = {"num_experts": 5, "hidden": 128, "intermediate": 256}


def arenas_of(folder, experts, numa_nodes=None):
    """The Arenas of these experts, or of these LinearWeights, in a file that is written here."""
    item = Item("layer", 0)
    placement = placement_of(experts, numa_nodes)
    shards = numa.split(experts.intermediate, experts.shard_unit, placement.shards)
    entry = manifest.expected(item, experts, shards)
    stated = manifest.stated(item, entry, "")
    writer = None
    choice = choose_backend("auto", experts)
    plan = Plan(activations=choice.activations, placement=placement)
    try:
        for one in backends.get(choice.name).pack_each(experts, plan):
            writer = writer or PackedFileWriter(folder / entry.file, experts, shards, one, stated)
            writer.add(one)
        writer.finish()
        writer.commit()
    finally:
        if writer:
            writer.abort()
    return open_packed(folder, replace(entry, nbytes=writer.nbytes), experts, stated)


def write_model(folder, layers=2, write=synthetic.write_deepseek_v4):
    """A small checkpoint and its cache: (path, path)."""
    write(folder / "model", layers=layers, **SIZES)
    pack(folder / "model", folder / "cache")
    return folder / "model", folder / "cache"


def batch(hidden, num_experts, tokens=3, seed=0):
    """x, expert_ids, expert_weights, with every expert among them if there are enough tokens."""
    rng = np.random.default_rng(seed)
    ids = np.resize(rng.permutation(num_experts), (tokens, 2))
    return rng.standard_normal((tokens, hidden)).astype(np.float32), ids, rng.random((tokens, 2)).astype(np.float32)


def outputs(layer: MoELayer, tokens=3):
    return layer.forward(*batch(layer.hidden, layer.num_experts, tokens))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint and its cache, which no test changes."""
    return write_model(tmp_path_factory.mktemp("made"))


@pytest.fixture
def model(made, tmp_path):
    """A copy of the checkpoint, with its times, and of its cache."""
    for folder in made:
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path / "model", tmp_path / "cache"


def edit(cache, change):
    """Change what a cache's manifest says."""
    data = json.loads((cache / manifest.NAME).read_text())
    change(data)
    (cache / manifest.NAME).write_text(json.dumps(data))


def refused(path, cache, match):
    """Check that a layer and a model refuse a cache, both before anything is mapped."""
    for load in (lambda: MoELayer.from_checkpoint(path, 0, cache=cache), lambda: MoEModel.from_checkpoint(path, cache=cache)):
        with pytest.raises(CacheError, match=match):
            load()
