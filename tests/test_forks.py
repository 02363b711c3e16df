"""A fork while other threads are in the middle of something: the child has none of them, and must not wait for them."""

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from checkpoints import SCHEMES, write, write_index
from helpers import in_child, random_batch, same_bits

from ktmoe import MoELayer, backends, forks, loaders
from ktmoe.background.worker import jobs
from ktmoe.compat import engine
from ktmoe.errors import ClosedError
from ktmoe.loaders import checkpoint as checkpoint_module
from ktmoe.loaders import pairs as pairs_module
from ktmoe.loaders import stacked
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.direct_io import DirectFile
from ktmoe.loaders.safetensors_file import SafetensorsFile

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
SECONDS = 20  # that a child may take before it counts as hanging


@contextmanager
def held_elsewhere(lock):
    """Another thread has it."""
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.fixture
def tensors():
    rng = np.random.default_rng(1)
    return {name: ["U8", rng.integers(0, 256, 1000, np.uint8)] for name in "abc"}


@pytest.fixture
def checkpoint(tmp_path, tensors):
    """A file for each tensor, none of them opened."""
    for name, tensor in tensors.items():
        write(tmp_path, {name: tensor}, file=f"{name}.safetensors").close()
    write_index(tmp_path, {name: f"{name}.safetensors" for name in tensors})
    with Checkpoint(tmp_path) as checkpoint:
        yield checkpoint


def reads_all(checkpoint, tensors, release=False):
    return all(np.array_equal(checkpoint.read(name, release=release), tensor) for name, (_, tensor) in tensors.items())


@pytest.mark.parametrize("opened", [False, True])
def test_a_checkpoint_and_its_files(checkpoint, tensors, opened):
    """Each of their locks in turn; and close() in the child is the child's."""
    if opened:
        assert reads_all(checkpoint, tensors, release=True)
    files = list(checkpoint._open_files.values())
    for lock in [checkpoint._lock, *(file._lock for file in files), *(file._direct._lock for file in files)]:
        with held_elsewhere(lock):
            for release in (False, True):
                assert in_child(lambda release=release: reads_all(checkpoint, tensors, release), SECONDS)
            assert in_child(lambda: (checkpoint.close(), True)[1], SECONDS)
    assert reads_all(checkpoint, tensors)


def test_direct_io(tmp_path):
    data = np.arange(1 << 18, dtype=np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    direct = DirectFile(fd)
    with held_elsewhere(direct._lock):
        assert in_child(lambda: direct._open() is not None, SECONDS)
    direct.close()
    os.close(fd)


def test_the_child_closes_a_file_that_another_thread_was_reading(checkpoint, tensors, monkeypatch):
    """Its reader is not there: closing need not wait for it."""
    assert reads_all(checkpoint, tensors)
    reading, done, preadv = threading.Event(), threading.Event(), os.preadv

    def slow(*arguments):
        reading.set()
        done.wait()
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    reader = threading.Thread(target=checkpoint.read, args=("a",))
    reader.start()
    reading.wait()

    def closed():
        before = len(os.listdir("/proc/self/fd"))
        checkpoint.close()
        return before - len(os.listdir("/proc/self/fd"))

    assert in_child(closed, SECONDS) == len(tensors)
    done.set()
    reader.join()


class Slow:
    """SafetensorsFile, but opening a file named a.safetensors ends only when it may."""

    def __init__(self, monkeypatch):
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        monkeypatch.setattr(checkpoint_module, "SafetensorsFile", self)

    def __call__(self, path):
        file = SafetensorsFile(path)
        if path.name == "a.safetensors":
            self.begun.release()
            assert self.may_end.wait(SECONDS)
        return file


def test_opening_a_file_holds_nobody_up(checkpoint, tensors, monkeypatch):
    """A header may take seconds; others read on, fork, and open the same file."""
    slow = Slow(monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(checkpoint.read, "a") for _ in range(2)]
        for _ in jobs:
            slow.begun.acquire()
        assert np.array_equal(checkpoint.read("b"), tensors["b"][1])

        def child():
            slow.may_end.set()
            return reads_all(checkpoint, tensors)

        assert in_child(child, SECONDS)
        slow.may_end.set()
        assert all(np.array_equal(job.result(), tensors["a"][1]) for job in jobs)
    assert len(os.listdir("/proc/self/fd")) == before + 2  # a's and b's, once each


def test_close_while_a_file_is_opened(checkpoint, monkeypatch):
    slow = Slow(monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(checkpoint.read, "a")
        slow.begun.acquire()
        checkpoint.close()
        slow.may_end.set()
        with pytest.raises(ClosedError, match="'a' was asked for after close"):
            job.result()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def pairs(monkeypatch):
    """What gpt_oss makes for a layer that is loaded."""
    made = []

    class Recorded(pairs_module.GateUpReader):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(stacked, "GateUpReader", Recorded)
    return made


@pytest.mark.parametrize("middle", ["lock", "read"])
def test_gpt_oss_pairs(tmp_path, pairs, middle):
    """A lock that is held, and a half that another thread is about to have read."""
    scheme = SCHEMES["gpt_oss"]
    tensors = scheme.layer("model.layers.0")
    weights = loaders.get("gpt_oss").load(write(tmp_path, tensors), 0)

    def child():
        scheme.check(weights, tensors, "model.layers.0")
        return True

    if middle == "lock":
        with held_elsewhere(pairs[0]._lock):
            assert in_child(child, SECONDS)
    else:
        pairs[0]._waiting[0, "up"] = Future()
        assert in_child(child, SECONDS)
        pairs[0]._waiting.clear()
    assert child()


def test_registries():
    for registry in (loaders.registry, backends.registry):
        names = registry.names()
        with held_elsewhere(registry._lock):
            assert in_child(registry.names, SECONDS) == names


FIRST_USE = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import numpy as np
from helpers import random_experts
import ktmoe
experts = random_experts(np.random.default_rng(1), 1, 64, 64)
thread = threading.Thread(target=lambda: ktmoe.MoELayer(experts, "fp32_lut").close())
thread.start()
children = []
while thread.is_alive() or not children:
    child = os.fork()
    if not child:
        signal.alarm(30)
        ktmoe.MoELayer(experts, "fp32_lut").close()
        os._exit(0)
    children.append(child)
    time.sleep(0.002)
assert all(os.waitpid(child, 0)[1] == 0 for child in children), "a child hangs"
"""


def test_first_use_while_the_process_forks():
    """Backends are imported then; a child never gets the lock of a module that another thread was importing."""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", FIRST_USE, os.path.dirname(__file__)], check=True, timeout=120)


def test_a_fork_waits_for_imports():
    with forks.importing:
        forker = threading.Thread(target=lambda: in_child(lambda: 1, SECONDS))
        forker.start()
        forker.join(0.3)
        assert forker.is_alive()
        assert in_child(lambda: 2, SECONDS) == 2  # the thread that imports may fork, too,
        with ThreadPoolExecutor(1) as pool:  # and do what other locks are for that are held across a fork
            logging.getLogger("ktmoe.test").debug("%s", pool.submit(int, "3").result())
    forker.join(SECONDS)
    assert not forker.is_alive()


def test_workers():
    """Those of submit() and of the kt-kernel wrappers; what they were about to do is not done twice."""
    for worker in (jobs, engine.ENGINE._worker):
        assert worker.submit(int, "3").result() == 3
        gate = threading.Event()
        queued = [worker.submit(gate.wait), worker.submit(gate.set)]

        def child(worker=worker, gate=gate):
            return worker.submit(int, "4").result(), gate.is_set()

        with held_elsewhere(worker._lock):
            assert in_child(child, SECONDS) == (4, False)
        gate.set()
        assert [job.result() for job in queued] == [True, None]
    with held_elsewhere(engine.ENGINE.lock._lock):
        assert in_child(lambda: engine.ENGINE.submit(int, "5").result(), SECONDS) == 5


def test_loading_layers_while_the_process_forks(tmp_path):
    """The whole of it: threads open files, read and pack while children are forked, each of which loads the layer itself."""
    scheme = SCHEMES["gpt_oss"]
    tensors = scheme.layer("model.layers.0")
    write(tmp_path, tensors).close()
    stop = threading.Event()

    def load():
        while not stop.is_set():
            with MoELayer.from_checkpoint(tmp_path, 0, "fp32_lut"):
                pass

    with MoELayer.from_checkpoint(tmp_path, 0, "fp32_lut") as whole:
        batch = random_batch(np.random.default_rng(2), whole, 4, 2)
        y = whole.forward(*batch)

    def child():
        with MoELayer.from_checkpoint(tmp_path, 0, "fp32_lut") as mine:
            return same_bits(mine.forward(*batch), y)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert all(in_child(child, SECONDS) for _ in range(15))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_value_that_another_thread_computes():
    """functools' cached_property of Python 3.11 has a lock, and one for all objects of a class."""
    entered, go = threading.Event(), threading.Event()

    class Thing:
        def __init__(self, waits):
            self.waits = waits

        @forks.cached_property
        def value(self):
            if self.waits:
                entered.set()
                go.wait()
            return 1

    thread = threading.Thread(target=lambda: Thing(True).value)
    thread.start()
    entered.wait()
    try:
        assert in_child(lambda: Thing(False).value, SECONDS) == 1
    finally:
        go.set()
        thread.join()
