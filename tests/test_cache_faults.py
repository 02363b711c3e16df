"""Packed caches that are damaged are refused by name; so are mapped files that change."""

import json
import os
import shutil

import numpy as np
import pytest
from cached import edit, outputs, refused
from helpers import same_bits

from ktmoe import MoELayer
from ktmoe._native import core
from ktmoe.cache import manifest
from ktmoe.errors import CacheError

MANIFEST = manifest.NAME


# The cache's own files


@pytest.mark.parametrize(
    ("by", "match"), [(-1, "truncated: expected .* bytes"), (1, "grown: expected"), (-(1 << 21), "truncated")]
)
def test_a_file_of_another_size(model, by, match):
    file = model[1] / "layer-0.safetensors"
    os.truncate(file, file.stat().st_size + by)
    refused(*model, f"layer-0.safetensors: {match}")


@pytest.mark.parametrize("name", ["layer-0.safetensors", MANIFEST])
def test_a_file_is_missing(model, name):
    (model[1] / name).unlink()
    refused(*model, name)


def test_a_fifo_does_not_hang(model):
    file = model[1] / "layer-0.safetensors"
    file.unlink()
    os.mkfifo(file)
    refused(*model, "layer-0.safetensors: truncated: expected .*, found 0")


def test_a_descriptor_that_cannot_be_had():
    with pytest.raises(CacheError, match=r"^file: expected a file that can be mapped: Bad file descriptor"):
        core.ArenaFile("file", -1, [0])


@pytest.mark.parametrize("at", [0, 8, 40, 90])
def test_a_damaged_header(model, at):
    with open(model[1] / "layer-0.safetensors", "r+b") as file:
        file.seek(at)
        file.write(b"\xff\xff\xff\xff\xff\xff\xff\xff")
    refused(*model, "layer-0.safetensors")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda tensors: tensors.__setitem__("more", tensors.pop("seen")), "tensor 'seen': expected .*, found 'none'"),
        (lambda tensors: tensors["seen"].__setitem__("shape", [45]), "tensor 'seen'"),
        (lambda tensors: tensors["seen"].__setitem__("dtype", "I8"), "tensor 'seen'"),
        (
            lambda tensors: [
                tensors["padding"]["shape"].__setitem__(0, 1),
                tensors["padding"]["data_offsets"].__setitem__(1, 1),
            ],
            "hole",
        ),
    ],
    ids=["name", "shape", "dtype", "hole"],
)
def test_another_header(model, change, match):
    """Of the same length, in a file of the same size."""
    with open(model[1] / "layer-0.safetensors", "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        change(header)
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":")).encode().ljust(length))
    refused(*model, match)


def _layer(key, value):
    return lambda data: data["layers"]["0"].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda data: data.__setitem__("version", manifest.VERSION + 1),
            r"version: expected 3, found 4; `ktmoe pack` makes one",
        ),
        (lambda data: data.__setitem__("kind", "recipe"), "kind: expected 'ktmoe packed cache', found 'recipe'"),
        (
            lambda data: data["layers"]["0"]["layout"].__setitem__("q4", 2),
            "layer 0: layout: expected .*'q4': 1.*, found .*'q4': 2",
        ),
        (lambda data: data["layers"]["0"]["layout"].__setitem__("arena", 0), "layer 0: layout: expected .*'arena': 1"),
        (_layer("file", "../layer-0.safetensors"), "layer '0': file: found '../layer-0.safetensors'"),
        (_layer("file", "layer-1.safetensors"), "layer 0: file: expected layer-0.safetensors"),
        (_layer("nbytes", -1), "layer '0': nbytes: found -1"),
        (_layer("nbytes", True), "layer '0': nbytes: found True"),
        (_layer("shards", [[0, 2**70]]), "layer '0': shards: found"),
        (_layer("shards", [[0, 1]]), "layer 0: shards: expected"),
        (_layer("shards", []), "layer 0: expected arenas for 1 NUMA node, found them for 0"),
        (_layer("formats", {"gate": 1}), "layer '0': formats: found"),
        (_layer("formats", {}), "layer 0: formats: expected"),
        (_layer("more", 1), "layer '0': expected an object of file, nbytes"),
        (lambda data: data.__setitem__("layers", [1]), "expected a list of source files and objects of layers and of matrices"),
        (lambda data: data.__setitem__("all_layers", [0]), "all_layers: expected a list of names, found"),
        (_layer("kind", 1), "layer '0': kind: found 1"),
        (_layer("kind", "other"), "layer-0.safetensors: is packed from something else: packed_from"),
        (lambda data: data["all_layers"].pop(), "layer-0.safetensors: is packed from something else: packed_from"),
        (lambda data: data.__setitem__("source", [1]), "source: expected an object of name, nbytes"),
        (lambda data: data["source"][0].__setitem__("name", "/etc/passwd"), "source: name: found '/etc/passwd'"),
        (lambda data: data["source"][0].__setitem__("digested", 10**30), "source: digested: found"),
        (
            lambda data: data["source"][0].__setitem__("name", "\ud800"),
            r"is of another checkpoint: .*expected '\\ud800', found 'mo",
        ),
        (lambda data: data["source"].append(data["source"][0]), "source: expected every file once"),
        (lambda data: data["layers"].__delitem__("0"), "layer 0: expected to be packed, found layers 1"),
    ],
)
def test_another_manifest(model, change, match):
    edit(model[1], change)
    refused(*model, match)


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "ktmoe packed cache"', "\x00", '{"a": 1, "a": 2}'])
def test_a_manifest_that_is_none(model, text):
    (model[1] / MANIFEST).write_text(text)
    refused(*model, "ktmoe-cache.json")


# While a cache is opened and used


def test_a_file_that_changes_before_it_is_mapped(model, monkeypatch):
    """What was read of it belongs to other arenas."""
    real = core.ArenaFile

    def late(path, descriptor, offsets):
        os.utime(path, ns=(0, 1))
        return real(path, descriptor, offsets)

    monkeypatch.setattr(core, "ArenaFile", late)
    with pytest.raises(CacheError, match=r"layer-0.safetensors: changed while it was read: time of change: expected"):
        MoELayer.from_checkpoint(model[0], 0, cache=model[1])


def calls(layer, other):
    return lambda: outputs(layer), lambda: layer.export_expert(1), lambda: layer.replace_expert(1, other)


@pytest.mark.parametrize(
    "change",
    [
        lambda file: os.truncate(file, 4096),
        lambda file: os.truncate(file, file.stat().st_size + 1),
        lambda file: os.utime(file, ns=(0, 1)),
        lambda file: file.write_bytes(file.read_bytes()),
    ],
    ids=["shrunk", "grown", "touched", "written again"],
)
def test_a_mapped_file_was_changed(model, change):
    path, cache = model
    with MoELayer.from_checkpoint(path, 0, cache=cache) as layer, MoELayer.from_checkpoint(path, 1) as source:
        other = source.export_expert(0)[0]
        layer.replace_expert(1, other)
        assert np.isfinite(outputs(layer)).all()
        change(cache / "layer-0.safetensors")
        for call in calls(layer, other):
            with pytest.raises(CacheError, match=r"layer-0.safetensors: expected the file as it was when it was mapped"):
                call()


def test_a_mapped_file_was_removed_or_replaced(model):
    """The mapping keeps the one that was opened."""
    path, cache = model
    with MoELayer.from_checkpoint(path, 0, cache=cache) as layer:
        before = outputs(layer)
        os.replace(cache / "layer-1.safetensors", cache / "layer-0.safetensors")
        assert same_bits(outputs(layer), before)
        shutil.rmtree(cache)
        assert same_bits(outputs(layer), before)
