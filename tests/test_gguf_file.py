"""The GGUF reader: what it makes of sound files, and of hostile ones."""

import gc
import itertools
import os
import random
import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from gguf_files import BF16, F32, Q4_0, Q4_K, array, f32, header, layer, metadata, records, string, tensor, text, u32, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktmoe.errors import CheckpointError, KtmoeError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders import gguf_header
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.gguf_file import GgufFile
from ktmoe.weights.ggml import TYPES

KEY = text("k")


@pytest.mark.parametrize("number", TYPES)
def test_every_type(tmp_path, number):
    """Its bytes follow from its records; numpy's shape is the reverse of ggml's."""
    of = TYPES[number]
    shape = (3, 2, 5 * of.weights)
    stored = np.random.default_rng(number).bytes(30 * of.nbytes)
    entries = [tensor("first", F32, (3,), 0), tensor("x", number, shape, 32)]
    head = header([], entries)
    path = tmp_path / "m.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(32) + stored)
    file = GgufFile(path)
    info = file.tensors["x"]
    assert (info.name, info.dtype, info.shape, info.nbytes, info.file) == ("x", of.name, shape, len(stored), path)
    out = np.empty(len(stored), np.uint8)
    file.read_into(out, info)
    assert out.tobytes() == stored


def test_a_sound_file(tmp_path):
    """Values of every type; what is long is passed over, and what comes behind it is found."""
    numbers = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    keys = {f"n{kind}": struct.pack(f"<I{form}", kind, 3) for kind, form in numbers.items()}
    keys |= {"no": struct.pack("<IB", 7, 0), "yes": struct.pack("<IB", 7, 1), "s": string("größe"), "bad": string(b"\xff")}
    keys |= {"list": array(4, [struct.pack("<I", n) for n in (1, 2**32 - 1)]), "bools": array(7, [b"\0", b"\1"])}
    keys |= {"tokens": array(8, [text(b"\xff" * n) for n in range(1000)]), "template": string("x" * 5000)}
    keys |= {"long": array(0, [bytes(5000)], 5000), "empty": array(8, [])}
    keys["nested"] = array(9, [struct.pack("<IQ", 8, 1) + text("in"), struct.pack("<IQ", 4, 0)])
    path = write(
        tmp_path / "m.gguf", keys, {"a": (F32, (3,), b"123456789abc"), "e": (F32, (0, 4), b""), "b": (BF16, (), b"xy")}
    )
    file = GgufFile(path)
    kept = {f"n{kind}": 3 for kind in numbers}
    kept |= {"no": False, "yes": True, "s": "größe", "bad": "\ufffd", "list": [1, 2**32 - 1], "bools": [False, True]}
    assert file.metadata == kept
    assert {key: type(value) for key, value in file.metadata.items()} | {"n6": float, "n12": float} == {
        key: type(value) for key, value in file.metadata.items()
    }
    assert {name: (info.dtype, info.shape, info.nbytes) for name, info in file.tensors.items()} == {
        "a": ("F32", (3,), 12),
        "e": ("F32", (0, 4), 0),
        "b": ("BF16", (), 2),
    }
    with Checkpoint(path) as checkpoint:
        assert (checkpoint.read("a").tobytes(), checkpoint.read("b").tobytes()) == (b"123456789abc", b"xy")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_versions_and_alignments(tmp_path, version, alignment):
    data = records(1, Q4_0, (2, 32))
    tensors = {"a": (F32, (1,), b"1234"), "x": (Q4_0, (2, 32), data)}
    path = write(tmp_path / "m.gguf", {"general.alignment": u32(alignment)}, tensors, alignment, version)
    with Checkpoint(path) as checkpoint:
        assert checkpoint.read("x").tobytes() == data


def test_the_end_of_a_file(tmp_path):
    """The padding behind the last tensor may be there, or be cut off; nothing may follow it."""
    stored = plain(tensor("b", F32, (9,), 0), tensor("a", F32, (1,), 64), data=bytes(range(96)))
    for cut in (0, 1, 28):
        (tmp_path / "m.gguf").write_bytes(stored[: len(stored) - cut])
        with Checkpoint(tmp_path) as checkpoint:
            assert list(checkpoint.names()) == ["b", "a"]
            assert checkpoint.read("a").tolist() == [64, 65, 66, 67]
    for wrong in (stored[:-29], stored + b"\0"):
        (tmp_path / "m.gguf").write_bytes(wrong)
        with pytest.raises(CheckpointError, match=f"tensor 'a'.* found a file of {len(wrong)}"):
            Checkpoint(tmp_path)


def test_another_type_of_one_tensor_shows(tmp_path):
    """There would be a hole or an overlap, also behind the last one; types of as many bytes are left."""
    shape = (2, 2, 256)
    path = write(tmp_path / "m.gguf", {}, dict.fromkeys("abc", (Q4_0, shape, records(0, Q4_0, shape))))
    stored, accepted = path.read_bytes(), []
    for name in "abc":
        at = stored.index(text(name)) + len(text(name)) + 4 + 24
        for number in TYPES:
            path.write_bytes(stored[:at] + struct.pack("<I", number) + stored[at + 4 :])
            with suppress(CheckpointError):
                accepted.append(GgufFile(path).tensors[name].dtype)
    assert accepted == ["Q4_0", "Q4_K", "IQ4_NL", "NVFP4"] * 3


def test_types_that_are_not_known(tmp_path):
    """Their bytes are all up to the next tensor, or to the end; others are read as ever."""
    head = header([], [tensor("a", 139, (8,), 0), tensor("b", F32, (1,), 96), tensor("c", 2**32 - 1, (8,), 128)])
    (tmp_path / "m.gguf").write_bytes(head + bytes(-len(head) % 32) + bytes(range(150)))
    with Checkpoint(tmp_path) as checkpoint:
        found = {name: (checkpoint.info(name).dtype, checkpoint.info(name).nbytes) for name in "abc"}
        assert found == {"a": ("type 139", 96), "b": ("F32", 4), "c": ("type 4294967295", 22)}
        assert checkpoint.read("b").tolist() == [96, 97, 98, 99]


def test_no_tensors(tmp_path):
    """The first part of a split model may have none."""
    (tmp_path / "m.gguf").write_bytes(header([text("k") + u32(1)], []))
    file = GgufFile(tmp_path / "m.gguf")
    assert (file.tensors, file.metadata) == ({}, {"k": 1})


def plain(*entries, data=b"", keys=(), **counts):
    head = header(list(keys), list(entries), **counts)
    return head + bytes(-len(head) % 32) + data


def deep(levels):
    value = struct.pack("<IQ", 4, 0)
    for _ in range(levels):
        value = struct.pack("<IQ", 9, 1) + value
    return struct.pack("<I", 9) + value


HOSTILE = {
    "nothing": (b"", ["truncated", "magic", "4 bytes at 0", "a file of 0"]),
    "another magic": (b"GGML" + bytes(100), ["magic", "expected b'GGUF'", "found b'GGML'"]),
    "version 1": (plain(version=1), ["version", "expected 2 or 3", "found 1"]),
    "version 4": (plain(version=4), ["version", "expected 2 or 3", "found 4"]),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ["version", "that of a big-endian file"]),
    "tensors without end": (plain(tensors=2**64 - 1), ["tensor count", "at most", str(2**64 - 1)]),
    "keys without end": (plain(count=2**63), ["key count", "at most", str(2**63)]),
    "fewer tensors than said": (header([], [], tensors=3), ["truncated", "tensor name"]),
    "fewer keys than said": (header([], [], count=1), ["truncated", "key", "expected 8 bytes at 24"]),
    "key too long": (plain(keys=[struct.pack("<Q", 2**40)]), ["key at 32", "at most 65535 bytes", f"found {2**40}"]),
    "key past the end": (plain(keys=[struct.pack("<Q", 60000)]), ["truncated", "key", "60000 bytes"]),
    "key not UTF-8": (plain(keys=[text(b"\xff") + u32(1)]), ["key", "expected UTF-8", "xff"]),
    "key twice": (plain(keys=[KEY + u32(1), KEY + u32(2)]), ["every key once", "'k' twice"]),
    "value of no type": (plain(keys=[KEY + struct.pack("<I", 13)]), ["type of 'k'", "0 to 12", "found 13"]),
    "array of no type": (plain(keys=[KEY + array(99, [], 1)]), ["type of 'k'", "0 to 12", "found 99"]),
    "boolean of 2": (plain(keys=[KEY + struct.pack("<IB", 7, 2)]), ["value of 'k'", "boolean", "found 2"]),
    "string past the end": (plain(keys=[KEY + struct.pack("<IQ", 8, 2**63)]), ["truncated", "'k'", str(2**63)]),
    "array past the end": (plain(keys=[KEY + array(12, [], 2**62)]), ["truncated", "'k'", str(2**65)]),
    "strings without end": (plain(keys=[KEY + array(8, [], 2**40)]), ["'k'", "items in all arrays", "found more"]),
    "strings past the end": (plain(keys=[KEY + array(8, [], 1000)]), ["truncated", "'k'"]),
    "a string of 2**64": (plain(keys=[KEY + array(8, [b"\xff" * 8], 2)]), ["truncated", "'k'"]),
    "arrays without end": (plain(keys=[KEY + array(9, [], 2**20)]), ["'k'", "items in all arrays"]),
    "arrays too deep": (plain(keys=[KEY + deep(9)]), ["'k'", "arrays in arrays", "found more"]),
    "alignment of 0": (plain(keys=[text("general.alignment") + u32(0)]), ["general.alignment", "power of two", "found 0"]),
    "alignment of 48": (plain(keys=[text("general.alignment") + u32(48)]), ["general.alignment", "found 48"]),
    "alignment a string": (plain(keys=[text("general.alignment") + string("32")]), ["general.alignment", "'32'"]),
    "name too long": (plain(tensor("x" * 300, F32, (1,), 0)), ["tensor name", "at most 255 bytes", "found 300"]),
    "name not UTF-8": (plain(tensor(b"\xfe", F32, (1,), 0)), ["tensor name", "expected UTF-8"]),
    "name twice": (plain(*[tensor("x", F32, (1,), 0)] * 2, data=bytes(4)), ["every tensor once", "'x' twice"]),
    "five dimensions": (plain(tensor("x", F32, (1,) * 5, 0)), ["tensor 'x'", "at most 4 dimensions", "found 5"]),
    "dimensions without end": (plain(text("x") + struct.pack("<I", 2**32 - 1)), ["'x'", "at most 4", str(2**32 - 1)]),
    "extent of 2**63": (plain(tensor("x", F32, (2**63,), 0)), ["tensor 'x'", "less than 2**63", str(2**63)]),
    "product of 2**64": (plain(tensor("x", F32, (2**32, 2**32), 0), data=bytes(8)), ["truncated", "'x'", str(2**66)]),
    "part of a record": (plain(tensor("x", Q4_K, (2, 128), 0)), ["'x'", "whole records of 256", "Q4_K", "[2, 128]"]),
    "a scalar of records": (plain(tensor("x", Q4_0, (), 0)), ["'x'", "whole records of 32", "Q4_0", "[]"]),
    "not aligned": (plain(tensor("x", F32, (1,), 4), data=bytes(99)), ["'x'", "offset: expected 0, for the first", "found 4"]),
    "a hole": (
        plain(tensor("x", F32, (1,), 0), tensor("y", F32, (1,), 64), data=bytes(96)),
        ["tensor 'y': offset: expected 32, where tensor 'x' ends, padded to 32, found 64"],
    ),
    "another order": (
        plain(tensor("x", F32, (1,), 32), tensor("y", F32, (1,), 0), data=bytes(64)),
        ["tensor 'x': offset: expected 0, for the first tensor, found 32"],
    ),
    "behind an unknown one": (
        plain(tensor("x", 200, (1,), 0), tensor("y", F32, (1,), 40), data=bytes(96)),
        ["tensor 'y': offset: expected 64, where tensor 'x' ends, padded to 32, found 40"],
    ),
    "past the end": (plain(tensor("x", F32, (8,), 32), data=bytes(63)), ["'x'", "expected 0, for the first", "found 32"]),
    "far past the end": (plain(tensor("x", F32, (1,), 2**64 - 32)), ["'x'", "expected 0", str(2**64)[:5]]),
    "no data": (plain(tensor("x", F32, (1,), 0)), ["truncated", "'x'", "4 bytes"]),
    "unknown, past the end": (plain(tensor("x", 200, (1,), 0), tensor("y", F32, (1,), 64)), ["truncated", "'x'", "64 bytes"]),
    "unknown, in another order": (
        plain(tensor("x", F32, (1,), 0), tensor("y", 200, (1,), 32), tensor("z", F32, (1,), 0), data=bytes(96)),
        ["'z': offset: expected 32, where tensor 'y' ends", "found 0"],
    ),
    "overlap": (
        plain(tensor("x", F32, (9,), 0), tensor("y", F32, (1,), 32), data=bytes(64)),
        ["'y': offset: expected 64, where tensor 'x' ends", "found 32"],
    ),
    "the same place": (
        plain(*(tensor(n, F32, (1,), 0) for n in "xy"), data=bytes(64)),
        ["'y': offset: expected 32, where tensor 'x' ends", "found 0"],
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(tmp_path, name):
    data, words = HOSTILE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    before = set(os.listdir("/proc/self/fd"))
    for place in (path, tmp_path):
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(place)
        assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)
        assert len(str(caught.value)) < 1500
    del caught
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def sound():
    keys = metadata(expert_count=2, block_count=1) | {"tokens": array(8, [text("a"), text("bb")])}
    keys |= {"x": array(6, [bytes(4)] * 2), "n": array(9, [struct.pack("<IQ", 8, 1) + text("in")])}
    tensors = layer(0, {"gate": Q4_0, "up": Q4_0, "down": Q4_0}, hidden=32, intermediate=32)
    return keys | {"f": f32(1)}, tensors


def test_cut_off_anywhere(tmp_path):
    """A clear error at any length but the whole."""
    path = write(tmp_path / "m.gguf", *sound())
    data = path.read_bytes()
    for length in [*range(0, 500, 3), *range(500, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"truncated|expected"):
            Checkpoint(path)
    path.write_bytes(data)
    assert len(Checkpoint(path)) == 3


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage(tmp_path, data):
    """Any bytes of a header: it is read, or refused with an error of ours; then each layer loads, or is refused likewise."""
    path = write(tmp_path / "m.gguf", *sound())
    stored = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 700))
        stored[at : at + data.draw(st.sampled_from([0, 1, 1, 4, 8]))] = data.draw(
            st.sampled_from([b"", b"\0", b"\xff", b"\x7f" * 8, struct.pack("<Q", 2**63), struct.pack("<I", 8)])
            | st.binary(max_size=9)
        )
    path.write_bytes(stored)
    try:
        with Checkpoint(path) as checkpoint:
            for name in checkpoint.names():
                info = checkpoint.info(name)
                assert len(checkpoint.read(name)) == info.nbytes <= len(stored)
            loader = find_loader(checkpoint)
            for number in loader.layers(checkpoint):
                experts = loader.load(checkpoint, number)
                for projection in PROJECTIONS:
                    assert experts.matrix(experts.num_experts - 1, projection).shape == experts.shape(projection)
    except KtmoeError:
        pass


def test_what_we_accept_is_what_stands_there(tmp_path):
    """A header with one number changed: no tensor is ever read from another place than its offset says."""
    path = write(tmp_path / "m.gguf", *sound())
    stored, rng, accepted = path.read_bytes(), random.Random(3), 0
    for _ in range(300):
        damaged = bytearray(stored)
        damaged[rng.randrange(24, 420)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            file = GgufFile(path)
        except CheckpointError:
            continue
        accepted += 1
        ends = sorted((info.offset, info.offset + info.nbytes) for info in file.tensors.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert ends[-1][1] <= len(damaged)
    assert accepted > 20


def test_limits(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf", *sound())
    for limit, value, words in (
        ("HEADER_LIMIT_BYTES", 100, "expected a header of at most 100 bytes, found more"),
        ("TENSORS_LIMIT", 2, "tensor count: expected at most 2, found 3"),
        ("KEYS_LIMIT", 5, "key count: expected at most 5, found 7"),
        ("ITEMS_LIMIT", 1, "expected at most 1 items in all arrays"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(gguf_header, limit, value)
            with pytest.raises(CheckpointError, match=words):
                GgufFile(path)
    assert len(GgufFile(path).tensors) == 3


def test_a_long_vocabulary_takes_no_memory(tmp_path):
    """It is read in windows, and tokens lie across them; large models have four times as many."""
    rng = np.random.default_rng(0)
    tokens = [text(b"x" * int(n)) for n in rng.integers(0, 40, 40_000)]
    keys = {"tokens": array(8, tokens), "merges": array(8, tokens[::-1]), "scores": array(6, [bytes(160_000)], 40_000)}
    path = write(tmp_path / "m.gguf", keys | {"last": u32(7)}, {"a": (F32, (1,), b"1234")})
    assert path.stat().st_size > 2_000_000
    tracemalloc.start()
    file = GgufFile(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert file.metadata == {"last": 7}
    assert peak < 1_200_000
