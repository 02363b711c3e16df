"""Packing a cache: what is there afterwards is whole, whatever happened meanwhile, and belongs to this checkpoint."""

import json
import multiprocessing
import os
import resource
import shutil
import signal

import numpy as np
import pytest
from cached import SIZES, edit, outputs
from helpers import same_bits

from ktmoe import MoELayer, MoEModel, synthetic
from ktmoe.cache import manifest
from ktmoe.cache.packing import pack
from ktmoe.errors import CacheError, CheckpointError, InputError, OutOfSpaceError, OutputError
from ktmoe.files.atomic import AtomicFile
from ktmoe.files.lock import exclusive

MANIFEST = manifest.NAME


def whole(path, cache):
    """Packing again ends with a cache that has all bytes, and leaves nothing beside it."""
    done = pack(path, cache, verify=True)
    assert sorted(done.written + done.kept) == done.verified == [0, 1]
    assert sorted(os.listdir(cache)) == [MANIFEST, "layer-0.safetensors", "layer-1.safetensors"]
    with MoEModel.from_checkpoint(path) as packed, MoEModel.from_checkpoint(path, cache=cache) as mapped:
        assert all(same_bits(outputs(packed[layer]), outputs(mapped[layer])) for layer in packed)
    return done


def pack_until(write, path, cache):
    """Packs, and is killed before a write of that number."""
    ours, left = AtomicFile.write, write

    def last(self, *arguments):
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        ours(self, *arguments)

    AtomicFile.write = last
    pack(path, cache)


#: The number of all writes: the first manifest's, those of a layer's file from its header to what was seen, the next
#: manifest's.
WRITES = 1 + 2 * (1 + 1 + 3 * SIZES["num_experts"] + 1 + 1 + 1)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("write", [1, 2, 3, 5, 19, 20, 21, 22, 30, WRITES - 1, WRITES])
def test_killed_at_any_write(made, tmp_path, write):
    """What is left loads nothing that is not whole, and the next run completes it."""
    path, cache = made[0], tmp_path / "cache"
    child = multiprocessing.get_context("fork").Process(target=pack_until, args=(write, path, cache))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(CacheError, match=r"expected a packed cache|expected to be packed"):
        MoEModel.from_checkpoint(path, cache=cache)
    whole(path, cache)


def test_interrupted(made, tmp_path):
    """Ctrl-C in the second layer: the first stays, and nothing else."""
    done = 0

    def progress(now, total):
        nonlocal done
        done += 1
        if done == SIZES["num_experts"] + 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(made[0], tmp_path / "cache", progress=progress)
    assert sorted(os.listdir(tmp_path / "cache")) == [MANIFEST, "layer-0.safetensors"]
    with MoEModel.from_checkpoint(made[0], [0], cache=tmp_path / "cache") as model:
        assert np.isfinite(outputs(model[0])).all()
    assert whole(made[0], tmp_path / "cache").kept == [0]


def test_the_disk_is_full(made, tmp_path):
    """As far as a limit for files tells."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, limits[1]))
        with pytest.raises(OutputError, match=r"layer-0.safetensors: cannot be written: "):
            pack(made[0], tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(tmp_path / "cache") == [MANIFEST]
    whole(made[0], tmp_path / "cache")


def test_too_little_space(made, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(OutOfSpaceError, match="2 packed layers need"):
        pack(made[0], tmp_path / "cache")
    assert not os.listdir(tmp_path / "cache")


def test_two_at_once(made, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    with exclusive(cache), pytest.raises(OutputError, match="cache: another process is writing it"):
        pack(made[0], cache)
    whole(made[0], cache)


def test_the_target_has_something_else(made, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="expected a folder, or a place for one"):
        pack(made[0], tmp_path / "file")
    with pytest.raises(OutputError, match="expected an empty folder or a packed cache, found 'file' in it"):
        pack(made[0], tmp_path)
    with pytest.raises(OutputError, match=r"expected an empty folder or a packed cache, found 'config.json' in it"):
        pack(made[0], made[0])


def test_the_target_is_a_cache_of_another_checkpoint(model):
    path, cache = model
    os.utime(path / "model.safetensors")
    with pytest.raises(OutputError, match=r"found one of another: .*model.safetensors: last change.*; remove .*cache, or"):
        pack(path, cache)


def test_the_target_is_a_cache_of_another_layout(model):
    path, cache = model
    edit(cache, lambda data: data["layers"]["0"]["layout"].__setitem__("q4", 99))
    with pytest.raises(OutputError, match=r"layer 0 is packed for 1 NUMA nodes, versions .*'q4': 99"):
        pack(path, cache)
    edit(cache, lambda data: data.__setitem__("version", 99))
    with pytest.raises(OutputError, match=r"version: expected 3, found 99.*; remove .*cache, or choose another folder"):
        pack(path, cache)


def _touch(file):
    os.utime(file)


def _replace(file):
    """What is read goes on to be the old one."""
    shutil.copy(file, file.with_name("copy"))
    os.replace(file.with_name("copy"), file)


@pytest.mark.parametrize(
    ("change", "match"), [(_touch, "changed while it was read"), (_replace, "expected files that do not change meanwhile")]
)
def test_the_checkpoint_changes_meanwhile(tmp_path, change, match):
    """Nothing of the layer that was being packed stays."""
    synthetic.write_deepseek_v4(tmp_path / "model", layers=2, **SIZES)
    os.utime(tmp_path / "model" / "model.safetensors", ns=(0, 10**18))

    def progress(now, total):
        change(tmp_path / "model" / "model.safetensors")

    with pytest.raises(CheckpointError, match=match):
        pack(tmp_path / "model", tmp_path / "cache", progress=progress)
    assert os.listdir(tmp_path / "cache") == [MANIFEST]


def test_what_is_there_is_kept(model):
    path, cache = model
    times = {file.name: file.stat().st_mtime_ns for file in cache.iterdir()}
    done = pack(path, cache)
    assert (done.written, done.kept, done.verified) == ([], [0, 1], [])
    assert {file.name: file.stat().st_mtime_ns for file in cache.iterdir()} == times
    (cache / "layer-1.safetensors").unlink()
    assert whole(path, cache).written == [1]


@pytest.mark.parametrize("end", [False, True])
def test_verify_finds_a_changed_byte(model, end):
    """Of the last expert's down, or of what was seen of its scales."""
    path, cache = model
    file = cache / "layer-1.safetensors"
    data = bytearray(file.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little")
    with MoELayer.from_checkpoint(path, 1) as layer:
        arena_end = start + header["shard.0"]["data_offsets"][0] + layer.nbytes
    data[-2 if end else arena_end - 100] ^= 1
    file.write_bytes(data)
    what = "scales, biases or factors" if end else "down"
    with pytest.raises(CacheError, match=f"layer-1.safetensors: expert 4: {what}: expected the bytes that packing gives"):
        pack(path, cache, verify=True)


@pytest.mark.parametrize("layers", [[], [0, 0], ["0", 0]])
def test_layers_that_are_none(made, tmp_path, layers):
    with pytest.raises(InputError, match="layers: expected at least one, each once"):
        pack(made[0], tmp_path / "cache", layers)
