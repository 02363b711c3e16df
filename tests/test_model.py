"""MoEModel: the layers it gives are MoELayer's own, and whatever ends loading early gives everything back."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import HIDDEN, SCHEMES, write
from helpers import in_child, same_bits

from ktmoe import MoELayer, MoEModel, cli, synthetic
from ktmoe import model as model_module
from ktmoe.errors import (
    CheckpointError,
    ClosedError,
    FormatError,
    InputError,
    MissingTensorError,
    OutOfMemoryError,
    UnavailableError,
    UnknownNameError,
)
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine import memory

LAYERS, EXPERTS = 5, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five small layers and an MTP layer in several files."""
    path = tmp_path_factory.mktemp("model")
    sizes = {"num_experts": EXPERTS, "hidden": 128, "intermediate": 64}
    synthetic.write_deepseek_v4(path, layers=LAYERS, mtp_layers=1, shard_bytes=1 << 16, **sizes)
    return path


@pytest.fixture
def nothing_left():
    """After the test: no thread of ours, no descriptor more than before."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert own_threads() == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def own_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("ktmoe-load", "ktmoe-read"))]


def wait_for_threads():
    """Until they have ended, which a finalizer does not wait for."""
    for _ in range(1000):
        if not own_threads():
            return
        time.sleep(0.01)


def batch(layer, tokens=5, top_k=2):
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, layer.hidden)).astype(ml_dtypes.bfloat16)
    return x, rng.integers(0, layer.num_experts, (tokens, top_k)), rng.random((tokens, top_k), np.float32)


def assert_same(layer: MoELayer, expected: MoELayer):
    assert layer.name == expected.name
    assert (layer.backend, layer.activations, layer.rounding) == (expected.backend, expected.activations, expected.rounding)
    assert layer.nbytes == expected.nbytes
    for expert in range(expected.num_experts):
        for projection in PROJECTIONS:
            packed = [which.packed.packed_bytes(expert, projection) for which in (layer, expected)]
            assert np.array_equal(*packed)
    assert same_bits(layer.forward(*batch(layer)), expected.forward(*batch(expected)))


class Gate:
    """Progress that waits, once so many bytes are done, until it is opened."""

    def __init__(self, at: int):
        self.at = at
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, done, total):
        if done >= self.at:
            self.reached.set()
            assert self.opened.wait(30)


def layer_bytes(folder):
    with MoELayer.from_checkpoint(folder, 0) as layer:
        return layer.nbytes


def half_loaded(folder, layers=2):
    """A model whose first layers are there, so many; it goes on when its gate opens."""
    gate = Gate(layers * layer_bytes(folder) + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "AT_ONCE", 1)  # in order, one by one
        model = MoEModel.from_checkpoint(folder, progress=gate, wait=False)
    assert gate.reached.wait(30)
    return model, gate


def end_with(function, gate):
    """Calls what ends loading while progress is being called, which returns only then."""
    thread = threading.Thread(target=function)
    thread.start()
    gate.opened.set()
    thread.join(30)
    assert not thread.is_alive()


# What it gives


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_are_those_of_moelayer(tmp_path, scheme, nothing_left):
    """Of every naming scheme, and in parameters that are passed on."""
    scheme = SCHEMES[scheme]
    tensors = {}
    for number in range(3):
        tensors |= scheme.layer(f"model.layers.{number}", seed=number)
    write(tmp_path, tensors, {}).close()
    options = {"backend": "fp32_lut", "activations": "bf16", "router_weight": "down_input"}
    for given in ({}, options):
        with MoEModel.from_checkpoint(tmp_path, **given) as model:
            assert model.layers == [0, 1, 2]
            for layer in model:
                with MoELayer.from_checkpoint(tmp_path, layer, **given) as expected:
                    assert expected.hidden == HIDDEN
                    assert_same(model[layer], expected)
            assert model[0].router_weight == given.get("router_weight", "down_output")


def test_names(folder, nothing_left):
    with MoEModel.from_checkpoint(folder) as model:
        assert model.layers == list(model) == [*range(LAYERS), "mtp.0"]
        assert len(model) == LAYERS + 1
        assert model["3"] is model[3] is model[np.int64(3)]
        assert model["mtp.0"].name == "mtp.0.ffn.experts"
        assert "mtp.0" in model
        assert 7 not in model
        assert None not in model
        assert model.loaded == (model.nbytes, model.nbytes)
        assert model.nbytes == 6 * layer_bytes(folder)
        assert "layers 0-4, mtp.0" in repr(model)
        with pytest.raises(MissingTensorError, match=r"layer 7: expected one of layers 0-4, mtp\.0"):
            model[7]


def test_some_layers_in_the_order_given(folder, nothing_left):
    with MoEModel.from_checkpoint(folder, layers=iter(["mtp.0", 4, "1"])) as model:
        assert model.layers == ["mtp.0", 4, 1]
        assert model[1].name == "layers.1.ffn.experts"
        assert 0 not in model


@pytest.mark.parametrize(
    ("layers", "error", "words"),
    [
        ([0, 17], MissingTensorError, "layer 17: expected a layer that has routed experts, found layers 0-4"),
        ([0, 2, "2"], InputError, "layers: expected each once, found 2 2 times"),
        ([], InputError, "layers: expected at least one, found none"),
        (3, InputError, "layers: expected an iterable of numbers and names, found 3"),
        ("0-3", InputError, "layers: expected an iterable of numbers and names, found '0-3'"),
    ],
)
def test_wrong_layers(folder, layers, error, words, nothing_left):
    with pytest.raises(error, match=words):
        MoEModel.from_checkpoint(folder, layers)


def test_a_layer_of_two_names(tmp_path, nothing_left):
    scheme = SCHEMES["deepseek_v4"]
    tensors = scheme.layer("layers.0") | scheme.layer("layers.1") | scheme.layer("model.layers.1")
    write(tmp_path, tensors, {}).close()
    with pytest.raises(CheckpointError, match=r"layer 1: expected one name, found layers\.1.* and model\.layers\.1"):
        MoEModel.from_checkpoint(tmp_path)
    MoEModel.from_checkpoint(tmp_path, [0]).close()


def test_wrong_arguments_read_nothing(folder, monkeypatch, nothing_left):
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(UnknownNameError, match="nonsense"):
        MoEModel.from_checkpoint(folder, backend="nonsense")
    with pytest.raises(UnavailableError, match="int5"):
        MoEModel.from_checkpoint(folder, activations="int5")
    with pytest.raises(UnknownNameError, match="nonsense"):
        MoEModel.from_checkpoint(folder, loader="nonsense")
    with pytest.raises(CheckpointError, match="nowhere"):
        MoEModel.from_checkpoint(folder / "nowhere")
    for wrong in ([0.5], np.zeros((2, 4), int), np.zeros((1, 6, 4), int), np.zeros((), int)):
        with pytest.raises(InputError, match=r"physical_to_logical: expected integers \[slots\] or \[6 layers, slots\]"):
            MoEModel.from_checkpoint(folder, physical_to_logical=wrong)


def test_physical_to_logical(folder, nothing_left):
    """Each layer takes the experts of its row."""
    maps = np.random.default_rng(0).integers(0, EXPERTS, (2, 6))
    for given in (maps, maps[0], maps.tolist()):
        with MoEModel.from_checkpoint(folder, [1, 3], physical_to_logical=given) as model:
            for layer, ids in zip(model, np.broadcast_to(given, (2, 6)), strict=True):
                with MoELayer.from_checkpoint(folder, layer) as whole:
                    assert model[layer].num_experts == 6
                    x, slots, weights = batch(model[layer])
                    assert same_bits(model[layer].forward(x, slots, weights), whole.forward(x, ids[slots], weights))


# While it loads


def test_layers_are_used_while_others_load(folder, nothing_left):
    model, gate = half_loaded(folder)
    with model, MoELayer.from_checkpoint(folder, 1) as expected:
        assert_same(model[1], expected)
        assert not model.wait(0.01)
        done, total = model.loaded
        assert 2 * expected.nbytes <= done < total == 6 * expected.nbytes
        assert model.nbytes >= 2 * expected.nbytes
        gate.opened.set()
        assert model["mtp.0"].name == "mtp.0.ffn.experts"
        assert model.wait()
        assert model.wait(0)


def test_files_are_closed_once_all_is_loaded(folder, nothing_left):
    before = len(os.listdir("/proc/self/fd"))
    model = MoEModel.from_checkpoint(folder)
    deadline = time.monotonic() + 10
    while own_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(os.listdir("/proc/self/fd")) == before
    model.close()


def test_concurrent_users(folder, nothing_left):
    wanted = {}
    for layer in range(LAYERS):
        with MoELayer.from_checkpoint(folder, layer) as expected:
            wanted[layer] = expected.forward(*batch(expected))
    for _ in range(3):
        wrong = []
        with MoEModel.from_checkpoint(folder, wait=False) as model:

            def use(order, model=model, wrong=wrong):
                for layer in order:
                    wrong.extend([layer] * (not same_bits(model[layer].forward(*batch(model[layer])), wanted[layer])))

            orders = [range(LAYERS), reversed(range(LAYERS)), [2, 0, 4, 1, 3], [4]]
            users = [threading.Thread(target=use, args=(list(order),)) for order in orders]
            for user in users:
                user.start()
            for user in users:
                user.join(30)
            assert not any(user.is_alive() for user in users)
        assert wrong == []


def test_progress(folder, nothing_left):
    seen, inside = [], threading.Lock()

    def progress(done, total):
        assert inside.acquire(blocking=False), "called by two threads at once"
        seen.append((done, total))
        inside.release()

    with MoEModel.from_checkpoint(folder, progress=progress) as model:
        total = model.nbytes
    assert seen == sorted(set(seen))
    assert {of for _, of in seen} == {total}
    assert len(seen) == 6 * EXPERTS
    assert seen[-1] == (total, total)


def test_a_bar(folder, capfd, nothing_left):
    MoEModel.from_checkpoint(folder, progress=True).close()
    captured = capfd.readouterr()
    assert "loading" in captured.err
    assert captured.out == ""


def test_a_bar_without_rich(folder, monkeypatch, nothing_left):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(UnavailableError, match=r"rich, which is not installed: pip install 'ktmoe\[cli\]'"):
        MoEModel.from_checkpoint(folder, progress=True)


# What goes wrong


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


@pytest.mark.parametrize("way", ["cancel", "progress", "failure"])
def test_memory_comes_back(tmp_path, way, nothing_left):
    """Of layers that were loaded and of those that were half loaded, 40 MB each, even while the error is held on to."""
    synthetic.write_deepseek_v4(tmp_path, layers=4, num_experts=24, hidden=1024, intermediate=1024)
    size = layer_bytes(tmp_path)
    load_and_stop(tmp_path, way, size)  # malloc keeps what threads have read into
    assert load_and_stop(tmp_path, way, size) < size // 2


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
        """In a thread that reads for the one that loads."""

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


# The command


def test_command(folder, capfd, nothing_left):
    assert cli.main(["load", str(folder), "--layers", "0-1,mtp.0", "--backend", "fp32_lut"]) == 0
    out = capfd.readouterr().out
    assert "3 layers, " in out
    assert "backend fp32_lut" in out
    assert "loaded in " in out
    assert "peak RSS" in out
    assert cli.main(["load", str(folder), "--layers", "9"]) == 1
    assert "layer 9" in capfd.readouterr().err
    for wrong in ("3-1", "", "1-x", "0,,1"):
        with pytest.raises(SystemExit):
            cli.main(["load", str(folder), "--layers", wrong])
        assert "expected numbers, ranges such as 0-3 and names" in capfd.readouterr().err
