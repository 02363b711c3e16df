"""Large tensors are read past the page cache, wherever they begin and end, and by way of it where that is not possible."""

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from ktmoe.errors import CheckpointError
from ktmoe.loaders import direct_io
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.direct_io import BLOCK_BYTES, LEAST_BYTES, DirectFile

SIZE = 5 * LEAST_BYTES + 4321


@pytest.fixture
def data():
    return np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture
def file(tmp_path, data):
    path = tmp_path / "model.safetensors"
    save_file({"a": data[:1001], "b": data[1001:]}, path)
    forget(path)
    return path


def forget(path):
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture
def direct(monkeypatch):
    """How many bytes each direct read gave; skips where this file system has none."""
    counts = []
    read = DirectFile.read

    def record(self, offset, nbytes, staging):
        found = read(self, offset, nbytes, staging)
        counts.append(None if found is None else len(found))
        return found

    monkeypatch.setattr(DirectFile, "read", record)
    return counts


def needs_direct_io(path):
    """path: forgotten by the page cache, if this file system lets it be."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        os.preadv(fd, [bytearray(1)], SIZE // 8, os.RWF_NOWAIT)
    except BlockingIOError:  # it has forgotten it
        os.preadv(fd, [bytearray(1)], SIZE // 8)  # what was asked for may still be on its way, and would stay
        forget(path)
        return
    except OSError as error:
        pytest.skip(f"this file system reads by way of the page cache: {error}")
    finally:
        os.close(fd)
    pytest.skip("this file system reads by way of the page cache")


def test_the_bytes_are_the_files(file, data, direct, monkeypatch):
    """From any byte to any byte, in the middle of blocks and at the file's end, which is in the middle of one."""
    needs_direct_io(file)
    monkeypatch.setattr(DirectFile, "cached", lambda *_: False)  # one read's question may be the next one's answer
    size = SIZE - 1001
    ranges = [(0, size), (1, size), (17, 17 + LEAST_BYTES), (BLOCK_BYTES, 3 * LEAST_BYTES), (size - LEAST_BYTES, size)]
    with Checkpoint(file) as checkpoint:
        for start, stop in ranges:
            assert np.array_equal(
                checkpoint.read("b", byte_range=(start, stop), release=True), data[1001 + start : 1001 + stop]
            )
        assert direct == [stop - start for start, stop in ranges]
        assert np.array_equal(checkpoint.read("a", release=True), data[:1001])
        assert direct[-1] is None  # too few


def test_what_the_page_cache_has_comes_from_it(file, data, direct):
    needs_direct_io(file)
    file.read_bytes()
    with Checkpoint(file) as checkpoint:
        assert np.array_equal(checkpoint.read("b", release=True), data[1001:])
        assert direct == [None]
        assert np.array_equal(checkpoint.read("b", release=True), data[1001:])
        assert len(direct) == 2


def test_nothing_stays_in_the_page_cache(file):
    """But perhaps the page in the middle, which was asked for to know whether it is there."""
    needs_direct_io(file)
    with Checkpoint(file) as checkpoint:
        info = checkpoint.info("b")
        checkpoint.read("b", release=True)
    fd = os.open(file, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        os.preadv(fd, [bytearray(1)], info.offset + info.nbytes // 4, os.RWF_NOWAIT)
    os.close(fd)


def test_a_file_that_shrank(file, direct):
    needs_direct_io(file)
    with Checkpoint(file) as checkpoint:
        info = checkpoint.info("b")
        for left in (2 * LEAST_BYTES, info.offset + 1, info.offset):
            os.truncate(file, left)
            forget(file)
            expected = (
                rf"truncated: tensor 'b': expected {info.nbytes} bytes at {info.offset}, found {max(0, left - info.offset)}"
            )
            with pytest.raises(CheckpointError, match=expected):
                checkpoint.read("b", release=True)


@pytest.mark.parametrize("when", ["open", "read", "short"])
def test_by_way_of_the_page_cache_where_it_cannot_be(file, data, monkeypatch, when):
    """The file system refuses to open it so, or to read, or gives less than a block."""
    needs_direct_io(file)
    opened, preadv = [], os.preadv
    real_open = os.open

    def open_(path, flags, *rest):
        if flags & os.O_DIRECT and when == "open":
            raise OSError(22, "Invalid argument")
        fd = real_open(path, flags, *rest)
        if flags & os.O_DIRECT:
            opened.append(fd)
        return fd

    def read(fd, buffers, offset, *flags):
        if fd in opened and when == "read":
            raise OSError(22, "Invalid argument")
        return preadv(fd, [buffers[0][:1000]] if fd in opened else buffers, offset, *flags)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", read)
    with Checkpoint(file) as checkpoint:
        assert np.array_equal(checkpoint.read("b", release=True), data[1001:])
    assert bool(opened) == (when != "open")


def test_reads_that_come_in_pieces(file, data, monkeypatch):
    needs_direct_io(file)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, *rest: preadv(fd, [memoryview(buffers[0])[:BLOCK_BYTES]], *rest))
    with Checkpoint(file) as checkpoint:
        assert np.array_equal(checkpoint.read("b", release=True), data[1001:])


def test_a_system_without_these_calls(file, data, monkeypatch):
    for name in ("O_DIRECT", "RWF_NOWAIT"):
        with monkeypatch.context() as patch:
            patch.delattr(direct_io.os, name)
            with Checkpoint(file) as checkpoint:
                assert np.array_equal(checkpoint.read("b", release=True), data[1001:])


def test_its_descriptor_is_closed_with_the_file(file):
    before = len(os.listdir("/proc/self/fd"))
    with Checkpoint(file) as checkpoint:
        checkpoint.read("b", release=True)
    assert len(os.listdir("/proc/self/fd")) == before
    checkpoint = Checkpoint(file)
    checkpoint.read("b", release=True)
    del checkpoint
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_file_of_that_name_is_not_read(file, data, tmp_path):
    needs_direct_io(file)
    with Checkpoint(file) as checkpoint:
        other = tmp_path / "other"
        other.write_bytes(bytes(file.stat().st_size))
        other.rename(file)
        assert np.array_equal(checkpoint.read("b", release=True), data[1001:])
