"""Folders that are written: one that vanishes meanwhile, one on a disk that is read-only, one that many processes want."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from converting import tree

from ktmoe import synthetic
from ktmoe.cache.packing import pack
from ktmoe.conversion import convert
from ktmoe.errors import OutputError
from ktmoe.files.lock import exclusive

SIZES = {"num_experts": 2, "hidden": 64, "intermediate": 64}
#: Run with a read-only folder: everything that writes, into a folder that is there and into a new one; prints what it raises.
ON_READ_ONLY = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from adapter_files import QWEN, lora
from ktmoe import MoELayer, convert
from ktmoe.adapters import export_adapter, merge_adapter
from ktmoe.cache.packing import pack
from ktmoe.cli import results
from ktmoe.files.lock import exclusive
folder = Path(sys.argv[2])
model, cache, new = (folder / name for name in ("model", "cache", "new"))
def lock():
    with exclusive(folder):
        pass
for write in (
    lambda: pack(model, cache),
    lambda: pack(model, new),
    lambda: convert(model, new, "mxfp4"),
    lambda: export_adapter(folder / "adapter", {0: lora(seed=2)}, QWEN, overwrite=True),
    lambda: export_adapter(new, {0: lora(seed=2)}, QWEN),
    lambda: results.write(folder / "results.toml", {"a": 1}),
    lock,
):
    try:
        write()
        print("wrote")
    except Exception as error:
        print(type(error).__name__, error)
with MoELayer.from_checkpoint(model, 0, cache=cache):
    print("loads")
"""


def convert_to_mxfp4(model, out, progress=None):
    convert(model, out, "mxfp4", shard_bytes=8_000, progress=progress)


def pack_all(model, out, progress=None):
    pack(model, out, progress=progress)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "model"
    synthetic.write_qwen3(folder, layers=2, **SIZES)
    return folder


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("write", [pack_all, pytest.param(convert_to_mxfp4, marks=pytest.mark.exhaustive)])
def test_a_folder_that_vanishes(repeat, model, tmp_path, write):
    """It is removed, or moved away, at any step: the error names it, and it does not come back half-written."""
    calls, out = [], tmp_path / "out"
    write(model, out, lambda done, total: calls.append(done))
    whole, before = tree(out), descriptors()
    for number in repeat(f"folders that vanish while they are written: {write.__name__}", 40, 2):
        left = iter(range(random.Random(number).randrange(len(calls)), -1, -1))
        vanish = shutil.rmtree if number % 2 else lambda folder: folder.rename(tmp_path / "away")
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(tmp_path / "away", ignore_errors=True)
        with pytest.raises(OutputError, match=str(out)):
            write(model, out, lambda *_, left=left, vanish=vanish: next(left, 1) or vanish(out))
        assert (out.exists(), descriptors()) == (False, before)
        write(model, out)
        assert tree(out) == whole


@pytest.mark.exhaustive
def test_a_read_only_disk(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "cache", [0])
    before = tree(tmp_path)
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && echo mounted && exec "$@"'
    tests = Path(__file__).parents[1]
    arguments = [tmp_path, sys.executable, "-c", ON_READ_ONLY, tests, tmp_path]
    command = ["sh", "-c", 'exec unshare --mount --map-root-user sh -c "$0" "$@"', mount, *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if "mounted" not in found.stdout:
        pytest.skip(f"there can be no mount namespaces here: {found.stderr.strip()}")
    _, *refused, loads = found.stdout.splitlines()
    assert (loads, found.stderr, tree(tmp_path)) == ("loads", "", before)
    assert len(refused) == 7
    for said in refused:
        assert said.startswith(f"OutputError {tmp_path}")
        assert "Read-only file system" in said


def hold(folder, count, sender):
    """Take the lock again and again; in between, a file of one name, which only one process can have made."""
    got = 0
    for _ in range(count):
        try:
            with exclusive(folder):
                os.close(os.open(folder / "mine", os.O_CREAT | os.O_EXCL))
                got += 1
                os.unlink(folder / "mine")
        except OutputError:
            pass
    sender.send(got)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_many_processes_want_a_folder(repeat, tmp_path):
    """The lock's file is made and removed all the time: nobody locks one that has no name any more."""
    context = multiprocessing.get_context("fork")
    for _ in repeat("processes that want a folder, 100 times each", 50):
        receiver, sender = context.Pipe(duplex=False)
        processes = [context.Process(target=hold, args=(tmp_path, 100, sender)) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(100)
        assert [process.exitcode for process in processes] == [0, 0, 0]
        assert sum(receiver.recv() for _ in processes) >= 1
        assert not os.listdir(tmp_path)
