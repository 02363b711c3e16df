"""MoEModel: whatever ends loading early, an error, an exception, close(), a fork or an exit, gives everything back."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
from checkpoints import SCHEMES, write
from helpers import in_child, same_bits
from loading_models import (
    EXPERTS,
    assert_same,
    batch,
    end_with,
    half_loaded,
    layer_bytes,
    own_threads,
    wait_for_threads,
    write_model,
)

from ktmoe import MoELayer, MoEModel, synthetic
from ktmoe import model as model_module
from ktmoe.errors import (
    CheckpointError,
    ClosedError,
    FormatError,
    OutOfMemoryError,
)
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine import memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def broken(tmp_path):
    """A checkpoint whose layer 2 has a NaN scale in expert 1."""
    scheme, tensors = SCHEMES["deepseek_v4"], {}
    for number in range(4):
        tensors |= scheme.layer(f"layers.{number}", seed=number)
    tensors["layers.2.ffn.experts.1.w3.scale"][1][3, 1] = 255
    write(tmp_path, tensors, {}).close()
    return tmp_path


def test_one_layer_is_wrong(broken, nothing_left):
    said = r"layers\.2\.ffn\.experts\.1\.w3.*scale \[3, 1\] is byte 255"
    with pytest.raises(FormatError, match=said):
        MoEModel.from_checkpoint(broken)
    with MoEModel.from_checkpoint(broken, wait=False) as model:
        for _ in range(2):
            with pytest.raises(FormatError, match=said):
                model[2]
        for layer in (0, 1, 3):
            with MoELayer.from_checkpoint(broken, layer) as expected:
                assert_same(model[layer], expected)
        with pytest.raises(FormatError, match=said):
            model.wait()
        model.cancel()  # there is nothing left to cancel
        assert model[3].name == "layers.3.ffn.experts"


def test_too_little_memory(folder, monkeypatch, nothing_left):
    size = layer_bytes(folder)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read"))
    staged = model_module.AT_ONCE * model_module.STAGED_EXPERTS * size // EXPERTS
    for available, fitting in ((6 * size + staged - 1, 5), (3 * size + staged, 3), (size, 0), (-1, 0)):
        monkeypatch.setattr(memory, "available_bytes", lambda available=available: available)
        with pytest.raises(
            MemoryError, match=rf"6 layers need 0\.00 GiB .* available, .* enough for {fitting} of them"
        ) as caught:
            MoEModel.from_checkpoint(folder)
        assert isinstance(caught.value, OutOfMemoryError)
    monkeypatch.undo()
    monkeypatch.setattr(memory, "available_bytes", lambda: 6 * size + staged)
    MoEModel.from_checkpoint(folder).close()


def test_an_exception_from_progress_cancels(folder, nothing_left):
    class Enough(Exception):
        pass

    def progress(done, total):
        if 3 * done > total:
            raise Enough

    with pytest.raises(Enough):
        MoEModel.from_checkpoint(folder, progress=progress)
    model = MoEModel.from_checkpoint(folder, progress=progress, wait=False)
    with pytest.raises(Enough):
        model.wait()
    with pytest.raises(ClosedError, match="layer 4: loading was cancelled"):
        model[4]
    model.cancel()
    assert own_threads() == []


def test_cancel_from_progress(folder, nothing_left):
    models = []
    started = threading.Event()

    def progress(done, total):
        assert started.wait(30)
        models[0].cancel()

    models.append(MoEModel.from_checkpoint(folder, progress=progress, wait=False))
    started.set()
    with pytest.raises(ClosedError, match="loading was cancelled"):
        models[0].wait()
    models[0].close()


@pytest.mark.parametrize("way", ["cancel", "close"])
def test_ending_it_half_way(folder, way, nothing_left):
    model, gate = half_loaded(folder)
    layer, waiting = model[0], []

    def wait():
        try:
            model[4]
        except ClosedError as error:
            waiting.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    end_with(getattr(model, way), gate)
    waiter.join(30)
    reason = {"cancel": "loading was cancelled", "close": "it was closed"}[way]
    assert f"layer 4: {reason}" in str(waiting[0])
    for use in (lambda: model[0], lambda: model[4], model.wait):
        with pytest.raises(ClosedError, match=reason):
            use()
    with pytest.raises(ClosedError):
        layer.forward(*batch(layer))
    assert model.nbytes == 0
    assert model.layers[0] == 0
    model.close()
    model.cancel()
    model.close()


def rss():
    """Bytes; what malloc keeps for later is given back before."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Layers of 40 MB each."""
    folder = tmp_path_factory.mktemp("large")
    synthetic.write_deepseek_v4(folder, layers=4, num_experts=24, hidden=1024, intermediate=1024)
    return folder


@pytest.mark.parametrize("way", ["cancel", "progress", "failure"])
def test_memory_comes_back(large, way, nothing_left):
    """Of layers that were loaded and of those that were half loaded, even while the error is held on to."""
    size = layer_bytes(large)
    load_and_stop(large, way, size)  # malloc keeps what threads have read into
    assert load_and_stop(large, way, size) < size // 2


def load_and_stop(folder, way, size):
    before, most = rss(), []

    def progress(done, total):
        most.append(rss())
        if way == "progress" and 3 * done > 2 * total:
            raise ValueError("enough")

    def stop(self, *arguments, read=Checkpoint.read, **options):
        if "layers.3.ffn.experts.21." in arguments[0]:
            raise CheckpointError("a bad disk")
        return read(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        if way == "failure":
            patch.setattr(Checkpoint, "read", stop)
        model = MoEModel.from_checkpoint(folder, progress=progress, wait=False)
        if way == "cancel":
            model[1]
            model.cancel()
        with pytest.raises((ClosedError, ValueError, CheckpointError)) as held:
            model.wait()
        if way == "failure":
            assert model[2].nbytes == size
            with pytest.raises(CheckpointError, match="a bad disk"):
                model[3]
            assert rss() - before < 3 * size + size // 2  # what layer 3 had is given back
            assert "bad disk" in "".join(traceback.format_exception(held.value))
            model.close()
    model.close()
    assert max(most) - before > size
    after = rss()
    assert held.value is not None  # it was held on to
    return after - before


def test_keyboard_interrupt(folder, nothing_left):
    def progress(done, total):
        if done == total // 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        MoEModel.from_checkpoint(folder, progress=progress)


def test_garbage(folder, nothing_left):
    model, gate = half_loaded(folder)
    gate.opened.set()
    del model
    gc.collect()
    wait_for_threads()


def test_garbage_in_a_thread_that_loading_waits_for(folder, nothing_left):
    """The collector runs in any thread: one that joined what waits for it would never end."""
    models, collected = [], threading.Event()

    class Reading(Checkpoint):
        """A checkpoint that is read in a thread that reads for the one that loads."""

        def read(self, *arguments, **options):
            if models and threading.current_thread().name.startswith("ktmoe-read"):
                models.clear()
                gc.collect()
                collected.set()
            return super().read(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ktmoe.model.Checkpoint", Reading)
        gate = threading.Event()
        models.append(MoEModel.from_checkpoint(folder, backend="fp32_lut", progress=lambda *_: gate.wait(), wait=False))
        gate.set()
        assert collected.wait(20)
        wait_for_threads()


def test_a_layer_outlives_its_model(folder, nothing_left):
    model = MoEModel.from_checkpoint(folder, backend="fp32_lut")
    layer = model[0]
    y = layer.forward(*batch(layer))
    del model
    gc.collect()
    assert same_bits(layer.forward(*batch(layer)), y)
    layer.close()
    wait_for_threads()


# Processes

EXIT = """
import sys, time
import ktmoe
gone = ktmoe.MoEModel.from_checkpoint(sys.argv[1], progress=lambda *_: time.sleep(0.02), wait=False)
if sys.argv[2] == "use":
    print(gone[1].name)
"""


@pytest.mark.parametrize("use", ["use", ""])
def test_interpreter_exit_does_not_wait(folder, use):
    """Loading all would take 24 times 20 ms."""
    done = subprocess.run([sys.executable, "-c", EXIT, folder, use], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == ("layers.1.ffn.experts" if use else "")


BEGINNING = """
import sys, threading, time
from contextlib import suppress
import ktmoe
from ktmoe.errors import KtmoeError

def slow(thread, start=threading.Thread.start):
    if thread.name.startswith("ktmoe-load"):
        begun.set()
        time.sleep(0.2)
    start(thread)

def load():
    with suppress(KtmoeError):  # no more threads can be started then
        ktmoe.MoEModel.from_checkpoint(sys.argv[1])

begun, threading.Thread.start = threading.Event(), slow
threading.Thread(target=load, daemon=True).start()
begun.wait()
"""


def test_interpreter_exit_while_loading_begins(folder):
    """In another thread, which is just starting the first of those that load."""
    done = subprocess.run([sys.executable, "-c", BEGINNING, folder], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_while_loading(folder, nothing_left):
    """A child has what was loaded and says so of the rest; the parent goes on."""
    model, gate = half_loaded(folder)
    y = model[0].forward(*batch(model[0]))

    def child():
        said = []
        for use in (lambda: model[4], model.wait):
            try:
                use()
            except ClosedError as error:
                said.append(str(error))
        same = same_bits(model[0].forward(*batch(model[0])), y)
        model.cancel()
        model.close()
        return same, said

    for same, said in (in_child(child), in_child(lambda: in_child(child))):
        assert same
        assert len(said) == 2
        assert all("was not loaded yet when this process was forked" in text for text in said)
    gate.opened.set()
    with model:
        assert model.wait()
        assert in_child(lambda: same_bits(model[0].forward(*batch(model[0])), y) and model.wait(0))
        assert same_bits(model[0].forward(*batch(model[0])), y)
