"""A packed cache serves the checkpoint that it was packed from, and no other one; each of its files serves its own layer."""

import json
import os
import shutil
import tracemalloc
from types import SimpleNamespace

import pytest
from cached import SIZES, outputs, refused
from gguf_files import F32, layer, metadata, u32, write
from helpers import same_bits

from ktmoe import MoELayer, synthetic
from ktmoe.cache import source
from ktmoe.cache.opened import Cache
from ktmoe.cache.packing import pack
from ktmoe.errors import CacheError, OutputError
from ktmoe.loaders.checkpoint import Checkpoint

#: The time of every file here, so that times tell nothing.
TIME_NS = 10**18

KINDS = {
    "gguf": lambda path, seed: synthetic.write_gguf(path, layers=2, num_experts=5, hidden=256, intermediate=256, seed=seed),
    "safetensors": lambda path, seed: synthetic.write_deepseek_v4(path, layers=2, seed=seed, **SIZES),
}


@pytest.fixture(params=KINDS)
def alike(request, tmp_path):
    """Two checkpoints a and b that differ in their weights alone: (a's path, b's path), two files of one folder."""
    (tmp_path / "models").mkdir()
    for seed, name in enumerate("ab"):
        KINDS[request.param](tmp_path / name, seed)
        for file in (tmp_path / name).iterdir():
            of_model = file.stem == "model"
            os.utime(file, ns=(TIME_NS, TIME_NS))
            shutil.copy2(file, tmp_path / "models" / (f"{name}.{request.param}" if of_model else file.name))
    return tuple(tmp_path / "models" / f"{name}.{request.param}" for name in "ab")


def swap(one, other):
    """Their names."""
    one.rename(one.with_name("third"))
    other.rename(one)
    one.with_name("third").rename(other)


def test_another_file_of_the_folder(alike, tmp_path):
    a, b = alike
    pack(a, tmp_path / "cache")
    refused(b, tmp_path / "cache", rf"is of another checkpoint: .*models: expected '{a.name}', found '{b.name}'")
    with pytest.raises(OutputError, match=rf"found one of another: .*expected '{a.name}', found '{b.name}'; remove"):
        pack(b, tmp_path / "cache")
    with MoELayer.from_checkpoint(a, 1) as packed, MoELayer.from_checkpoint(a, 1, cache=tmp_path / "cache") as mapped:
        assert same_bits(outputs(packed), outputs(mapped))


def test_files_that_swapped_their_names(alike, tmp_path):
    a, b = alike
    pack(a, tmp_path / "cache")
    swap(a, b)
    refused(a, tmp_path / "cache", rf"is of another checkpoint: .*{a.name}: SHA-256 of the header and of samples")
    refused(b, tmp_path / "cache", f"expected '{a.name}', found '{b.name}'")


@pytest.mark.usefixtures("alike")
def test_folders_that_swapped_their_names(tmp_path):
    pack(tmp_path / "a", tmp_path / "cache")
    swap(tmp_path / "a", tmp_path / "b")
    refused(tmp_path / "a", tmp_path / "cache", r"is of another checkpoint: .*model\.\w*: SHA-256 of the header and of samples")


def test_a_file_was_replaced_while_it_was_packed(alike, tmp_path, monkeypatch):
    """After the checkpoint was opened, before its files were looked at: the cache has what it says that it has."""
    a, b = alike
    files_of = source.files_of

    def replaced(checkpoint):
        if b.exists():
            b.replace(a)
        return files_of(checkpoint)

    monkeypatch.setattr(source, "files_of", replaced)
    pack(a, tmp_path / "cache")
    with MoELayer.from_checkpoint(a, 1) as packed, MoELayer.from_checkpoint(a, 1, cache=tmp_path / "cache") as mapped:
        assert same_bits(outputs(packed), outputs(mapped))


def test_a_file_alone_and_its_folder_are_one_checkpoint(model):
    path, cache = model
    with MoELayer.from_checkpoint(path / "model.safetensors", 0, cache=cache) as mapped:
        assert mapped.mapped


def test_files_beside_a_checkpoint_may_come_and_go(model):
    """Of an index, those that it names count; a file without one, alone."""
    path, cache = model
    shutil.copy2(path / "model.safetensors", path / "other.safetensors")
    Cache(cache, Checkpoint(path / "model.safetensors"))
    with Checkpoint(path / "model.safetensors") as checkpoint:
        index = {"weight_map": dict.fromkeys(checkpoint.names(), "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.rmtree(cache)
    pack(path, cache)
    Cache(cache, Checkpoint(path))
    (path / "other.safetensors").unlink()
    Cache(cache, Checkpoint(path))


def test_every_part_of_a_split_model(tmp_path):
    """A first part may have metadata alone."""
    experts = layer(0, dict.fromkeys(("gate", "up", "down"), F32))
    experts = {name: (*rest, bytes(len(data))) for name, (*rest, data) in experts.items()}
    for number, tensors in enumerate([{}, experts]):
        keys = metadata(expert_count=2, expert_used_count=1, block_count=1) if not number else {}
        keys = keys | {"split.no": u32(number), "split.count": u32(2), "split.tensors.count": u32(3)}
        write(tmp_path / f"m-{number + 1:05}-of-00002.gguf", keys, tensors)
    pack(tmp_path / "m-00002-of-00002.gguf", tmp_path / "cache")
    for path in (tmp_path, *tmp_path.glob("*.gguf")):
        Cache(tmp_path / "cache", Checkpoint(path))
    with open(tmp_path / "m-00001-of-00002.gguf", "ab") as file:
        file.write(b"\0")
    with pytest.raises(CacheError, match=r"m-00001-of-00002.gguf: bytes"):
        Cache(tmp_path / "cache", Checkpoint(tmp_path))


def test_files_of_two_layers_were_exchanged(model):
    path, cache = model
    swap(cache / "layer-0.safetensors", cache / "layer-1.safetensors")
    refused(
        path, cache, r"layer-0.safetensors: is packed from something else: layer: expected '0', found '1'; `ktmoe pack` writ"
    )
    packs_again(path, cache, [0, 1])


def test_a_file_of_another_cache(model, tmp_path):
    """Of the same shape."""
    path, cache = model
    synthetic.write_deepseek_v4(tmp_path / "other", layers=2, seed=1, **SIZES)
    pack(tmp_path / "other", tmp_path / "of other")
    shutil.copy2(tmp_path / "of other" / "layer-0.safetensors", cache)
    refused(path, cache, "layer-0.safetensors: is packed from something else: packed_from: expected")
    packs_again(path, cache, [0])


def packs_again(path, cache, written):
    """pack() replaces those files, and no other ones."""
    assert pack(path, cache, verify=True).written == written
    with MoELayer.from_checkpoint(path, 0) as packed, MoELayer.from_checkpoint(path, 0, cache=cache) as mapped:
        assert same_bits(outputs(packed), outputs(mapped))


# What is known of a file


def test_a_file_that_says_what_tensors_mean_was_added(model):
    (model[0] / "quantize_config.json").write_text("{}")
    refused(*model, "is of another checkpoint: .*: expected no other file, found 'quantize_config.json'")


def test_the_checkpoint_was_changed(model):
    """In its time alone, in a weight, in its header, in its size; while it is open, since it cannot be opened afterwards."""
    path, cache = model
    file = path / "model.safetensors"
    was = file.stat()

    def change(place=None, more=b""):
        with open(file, "r+b") as opened:
            if place is not None:
                opened.seek(place)
                letter = opened.read(1)
                opened.seek(place)
                opened.write(bytes([letter[0] ^ 1]))
            opened.seek(0, os.SEEK_END)
            opened.write(more)
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))

    def check(match):
        with pytest.raises(CacheError, match=f"is of another checkpoint: .*{match}"):
            Cache(cache, checkpoint)

    with Checkpoint(path) as checkpoint:
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns + 1))
        check(r"model.safetensors: last change \(ns\): expected \d+, found \d+")
        for place in (was.st_size - 1, was.st_size - 4096, 30):
            change(place)
            check(r"model.safetensors: SHA-256 of the header and of samples")
            change(place)
            Cache(cache, checkpoint)
        change(more=b"\0")
        check("model.safetensors: bytes: expected")
        file.unlink()
        check("model: expected 'model.safetensors', found none of that name")
        os.mkfifo(file)
        check("model.safetensors: expected a regular file")


def test_another_config(model):
    config = json.loads((model[0] / "config.json").read_text())
    (model[0] / "config.json").write_text(json.dumps(config | {"swiglu_limit": 3.0}))
    refused(*model, "config.json: bytes")


def test_a_copy_with_its_times_is_the_same_checkpoint(made, model):
    with MoELayer.from_checkpoint(made[0], 0) as packed, MoELayer.from_checkpoint(model[0], 0, cache=made[1]) as mapped:
        assert same_bits(outputs(packed), outputs(mapped))


@pytest.mark.parametrize(("nbytes", "digested"), [(1 << 26, 1 << 62), (1 << 40, 4096)], ids=["header", "samples"])
def test_a_digest_takes_little(tmp_path, nbytes, digested):
    """However much of a file a manifest asks for, and however large the file is."""
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, nbytes)
    checkpoint = SimpleNamespace(files=[large], folder=tmp_path)
    known = source.SourceFile("large", nbytes, large.stat().st_mtime_ns, digested, "")
    tracemalloc.start()
    with pytest.raises(CacheError, match="SHA-256 of the header and of samples"):
        source.check(checkpoint, [known], "cache")
    assert tracemalloc.get_traced_memory()[1] < 1 << 23
    tracemalloc.stop()
