"""The header parser against hostile files, and against safetensors' own parser."""

import gc
import itertools
import json
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from helpers import in_child
from safetensors import SafetensorError, safe_open

from ktmoe.errors import CheckpointError
from ktmoe.loaders import safetensors_file
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.safetensors_file import (
    DTYPE_BITS,
    JSON_LIMIT_BYTES,
    JSON_LIMIT_DEPTH,
    JSON_LIMIT_UNICODE,
    JSON_LIMIT_VALUES,
    SafetensorsFile,
    read_json_object,
)

U8 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def write(path, header, data=b"1234", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def reference_names(path):
    """What safetensors' own parser sees, or None if it refuses the file."""
    try:
        with safe_open(path, "np") as file:
            return set(file.keys())
    except SafetensorError:
        return None


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype(tmp_path, dtype):
    nbytes = 3 * 8 * DTYPE_BITS[dtype] // 8
    header = {
        "first": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]},
        "x": {"dtype": dtype, "shape": [3, 8], "data_offsets": [5, 5 + nbytes]},
    }
    path = write(tmp_path / "f", header, bytes(range(5 + nbytes)))
    assert reference_names(path) == {"first", "x"}
    file = SafetensorsFile(path)
    info = file.tensors["x"]
    assert (info.name, info.dtype, info.shape, info.nbytes, info.file) == ("x", dtype, (3, 8), nbytes, path)
    out = np.empty(nbytes, np.uint8)
    file.read_into(out, info)
    assert out.tobytes() == bytes(range(5, 5 + nbytes))
    file.read_into(out[1:3], info, start=nbytes - 2)
    assert out[:3].tolist() == [5, 5 + nbytes - 2, 5 + nbytes - 1]


@pytest.mark.parametrize(
    ("header", "data", "shapes"),
    [
        ({}, b"", {}),
        ({"__metadata__": {"format": "pt"}, "a": U8}, b"1234", {"a": (4,)}),
        ({"__metadata__": None, "a": U8}, b"1234", {"a": (4,)}),
        ({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, b"1234", {"a": ()}),
        ({"a": U8, "z": {"dtype": "F32", "shape": [3, 0], "data_offsets": [4, 4]}}, b"1234", {"a": (4,), "z": (3, 0)}),
        ({"z": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": U8}, b"1234", {"a": (4,), "z": (0,)}),
        (json.dumps({"a": U8}).encode() + b"    ", b"1234", {"a": (4,)}),
        ({"b": {**U8, "data_offsets": [4, 8]}, "a": U8}, b"12345678", {"a": (4,), "b": (4,)}),
        ({"a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, b"123", {"a": (2, 3)}),
        ({"Größe": U8}, b"1234", {"Größe": (4,)}),
    ],
    ids=["empty", "metadata", "null metadata", "scalar", "zero last", "zero first", "padded", "unordered", "F4", "unicode"],
)
def test_good(tmp_path, header, data, shapes):
    path = write(tmp_path / "f", header, data)
    assert reference_names(path) == set(shapes)
    assert {name: info.shape for name, info in SafetensorsFile(path).tensors.items()} == shapes


def entry(**changes):
    return {"a": {**U8, **changes}}


# label: (header, data, header length or None for the true one, what the message must hold)
HOSTILE = {
    "not JSON": (b"{", b"", None, ["malformed JSON", "JSON object"]),
    "not UTF-8": (b'{"\xff": 1}', b"", None, ["malformed JSON", "utf-8"]),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), b"", None, ["malformed JSON"]),
    "nested too deep": (b'{"a":' + b"[" * 200_000, b"", None, ["malformed JSON"]),
    "number too long": (b'{"a":' + b"9" * 10_000 + b"}", b"", None, ["malformed JSON"]),
    "a list": ([1], b"", None, ["expected a JSON object", "[1]"]),
    "nul after it": (json.dumps(entry()).encode() + b"\0", b"1234", None, ["malformed JSON"]),
    "duplicate tensor": (b'{"a": 1, "b": 2, "a": 3}', b"", None, ["every JSON key once", "'a' twice"]),
    "duplicate field": (b'{"a": {"dtype": "U8", "dtype": "I8"}}', b"", None, ["every JSON key once", "'dtype' twice"]),
    "metadata a list": ({"__metadata__": [1]}, b"", None, ["__metadata__", "object of strings", "[1]"]),
    "metadata of ints": ({"__metadata__": {"a": 1}}, b"", None, ["__metadata__", "object of strings", "{'a': 1}"]),
    "length beyond the file": ({"a": U8}, b"", 10**6, ["header length", "expected at most", "found 1000000"]),
    "length 2**64 - 1": ({"a": U8}, b"", 2**64 - 1, ["header length", f"found {2**64 - 1}"]),
    "length 0": (b"", b"", None, ["malformed JSON"]),
    "entry a string": ({"a": "U8"}, b"", None, ["tensor 'a'", "entry", "an object", "'U8'"]),
    "entry null": ({"a": None}, b"", None, ["tensor 'a'", "entry", "an object", "None"]),
    "no dtype": ({"a": {"shape": [4], "data_offsets": [0, 4]}}, b"1234", None, ["'a'", "dtype", "one of F4", "None"]),
    "unknown dtype": (entry(dtype="F3"), b"1234", None, ["tensor 'a'", "dtype", "F8_E8M0", "'F3'"]),
    "dtype a list": (entry(dtype=["U8"]), b"1234", None, ["tensor 'a'", "dtype", "['U8']"]),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, b"1234", None, ["'a'", "shape", "list of counts", "None"]),
    "shape an int": (entry(shape=4), b"1234", None, ["tensor 'a'", "shape", "list of counts", "found 4"]),
    "shape negative": (entry(shape=[-2, -2]), b"1234", None, ["tensor 'a'", "shape", "list of counts", "[-2, -2]"]),
    "shape a float": (entry(shape=[4.0]), b"1234", None, ["tensor 'a'", "shape", "list of counts", "[4.0]"]),
    "shape a bool": (entry(shape=[True, 4]), b"1234", None, ["tensor 'a'", "shape", "list of counts", "[True, 4]"]),
    "shape a string": (entry(shape=["4"]), b"1234", None, ["tensor 'a'", "shape", "list of counts", "['4']"]),
    "extent beyond 64 bits": (entry(shape=[2**64]), b"1234", None, ["tensor 'a'", "shape", "counts", str(2**64)]),
    "shape overflows": (entry(shape=[2**32, 2**32]), b"1234", None, ["tensor 'a'", "shape", "2**64", str(2**32)]),
    "wraps to 4 bytes": (entry(shape=[2**62 + 1, 4]), b"1234", None, ["tensor 'a'", "shape", "2**64", str(2**62 + 1)]),
    "overflow, then zero": (entry(shape=[2**40, 2**40, 0], data_offsets=[0, 0]), b"", None, ["'a'", "shape", "2**64"]),
    "half a byte": (entry(dtype="F4", shape=[7]), b"1234", None, ["tensor 'a'", "shape", "whole bytes of F4", "[7]"]),
    "no offsets": ({"a": {"dtype": "U8", "shape": [4]}}, b"1234", None, ["'a'", "data_offsets", "two counts", "None"]),
    "one offset": (entry(data_offsets=[0]), b"1234", None, ["tensor 'a'", "data_offsets", "two counts", "[0]"]),
    "three offsets": (entry(data_offsets=[0, 4, 4]), b"1234", None, ["'a'", "data_offsets", "two counts", "[0, 4, 4]"]),
    "offset negative": (entry(data_offsets=[-4, 0]), b"1234", None, ["'a'", "data_offsets", "two counts", "[-4, 0]"]),
    "offset a float": (entry(data_offsets=[0, 4.0]), b"1234", None, ["'a'", "data_offsets", "two counts", "4.0"]),
    "offsets reversed": (entry(data_offsets=[4, 0]), b"1234", None, ["'a'", "data_offsets", "4 bytes", "[4, 0]"]),
    "offset beyond 64 bits": (entry(data_offsets=[2**64, 2**64 + 4]), b"1234", None, ["data_offsets", "two counts"]),
    "size of other dtype": (entry(dtype="BF16"), b"1234", None, ["'a'", "data_offsets", "8 bytes for BF16", "[0, 4]"]),
    "F4 counted in bytes": (entry(dtype="F4"), b"1234", None, ["'a'", "data_offsets", "2 bytes for F4", "[0, 4]"]),
    "overlap": ({"a": U8, "b": {**U8, "data_offsets": [2, 6]}}, b"123456", None, ["overlap", "'b'", "expected at", "4", "2"]),
    "the same bytes": ({"a": U8, "b": U8}, b"1234", None, ["overlap", "tensor 'b'", "expected at data offset 4, found 0"]),
    "hole": ({"a": U8, "b": {**U8, "data_offsets": [6, 10]}}, b"1" * 10, None, ["hole", "'b'", "offset 4, found 6"]),
    "hole in front": (entry(data_offsets=[1, 5]), b"12345", None, ["hole", "tensor 'a'", "offset 0, found 1"]),
    "zero-size inside another": (
        {"a": U8, "z": {"dtype": "U8", "shape": [0], "data_offsets": [2, 2]}},
        b"1234",
        None,
        ["overlap", "tensor 'z'", "offset 4, found 2"],
    ),
    "truncated": (entry(), b"123", None, ["truncated", "expected", "found"]),
    "no data": (entry(), b"", None, ["truncated", "expected", "found"]),
    "trailing data": (entry(), b"12345", None, ["trailing data", "expected", "found"]),
    "data without tensors": ({}, b"1", None, ["trailing data", "expected 10 bytes", "found 11"]),
    "extent far beyond the file": (entry(shape=[2**50], data_offsets=[0, 2**50]), b"1234", None, ["truncated", "found"]),
}


@pytest.mark.parametrize("label", HOSTILE)
def test_hostile_header(tmp_path, label):
    header, data, length, words = HOSTILE[label]
    path = write(tmp_path / "hostile.safetensors", header, data, length)
    gc.collect()  # earlier tests' garbage
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert os.listdir("/proc/self/fd") == before
    for word in [str(path), *words]:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 1500
    if "duplicate" not in label:  # the one thing that the reference parser lets pass
        assert reference_names(path) is None


@pytest.mark.parametrize("size", [0, 1, 7])
def test_shorter_than_its_length_field(tmp_path, size):
    (tmp_path / "f").write_bytes(b"\x10\0\0\0\0\0\0\0"[:size])
    with pytest.raises(CheckpointError, match=rf"truncated: expected at least 8 bytes, found {size}"):
        SafetensorsFile(tmp_path / "f")


def test_header_limit(tmp_path, monkeypatch):
    path = write(tmp_path / "f", {"a": U8})
    length = len(json.dumps({"a": U8}))
    monkeypatch.setattr(safetensors_file, "JSON_LIMIT_BYTES", length)
    assert "a" in SafetensorsFile(path).tensors
    monkeypatch.setattr(safetensors_file, "JSON_LIMIT_BYTES", length - 1)
    with pytest.raises(CheckpointError, match=rf"header length: expected at most {length - 1} .* found {length}"):
        SafetensorsFile(path)


def test_values_are_limited(tmp_path, monkeypatch):
    """Of a header, an index or a config: what they cost is counted before they are parsed."""
    header = {"a": U8, "b": {**U8, "data_offsets": [4, 8]}}  # 3 brackets and 3 commas each, 1 of either around
    path, text = write(tmp_path / "f", header, b"12345678"), tmp_path / "config.json"
    text.write_text(json.dumps(header))
    monkeypatch.setattr(safetensors_file, "JSON_LIMIT_VALUES", 14)
    assert set(SafetensorsFile(path).tensors) == set(read_json_object(text)) == {"a", "b"}
    monkeypatch.setattr(safetensors_file, "JSON_LIMIT_VALUES", 13)
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("was parsed"))
    for read in (lambda: SafetensorsFile(path), lambda: read_json_object(text)):
        with pytest.raises(CheckpointError, match="expected at most 13 JSON values, found about 14"):
            read()


@pytest.mark.parametrize("text", [b'{"a": [' + b"1," * 10**5, b'{"a": "' + b"x" * 10**6 + b"\xff"], ids=["JSON", "UTF-8"])
def test_an_error_does_not_keep_the_text(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match="malformed JSON") as caught:
        read_json_object(tmp_path / "config.json")
    assert caught.value.__cause__ is caught.value.__context__ is None  # which have it


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_levels_are_limited(tmp_path, begin, end):
    """Or what copies, writes or shows a value fails, as copy.deepcopy() did at a depth of 300."""
    path = tmp_path / "config.json"
    inner = JSON_LIMIT_DEPTH - 1
    path.write_text('{"a": ' + begin * inner + "1" + end * inner + "}")
    assert read_json_object(path)
    path.write_text('{"a": ' + begin * (inner + 1) + "1" + end * (inner + 1) + "}")
    with pytest.raises(CheckpointError, match=rf"config.json: expected JSON of at most {JSON_LIMIT_DEPTH} levels, found more"):
        read_json_object(path)


def test_bytes_are_limited(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"a": 1}')
    monkeypatch.setattr(safetensors_file, "JSON_LIMIT_BYTES", 8)
    assert read_json_object(tmp_path / "config.json") == {"a": 1}
    monkeypatch.setattr(safetensors_file, "JSON_LIMIT_BYTES", 7)
    with pytest.raises(CheckpointError, match="expected at most 7 bytes of JSON, found 8"):
        read_json_object(tmp_path / "config.json")


def test_text_that_is_not_ascii_is_limited(tmp_path, monkeypatch):
    """It takes up to four times its bytes; what is escaped is ASCII."""
    path = tmp_path / "config.json"
    monkeypatch.setattr(safetensors_file, "JSON_LIMIT_UNICODE", 13)
    for text in ('{"a": "xxxxxxxxxxxx"}', r'{"a": "\u00e9\u00e9"}', '{"a": "\u00e9\u00e9"}'):
        path.write_text(text, "utf-8")
        assert read_json_object(path) == json.loads(text)
    path.write_text('{"a": "\u00e9\u00e9x"}', "utf-8")
    with pytest.raises(CheckpointError, match=r"config.json: expected at most 13 bytes of JSON that is not ASCII, found 14"):
        read_json_object(path)


COUNT = JSON_LIMIT_VALUES - 20_000
FACE = "\N{GRINNING FACE}"  # makes each character of a string take 4 bytes


def chains(key):
    """Objects of one key, 60 in each other: COUNT in all. key: number -> its text."""
    numbers = iter(range(COUNT))
    chain = [["{" + f'"{key(n)}":' for n in itertools.islice(numbers, 60)] for _ in range(-(-COUNT // 61))]
    return '"a":[' + ",".join("".join(part) + "0" + "}" * len(part) for part in chain) + "]"


# what takes much of its size when it is parsed, in an object
WORST = {
    "lists": lambda: '"a":[' + "[]," * (COUNT // 2) + "0]",
    "objects": lambda: chains(lambda n: "a"),
    "keys": lambda: ",".join(f'"{n:052}":0' for n in range(COUNT)),
    "strings": lambda: '"a":[' + ",".join(f'"{n:053}"' for n in range(COUNT)) + "]",
    "objects of keys": lambda: chains(lambda n: f"{n:049}"),
    "objects and one string": lambda: chains(lambda n: "a") + ',"b":"' + "x" * (JSON_LIMIT_BYTES - 5_000_000) + '"',
    "not ASCII": lambda: chains(lambda n: "a") + f',"b":"{FACE}' + "x" * (JSON_LIMIT_UNICODE - 5_000_000) + '"',
}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    [name if name == "lists" else pytest.param(name, marks=pytest.mark.exhaustive) for name in WORST],
)
def test_what_the_worst_file_takes(tmp_path, name):
    """Little more memory than the constants' comment says; it was 3 GB."""
    path = tmp_path / "config.json"
    path.write_text("{" + WORST[name]() + "}", "utf-8")
    assert path.stat().st_size <= JSON_LIMIT_BYTES

    def child():
        def peak():
            (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
            return int(line.split()[1]) * 1024

        Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
        before = peak()
        assert len(read_json_object(path)) > 0
        return peak() - before

    used = in_child(child)
    print(f"{name}: {path.stat().st_size / 1e6:.1f} MB of JSON took {used / 1e6:.0f} MB")
    assert 10_000_000 < used < 320_000_000  # a child may have some of it already


def test_the_longest_index_there_is(tmp_path):
    """Kimi-K2.5's, 23.5 MB, by its names; and the header of a file with 85,000 of its tensors."""
    parts, stems = ("packed", "scale", "shape"), ("gate", "up", "down")
    names = [
        f"language_model.model.layers.{layer}.mlp.experts.{expert}.{stem}_proj.weight_{part}"
        for layer in range(1, 61) for expert in range(384) for stem in stems for part in parts
    ]  # fmt: skip
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00062-of-000062.safetensors")}, indent=4))
    assert index.stat().st_size > 23_500_000
    assert len(Checkpoint(tmp_path)) == len(names) == 207_360
    index.unlink()
    header = {name: {"dtype": "I32", "shape": [7168, 0], "data_offsets": [0, 0]} for name in names[:85_000]}
    assert len(SafetensorsFile(write(tmp_path / "f", header, b"")).tensors) == 85_000


def test_long_values_are_cut_in_messages(tmp_path):
    path = write(tmp_path / "f", {"a" * 100_000: {"dtype": "x" * 100_000}}, b"")
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert len(str(caught.value)) < 1500


def test_what_we_accept_the_reference_accepts(tmp_path):
    """Random damage: this parser may be stricter than safetensors' own, never laxer, and must see the same tensors."""
    rng = random.Random(7)
    path = tmp_path / "f"
    sound = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "I8", "shape": [2, 4], "data_offsets": [0, 8]},
        "b": {"dtype": "F8_E8M0", "shape": [2, 1], "data_offsets": [8, 10]},
        "c": {"dtype": "BF16", "shape": [3], "data_offsets": [10, 16]},
    }
    accepted = 0
    for _ in range(3000):
        text = bytearray(json.dumps(sound).encode())
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(len(text))
            text[at : at + rng.choice((0, 1, 1, 2))] = rng.choice(
                (b"", b"0", b"1", b"2", b"4", b"8", b" ", b",", b'"', b"[", b"-")
            )
        write(path, bytes(text), bytes(rng.choice((16, 16, 16, 15, 17, 8))))
        try:
            names = set(SafetensorsFile(path).tensors)
        except CheckpointError:
            continue
        accepted += 1
        assert names == reference_names(path), bytes(text)
    assert accepted > 50
