"""Checkpoints of two small files, of tensors that no loader knows."""

import gc
import json
import os
import struct

import pytest

from ktmoe.loaders.checkpoint import INDEX_NAME


def write_file(path, tensors):
    """tensors: name -> (dtype, shape, bytes)."""
    header, start = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + len(data)]}
        start += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    return path


def write_index(folder, weight_map):
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


def drop(path):
    """Leave nothing of a file in the page cache, where the system knows how."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def descriptors():
    gc.collect()  # earlier tests' garbage
    return set(os.listdir("/proc/self/fd"))


CODES = bytes(range(1, 33))
SCALES = b"\x7e\x7f\x80\xff"


@pytest.fixture
def two_shards(tmp_path):
    """A checkpoint of two files and an index."""
    write_file(tmp_path / "model-1.safetensors", {"a": ("I8", [2, 16], CODES), "b": ("F4", [2, 32], CODES[::-1])})
    write_file(tmp_path / "model-2.safetensors", {"c": ("F8_E8M0", [2, 2], SCALES), "empty": ("BF16", [0], b"")})
    write_index(tmp_path, dict.fromkeys("ab", "model-1.safetensors") | dict.fromkeys(("c", "empty"), "model-2.safetensors"))
    (tmp_path / "config.json").write_text('{"model_type": "x", "nested": {"y": 1}}')
    return tmp_path


@pytest.fixture(params=["index", "no index"])
def two_files(request, two_shards):
    """The same with the index, and without."""
    if request.param == "no index":
        (two_shards / INDEX_NAME).unlink()
    return two_shards
