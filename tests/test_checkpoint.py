"""Checkpoint: folders, indexes, raw reads, what the system is told about them, threads and closing."""

import os
import random
import re
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoint_files import CODES, SCALES, descriptors, write_file, write_index

from ktmoe.errors import ClosedError, InputError, MissingTensorError
from ktmoe.loaders.checkpoint import INDEX_NAME, Checkpoint


def test_reads_raw_bytes(two_files):
    with Checkpoint(two_files) as checkpoint:
        assert checkpoint.path == two_files
        assert checkpoint.config == {"model_type": "x", "nested": {"y": 1}}
        assert set(checkpoint.names()) == {"a", "b", "c", "empty"}
        assert len(checkpoint) == 4
        assert "a" in checkpoint
        assert "d" not in checkpoint
        info = checkpoint.info("c")
        assert (info.name, info.dtype, info.shape, info.nbytes) == ("c", "F8_E8M0", (2, 2), 4)
        assert info.file == two_files / "model-2.safetensors"
        assert info.file.read_bytes()[info.offset :] == SCALES
        assert checkpoint.info("b").shape == (2, 32)  # F4 counts elements
        for name, data in (("a", CODES), ("b", CODES[::-1]), ("c", SCALES), ("empty", b"")):
            for release in (False, True):
                array = checkpoint.read(name, release=release)
                assert array.dtype == np.uint8
                assert array.shape == (len(data),)
                assert array.tobytes() == data
            checkpoint.release(name)


def test_the_file_of_a_tensor(two_shards):
    """By the index, also where that file is not there."""
    (two_shards / "model-2.safetensors").unlink()
    with Checkpoint(two_shards) as checkpoint:
        assert checkpoint.file_of("a") == two_shards / "model-1.safetensors"
        assert checkpoint.file_of("c") == two_shards / "model-2.safetensors"
        with pytest.raises(MissingTensorError, match="tensor 'd'"):
            checkpoint.file_of("d")


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


def test_out(two_files):
    checkpoint = Checkpoint(two_files)
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


@pytest.mark.parametrize("byte_range", [(0, 32), (0, 5), (3, 17), (31, 32), (0, 0), (32, 32), (np.int64(8), np.uint8(16))])
def test_a_range_of_bytes(two_files, byte_range):
    """Only these bytes are read, into `out` too; whatever else is asked for."""
    checkpoint = Checkpoint(two_files)
    start, stop = map(int, byte_range)
    for release in (False, True):
        assert checkpoint.read("a", byte_range=byte_range, release=release).tobytes() == CODES[start:stop]
    out = np.zeros(stop - start, np.uint8)
    assert checkpoint.read("a", out, byte_range=byte_range) is out
    assert out.tobytes() == CODES[start:stop]
    with pytest.raises(InputError, match=rf"a: out: expected a uint8 array of {stop - start} bytes, found uint8 \[33\]"):
        checkpoint.read("a", np.zeros(33, np.uint8), byte_range=byte_range)


@pytest.mark.parametrize("byte_range", [(0, 33), (-1, 4), (5, 4), (33, 33), (-2, -1), (0, 2**70)])
def test_a_range_outside_the_tensor(two_files, byte_range):
    """Nothing is read, and nothing is released, beyond a tensor's own bytes."""
    checkpoint = Checkpoint(two_files)
    message = re.escape(f"a: byte_range: expected 0 <= start <= stop <= 32 bytes, found {byte_range}")
    for call in (checkpoint.read, checkpoint.release):
        with pytest.raises(InputError, match=message):
            call("a", byte_range=byte_range)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no posix_fadvise")
def test_release_is_asked_for_after_the_read(two_files, monkeypatch):
    checkpoint = Checkpoint(two_files)
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
def test_the_kernel_is_asked_not_to_read_ahead(two_files, monkeypatch):
    """Of each file, whole and once; a file system that refuses is as good."""
    calls = []

    def refuse(_, *advice):
        calls.append(advice)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    checkpoint = Checkpoint(two_files)
    for name in ("a", "c", "b"):
        checkpoint.read(name)
    assert calls == [(0, 0, os.POSIX_FADV_RANDOM)] * 2


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no posix_fadvise")
def test_released_ranges_cover_the_tensor_and_spare_what_comes_next(tmp_path, monkeypatch):
    """Range by range: what lies behind the one in hand may have been read ahead."""
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
        checkpoint.read("a", byte_range=(start, stop), release=True)
        for first, end in calls:
            assert first <= covered
            assert end <= info.offset + stop or stop == size
            covered = max(covered, end)
        assert covered > info.offset + stop - (2 << 20)
    assert covered >= info.offset + size
    calls.clear()
    checkpoint.release("a", byte_range=(0, size))
    checkpoint.release("a")
    assert calls[0] == calls[1]


def test_close(two_files):
    before = descriptors()
    checkpoint = Checkpoint(two_files)
    checkpoint.read("a")
    checkpoint.read("c")
    assert len(descriptors()) == len(before) + 2
    checkpoint.close()
    checkpoint.close()
    assert descriptors() == before
    for call in (checkpoint.info, checkpoint.read, checkpoint.release):
        with pytest.raises(ClosedError, match=r"tensor 'a' was asked for after close\(\)"):
            call("a")


def test_garbage_collection_closes_without_a_warning(two_files):
    before = descriptors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = Checkpoint(two_files)
        checkpoint.read("a")
        assert descriptors() != before
        del checkpoint
    assert descriptors() == before


def test_close_waits_for_a_read_in_progress(two_files, monkeypatch):
    """A descriptor must not be closed, and its number reused, under a read in another thread."""
    checkpoint = Checkpoint(two_files)
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


def test_works_in_a_forked_child(two_files):
    script = f"""if True:
        import os
        from ktmoe.loaders.checkpoint import Checkpoint
        checkpoint = Checkpoint({str(two_files)!r})
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


def test_quantize_config_takes_the_place_of_quantization_config(two_shards):
    (two_shards / "quantize_config.json").write_text('{"bits": 4}')
    with Checkpoint(two_shards) as checkpoint:
        assert checkpoint.config == {"model_type": "x", "nested": {"y": 1}, "quantization_config": {"bits": 4}}
    (two_shards / "config.json").write_text('{"quantization_config": {"bits": 8}}')
    with Checkpoint(two_shards) as checkpoint:
        assert checkpoint.config == {"quantization_config": {"bits": 8}}
