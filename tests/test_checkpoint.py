"""Checkpoint: folders, indexes, raw reads, and what happens when files are hostile, missing, cut off or closed."""

import gc
import json
import os
import random
import re
import struct
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ktmoe.errors import CheckpointError, ClosedError, InputError, MissingTensorError
from ktmoe.loaders.checkpoint import INDEX_NAME, Checkpoint


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


def descriptors():
    gc.collect()  # earlier tests' garbage
    return set(os.listdir("/proc/self/fd"))


CODES = bytes(range(1, 33))
SCALES = b"\x7e\x7f\x80\xff"


@pytest.fixture
def two_shards(tmp_path):
    write_file(tmp_path / "model-1.safetensors", {"a": ("I8", [2, 16], CODES), "b": ("F4", [2, 32], CODES[::-1])})
    write_file(tmp_path / "model-2.safetensors", {"c": ("F8_E8M0", [2, 2], SCALES), "empty": ("BF16", [0], b"")})
    write_index(tmp_path, dict.fromkeys("ab", "model-1.safetensors") | dict.fromkeys(("c", "empty"), "model-2.safetensors"))
    (tmp_path / "config.json").write_text('{"model_type": "x", "nested": {"y": 1}}')
    return tmp_path


@pytest.fixture(params=["index", "no index"])
def folder(request, two_shards):
    if request.param == "no index":
        (two_shards / INDEX_NAME).unlink()
    return two_shards


def test_reads_raw_bytes(folder):
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.path == folder
        assert checkpoint.config == {"model_type": "x", "nested": {"y": 1}}
        assert set(checkpoint.names()) == {"a", "b", "c", "empty"}
        assert len(checkpoint) == 4
        assert "a" in checkpoint
        assert "d" not in checkpoint
        info = checkpoint.info("c")
        assert (info.name, info.dtype, info.shape, info.nbytes) == ("c", "F8_E8M0", (2, 2), 4)
        assert info.file == folder / "model-2.safetensors"
        assert info.file.read_bytes()[info.offset :] == SCALES
        assert checkpoint.info("b").shape == (2, 32)  # F4 counts elements
        for name, data in (("a", CODES), ("b", CODES[::-1]), ("c", SCALES), ("empty", b"")):
            for release in (False, True):
                array = checkpoint.read(name, release=release)
                assert array.dtype == np.uint8
                assert array.shape == (len(data),)
                assert array.tobytes() == data
            checkpoint.release(name)


def test_one_file(two_shards):
    checkpoint = Checkpoint(str(two_shards / "model-2.safetensors"))
    assert set(checkpoint.names()) == {"c", "empty"}
    assert checkpoint.config["model_type"] == "x"
    assert checkpoint.read("c").tobytes() == SCALES


def test_no_config(two_shards):
    (two_shards / "config.json").unlink()
    assert Checkpoint(two_shards).config == {}


def test_hugging_face_cache_is_symlinks(two_shards, tmp_path_factory):
    blobs, snapshot = tmp_path_factory.mktemp("blobs"), tmp_path_factory.mktemp("snapshots")
    for number, file in enumerate(sorted(two_shards.iterdir())):
        (blobs / f"{number:064x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"{number:064x}", snapshot))
    with Checkpoint(snapshot) as checkpoint:
        assert checkpoint.read("a").tobytes() == CODES
        assert checkpoint.config["model_type"] == "x"


def test_hidden_files_are_not_the_models(two_shards):
    (two_shards / INDEX_NAME).unlink()
    (two_shards / "._model-1.safetensors").write_bytes(b"\0\5\x16\7")
    assert len(Checkpoint(two_shards)) == 4


def test_out(folder):
    checkpoint = Checkpoint(folder)
    out = np.zeros((4, 8), np.uint8)
    assert checkpoint.read("a", out) is out
    assert out.tobytes() == CODES
    read_only = np.zeros(32, np.uint8)
    read_only.flags.writeable = False
    for bad, words in (
        (np.zeros(31, np.uint8), ["a: out", "32 bytes", "uint8 [31]"]),
        (np.zeros(32, np.int8), ["a: out", "uint8 array of 32 bytes", "int8 [32]"]),
        (bytearray(32), ["a: out", "uint8 array of 32 bytes", "bytearray"]),
        (np.zeros(64, np.uint8)[::2], ["a: out", "C-contiguous", "strides (2,)"]),
        (read_only, ["a: out", "writable", "writable False"]),
    ):
        with pytest.raises(InputError) as caught:
            checkpoint.read("a", bad)
        assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("part", [(0, 32), (0, 5), (3, 17), (31, 32), (0, 0), (32, 32), (np.int64(8), np.uint8(16))])
def test_part(folder, part):
    """Only these bytes are read, into `out` too; whatever else is asked for."""
    checkpoint = Checkpoint(folder)
    start, stop = map(int, part)
    for release in (False, True):
        assert checkpoint.read("a", part=part, release=release).tobytes() == CODES[start:stop]
    out = np.zeros(stop - start, np.uint8)
    assert checkpoint.read("a", out, part=part) is out
    assert out.tobytes() == CODES[start:stop]
    with pytest.raises(InputError, match=rf"a: out: expected a uint8 array of {stop - start} bytes, found uint8 \[33\]"):
        checkpoint.read("a", np.zeros(33, np.uint8), part=part)


@pytest.mark.parametrize("part", [(0, 33), (-1, 4), (5, 4), (33, 33), (-2, -1), (0, 2**70)])
def test_part_outside_the_tensor(folder, part):
    """Nothing is read, and nothing is released, beyond a tensor's own bytes."""
    checkpoint = Checkpoint(folder)
    message = re.escape(f"a: part: expected 0 <= start <= stop <= 32 bytes, found {part}")
    for call in (checkpoint.read, checkpoint.release):
        with pytest.raises(InputError, match=message):
            call("a", part=part)


def test_missing_tensor(folder):
    checkpoint = Checkpoint(folder)
    for call in (checkpoint.info, checkpoint.read, checkpoint.release):
        with pytest.raises(MissingTensorError) as caught:
            call("nobody")
        assert all(word in str(caught.value) for word in (str(folder), "'nobody'", "expected", "found 4 others"))


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff", b""])
@pytest.mark.parametrize("name", ["config.json", INDEX_NAME])
def test_malformed_json(two_shards, name, text):
    (two_shards / name).write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(two_shards)
    assert all(word in str(caught.value) for word in (str(two_shards / name), "expected", "found"))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, ["weight_map", "expected an object", "None"]),
        ({"weight_map": ["a"]}, ["weight_map", "expected an object", "['a']"]),
        ({"weight_map": {"a": 1}}, ["tensor 'a'", "expected a file name", "found 1"]),
        ({"weight_map": {"a": None}}, ["tensor 'a'", "expected a file name", "None"]),
        ({"weight_map": {"a": ["model-1.safetensors"]}}, ["tensor 'a'", "expected a file name", "['model-1"]),
        *(
            ({"weight_map": {"b": "model-1.safetensors", "a": file}}, ["tensor 'a'", "bare file name", repr(file)])
            for file in ("../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x", "", ".", "..")
        ),
    ],
)
def test_hostile_index(two_shards, index, words):
    (two_shards / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(two_shards)
    assert all(word in str(caught.value) for word in [INDEX_NAME, *words]), str(caught.value)


@pytest.mark.parametrize("file", ["gone.safetensors", "nul\0", "\ud800", "x" * 5000])
def test_index_names_a_file_that_is_not_there(two_shards, file):
    write_index(two_shards, {"a": "model-1.safetensors", "d": file})
    checkpoint = Checkpoint(two_shards)
    assert checkpoint.read("a").tobytes() == CODES  # a partial download serves what it has
    with pytest.raises(MissingTensorError, match=rf"expected by {INDEX_NAME} for tensor 'd', found no such file"):
        checkpoint.info("d")


def test_dangling_symlink(two_shards):
    (two_shards / "model-2.safetensors").unlink()
    (two_shards / "model-2.safetensors").symlink_to("nowhere")
    with pytest.raises(MissingTensorError, match=r"model-2.safetensors: expected .* tensor 'c', found no such file"):
        Checkpoint(two_shards).read("c")


def test_index_and_header_disagree(two_shards):
    write_index(two_shards, {"a": "model-2.safetensors", "c": "model-2.safetensors", "b": "model-1.safetensors"})
    checkpoint = Checkpoint(two_shards)
    with pytest.raises(CheckpointError, match=r"model-2.safetensors: tensor 'a': expected here .* found no such tensor"):
        checkpoint.info("a")
    assert checkpoint.read("c").tobytes() == SCALES
    before = descriptors()
    match = r"model-1.safetensors: tensor 'a': expected in model-2.safetensors .* found here"
    with pytest.raises(CheckpointError, match=match) as caught:
        checkpoint.info("b")
    assert descriptors() == before
    assert caught
    with pytest.raises(MissingTensorError, match=r"'empty': expected in this checkpoint, found 3 others"):
        checkpoint.info("empty")


def test_one_name_in_two_files(two_shards):
    (two_shards / INDEX_NAME).unlink()
    write_file(two_shards / "model-3.safetensors", {"a": ("U8", [1], b"x")})
    before = descriptors()
    match = r"tensor 'a': expected in one file, found in model-1.\w+, model-3.safetensors"
    with pytest.raises(CheckpointError, match=match) as caught:
        Checkpoint(two_shards)
    assert descriptors() == before
    assert caught  # whose traceback keeps the failed object alive: it was closed, not collected


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent: expected a folder or a .safetensors file, found nothing"):
        Checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=rf"expected {INDEX_NAME} or \*.safetensors files .* found none"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model.safetensors: expected a regular file, found d"):
        Checkpoint(tmp_path)


def test_a_fifo_does_not_hang(two_shards):
    (two_shards / "model-2.safetensors").unlink()
    os.mkfifo(two_shards / "model-2.safetensors")
    checkpoint = Checkpoint(two_shards)
    before = descriptors()
    with pytest.raises(CheckpointError, match=r"model-2.safetensors: expected a regular file, found p"):
        checkpoint.read("c")
    assert descriptors() == before


def test_unreadable_file(two_shards, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # root may open anything
    with pytest.raises(CheckpointError, match=rf"{INDEX_NAME}: expected a readable file, found .*Permission denied"):
        Checkpoint(two_shards)


@pytest.mark.parametrize("kept", [0, 1, 31])
def test_file_shrinks_while_open(folder, kept):
    checkpoint = Checkpoint(folder)
    info = checkpoint.info("a")
    os.truncate(info.file, info.offset + kept)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read("a")
    words = (str(info.file), "truncated", "tensor 'a'", "expected 32 bytes", f"at {info.offset}", f"found {kept}")
    assert all(word in str(caught.value) for word in words), str(caught.value)
    words = (
        str(info.file),
        "truncated",
        "tensor 'a'",
        "expected 31 bytes",
        f"at {info.offset + 1}",
        f"found {max(kept - 1, 0)}",
    )
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read("a", part=(1, 32))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert checkpoint.read("a", part=(0, kept)).tobytes() == CODES[:kept]
    assert checkpoint.read("c").tobytes() == SCALES


def test_truncated_before_it_is_opened(two_shards):
    file = two_shards / "model-1.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    checkpoint = Checkpoint(two_shards)
    with pytest.raises(CheckpointError, match=rf"truncated: expected {size} bytes by its header, found {size - 1}"):
        checkpoint.read("a")


def test_short_reads_are_continued(folder, monkeypatch):
    checkpoint = Checkpoint(folder)
    checkpoint.info("a")
    preadv = os.preadv
    counts = []

    def dribble(fd, buffers, offset):
        counts.append(preadv(fd, [buffers[0][:5]], offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", dribble)
    assert checkpoint.read("a").tobytes() == CODES
    assert counts == [5, 5, 5, 5, 5, 5, 2]


def test_read_error_names_the_tensor(folder, monkeypatch):
    checkpoint = Checkpoint(folder)
    checkpoint.info("a")

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        CheckpointError, match=r"model-1.safetensors: tensor 'a': expected 32 bytes .* found .*Input/output error"
    ):
        checkpoint.read("a")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no posix_fadvise")
def test_release_is_asked_for_after_the_read(folder, monkeypatch):
    checkpoint = Checkpoint(folder)
    info = checkpoint.info("a")
    calls = []
    preadv, advise = os.preadv, os.posix_fadvise
    monkeypatch.setattr(os, "preadv", lambda *args: calls.append("read") or preadv(*args))
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: calls.append(args[1:]) or advise(*args))
    checkpoint.read("a")
    assert calls == ["read"]
    checkpoint.read("a", release=True)
    checkpoint.release("a")
    assert [call == "read" for call in calls] == [True, True, False, False]
    for start, length, advice in calls[2:]:
        assert start <= info.offset
        assert start + length >= info.offset + info.nbytes
        assert advice == os.POSIX_FADV_DONTNEED

    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert checkpoint.read("a", release=True).tobytes() == CODES


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no posix_fadvise")
def test_the_kernel_is_asked_not_to_read_ahead(folder, monkeypatch):
    """Of each file, whole and once; a file system that refuses is as good."""
    calls = []

    def refuse(_, *advice):
        calls.append(advice)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    checkpoint = Checkpoint(folder)
    for name in ("a", "c", "b"):
        checkpoint.read(name)
    assert calls == [(0, 0, os.POSIX_FADV_RANDOM)] * 2


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no posix_fadvise")
def test_released_parts_cover_the_tensor_and_spare_what_comes_next(tmp_path, monkeypatch):
    """Part by part: what lies behind the part in hand may have been read ahead."""
    size = (5 << 20) + 12345
    write_file(tmp_path / "model.safetensors", {"a": ("U8", [size], bytes(size)), "z": ("U8", [9], bytes(9))})
    checkpoint = Checkpoint(tmp_path)
    info = checkpoint.info("a")
    calls = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, length, advice: calls.append((start, start + length)))
    covered = info.offset
    for start in range(0, size, 300_000):
        stop = min(start + 300_000, size)
        calls.clear()
        checkpoint.read("a", part=(start, stop), release=True)
        for first, end in calls:
            assert first <= covered
            assert end <= info.offset + stop or stop == size
            covered = max(covered, end)
        assert covered > info.offset + stop - (2 << 20)
    assert covered >= info.offset + size
    calls.clear()
    checkpoint.release("a", part=(0, size))
    checkpoint.release("a")
    assert calls[0] == calls[1]


def test_close(folder):
    before = descriptors()
    checkpoint = Checkpoint(folder)
    checkpoint.read("a")
    checkpoint.read("c")
    assert len(descriptors()) == len(before) + 2
    checkpoint.close()
    checkpoint.close()
    assert descriptors() == before
    for call in (checkpoint.info, checkpoint.read, checkpoint.release):
        with pytest.raises(ClosedError, match=r"tensor 'a' was asked for after close\(\)"):
            call("a")


def test_garbage_collection_closes_without_a_warning(folder):
    before = descriptors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = Checkpoint(folder)
        checkpoint.read("a")
        assert descriptors() != before
        del checkpoint
    assert descriptors() == before


def test_no_descriptor_leaks_on_errors(folder):
    write_file(folder / "model-1.safetensors", {"a": ("I8", [3, 16], CODES)})
    before = descriptors()

    def read():
        with Checkpoint(folder) as checkpoint:
            assert checkpoint.read("c").tobytes() == SCALES
            checkpoint.read("a")

    for _ in range(3):
        with pytest.raises(CheckpointError, match="48 bytes for I8"):
            read()
    (folder / "model-1.safetensors").unlink()
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json"):
        Checkpoint(folder)
    assert descriptors() == before


def test_close_waits_for_a_read_in_progress(folder, monkeypatch):
    """A descriptor must not be closed, and its number reused, under a read in another thread."""
    checkpoint = Checkpoint(folder)
    checkpoint.info("a")
    before = descriptors()
    preadv = os.preadv

    def close_first(fd, *args):
        thread = threading.Thread(target=checkpoint.close)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        os.fstat(fd)
        return preadv(fd, *args)

    monkeypatch.setattr(os, "preadv", close_first)
    assert checkpoint.read("a").tobytes() == CODES
    assert len(descriptors()) < len(before)


def test_threads(tmp_path):
    random_bytes = np.random.default_rng(0).bytes(1 << 16)
    tensors = {f"t{i}": random_bytes[i : i + 1000 * (i + 1)] for i in range(24)}
    for shard in range(6):
        chosen = {name: ("U8", [len(data)], data) for name, data in list(tensors.items())[shard::6]}
        write_file(tmp_path / f"{shard}.safetensors", chosen)
    write_index(tmp_path, {name: f"{i % 6}.safetensors" for i, name in enumerate(tensors)})
    before = descriptors()
    with Checkpoint(tmp_path) as checkpoint, ThreadPoolExecutor(8) as pool:
        names = random.Random(0).choices(list(tensors), k=2000)
        for name, data in zip(names, pool.map(checkpoint.read, names), strict=True):
            assert data.tobytes() == tensors[name]
        assert len(descriptors()) <= len(before) + 6
    assert descriptors() == before


def test_works_in_a_forked_child(folder):
    script = f"""if True:
        import os
        from ktmoe.loaders.checkpoint import Checkpoint
        checkpoint = Checkpoint({str(folder)!r})
        first = checkpoint.read("a").tobytes()
        child = os.fork()
        same = checkpoint.read("a").tobytes() == first and checkpoint.read("c").tobytes() == {SCALES!r}
        if not child:
            os._exit(0 if same else 1)
        assert same and os.waitpid(child, 0)[1] == 0
        """
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def test_many_tensors(tmp_path):
    """As many as DeepSeek-V4-Flash has, in one file and by one index."""
    names = [f"layers.{layer}.ffn.experts.{expert}.w1.weight" for layer in range(43) for expert in range(1536)]
    write_file(tmp_path / "model.safetensors", {name: ("U8", [1], b"x") for name in names})
    write_index(tmp_path, dict.fromkeys(names, "model.safetensors"))
    with Checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint) == 66048
        infos = [checkpoint.info(name) for name in names]
        assert [info.offset for info in infos] == list(range(infos[0].offset, infos[0].offset + 66048))
