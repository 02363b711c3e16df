"""MoEModel: the layers it gives are MoELayer's own, while others load and when all are there."""

import os
import sys
import threading
import time

import numpy as np
import pytest
from checkpoints import HIDDEN, SCHEMES, write
from helpers import same_bits
from loading_models import EXPERTS, LAYERS, assert_same, batch, half_loaded, layer_bytes, own_threads, write_model

from ktmoe import MoELayer, MoEModel, cli
from ktmoe.errors import (
    CheckpointError,
    InputError,
    MissingTensorError,
    UnavailableError,
    UnknownNameError,
)
from ktmoe.loaders.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


# What it gives


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_are_those_of_moelayer(tmp_path, scheme, nothing_left):
    """Of every naming scheme, and in parameters that are passed on."""
    scheme = SCHEMES[scheme]
    tensors = {}
    for number in range(2):
        tensors |= scheme.layer(f"model.layers.{number}", seed=number)
    write(tmp_path, tensors, {}).close()
    options = {"backend": "fp32_lut", "activations": "bf16", "router_weight": "down_input"}
    for given in ({}, options):
        with MoEModel.from_checkpoint(tmp_path, **given) as model:
            assert model.layers == [0, 1]
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


def test_a_bar(folder, capfd, monkeypatch, nothing_left):
    """On a terminal alone, whatever rich makes of FORCE_COLOR."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    MoEModel.from_checkpoint(folder, progress=True).close()
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    MoEModel.from_checkpoint(folder, progress=True).close()
    captured = capfd.readouterr()
    assert "loading" in captured.err
    assert captured.out == ""


def test_a_bar_without_rich(folder, monkeypatch, nothing_left):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(UnavailableError, match=r"rich, which is not installed: pip install 'ktmoe\[cli\]', or"):
        MoEModel.from_checkpoint(folder, progress=True)


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
        assert cli.main(["load", str(folder), "--layers", wrong]) == 2
        assert "expected numbers, ranges such as 0-3 and names" in capfd.readouterr().err
