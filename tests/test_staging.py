"""Memory that tensors are read into is used again, and given back when nobody needs it."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from ktmoe import synthetic
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.direct_io import DirectFile
from ktmoe.loaders.staging import Staging

SIZE = 1 << 20
PAGE = 4096


def address(array):
    return array.ctypes.data


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_used_again():
    staging = Staging()
    kept, other = staging.take(SIZE), staging.take(SIZE)
    was = address(other)
    assert address(kept) != was
    del other
    assert address(staging.take(SIZE)) == was
    assert (kept.dtype, kept.shape, kept.flags.writeable) == (np.uint8, (SIZE,), True)


def test_a_view_keeps_it():
    staging = Staging()
    first, second = staging.take(SIZE), staging.take(SIZE)
    view = first.view(np.uint16).reshape(-1, 64)[3:]
    first.fill(7)
    del first
    again = staging.take(SIZE)
    again.fill(1)
    assert (view == 0x0707).all()
    assert len({address(again), address(second), address(view) - 3 * 128}) == 3


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097])
def test_any_size(nbytes):
    array = Staging().take(nbytes)
    assert array.nbytes == nbytes
    array.fill(1)


def test_it_holds_no_more_than_was_in_use_at_one_time():
    staging = Staging()
    kept = staging.take(SIZE)
    for size in range(SIZE, 40 * SIZE, SIZE):  # each is a size of its own
        staging.take(size).fill(1)
        assert staging.held <= SIZE + size
    del kept
    assert (staging.used, staging.held) == (0, 0)


def test_everything_is_given_back_with_the_last_array():
    staging = Staging()
    gc.collect()
    before = resident_bytes()
    arrays = [staging.take(32 * SIZE) for _ in range(4)]
    for array in arrays:
        array.fill(1)
    assert resident_bytes() - before > 100 * SIZE
    del array, arrays
    assert resident_bytes() - before < 16 * SIZE


def test_refused_memory_leaves_nothing_behind():
    staging = Staging()
    with pytest.raises(MemoryError):
        staging.take(1 << 60)
    assert (staging.used, staging.held) == (0, 0)


@pytest.mark.parametrize("cached", [False, True])
def test_a_checkpoint_reads_into_memory_that_it_had(tmp_path, monkeypatch, cached):
    monkeypatch.setattr(DirectFile, "cached", lambda *_: cached)
    synthetic.write_deepseek_v4(tmp_path, num_experts=3, hidden=1024, intermediate=512)
    with Checkpoint(tmp_path) as checkpoint:
        names = sorted(name for name in checkpoint.names() if checkpoint.info(name).nbytes == 1024 * 512 // 2)[:6]
        whole = {name: checkpoint.read(name) for name in names}
        kept, *others = (checkpoint.read(name, release=True) for name in names[:3])
        had = {address(array) // PAGE for array in others}
        del others
        again = [checkpoint.read(name, release=True) for name in names[3:5]]
        assert {address(array) // PAGE for array in again} == had
        for array, name in zip([kept, *again], [names[0], *names[3:5]], strict=True):
            assert np.array_equal(array, whole[name])
