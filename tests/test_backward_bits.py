"""What no bit of training depends on, what an adapter that is not there costs, and what is refused."""

import resource
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import BF16, KINDS, in_child, random_experts, same_bits
from simulated_training import Lora
from trained import adapter_of, arrays_of, backward, forward, training_batch

from ktmoe import MoELayer, set_num_threads
from ktmoe._native import core
from ktmoe.errors import ClosedError, InputError, OutOfMemoryError, UnavailableError
from ktmoe.experts import PROJECTIONS, ROUTER_WEIGHTS


def made(weights="folded", tokens=40, top_k=3, dtype=BF16, **options):
    """A layer, an adapter and a batch."""
    rng = np.random.default_rng(tokens)
    experts = random_experts(rng, 5, 160, 192, biases=True, **KINDS[weights])
    layer = MoELayer(experts, activations="bf16", **options)
    return layer, Lora(rng, experts, rank=4), training_batch(rng, experts, tokens, top_k, dtype)


def both(layer, batch, lora, again=False):
    """All arrays that both passes give."""
    given = forward(layer, *batch[:3], lora)
    found = backward(layer, *batch, lora, None if again else given.saved)
    return {"y": given.y, **arrays_of(found)}


def assert_same(expected, actual):
    for name, array in expected.items():
        assert same_bits(array, actual[name]), name


@pytest.mark.parametrize("weights", KINDS)
def test_without_an_adapter_y_is_that_of_forward(weights):
    layer, _, (x, ids, weights, _) = made(weights)
    with layer:
        assert same_bits(forward(layer, x, ids, weights).y, layer.forward(x, ids, weights))


@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_chunks_threads_and_computing_again_change_no_bit(router_weight, dtype):
    layer, lora, batch = made(dtype=dtype, router_weight=router_weight)
    with layer:
        expected = both(layer, batch, lora)
        assert_same(expected, both(layer, batch, lora, again=True))
        for scratch in (1, 3 << 20, 9 << 20):  # a slot at a time; tokens and slots in chunks
            core.tune(scratch_bytes=scratch)
            for again in (False, True):
                assert_same(expected, both(layer, batch, lora, again))
        core.tune(scratch_bytes=256 << 20)
        for threads in (1, 3, 8):
            set_num_threads(threads)
            core.tune(by_turns=threads > 1, uneven=threads)
            assert_same(expected, both(layer, batch, lora))
        core.tune(only_many=True)
        assert_same(expected, both(layer, batch, lora))


@pytest.mark.parametrize("weights", KINDS)
def test_a_token_has_its_bits_whatever_the_batch(weights):
    layer, lora, batch = made(weights, tokens=30)
    with layer:
        expected = both(layer, batch, lora)
        for count in (1, 2, 13):
            some = both(layer, [array[5 : 5 + count] for array in batch], lora)
            for name in ("y", "x", "weights"):
                assert same_bits(some[name], expected[name][5 : 5 + count]), name


def test_gradients_are_added_to_what_is_there_and_scaled():
    layer, lora, batch = made()
    with layer:
        saved = forward(layer, *batch[:3], lora).saved
        once = backward(layer, *batch, lora, saved)
        zeros = {p: tuple(np.zeros(m.shape, np.float32) for m in pair) for p, pair in lora.pairs.items()}
        added = backward(layer, *batch, lora, saved, into=zeros, add=True)
        assert_same(arrays_of(once), arrays_of(added))
        twice = backward(layer, *batch, lora, saved, scale=2.0)
        for p, pair in once.lora.items():
            for one, two in zip(pair, twice.lora[p], strict=True):
                assert np.array_equal(2 * one, two)
        backward(layer, *batch, lora, saved, into=added.lora, add=True, scale=-1.0)
        for p, pair in added.lora.items():
            for zero, one in zip(pair, once.lora[p], strict=True):
                assert np.abs(zero).max() <= 1e-5 * np.abs(one).max()


@pytest.mark.parametrize("router_weight", ["down_output", "expert_input"])
@pytest.mark.parametrize("wanted", [("gate",), ("down",), ()], ids=str)
def test_only_what_is_asked_for(wanted, router_weight):
    """The gradient of router weights that multiply x needs that of x, wanted or not."""
    layer, lora, batch = made(router_weight=router_weight)
    with layer:
        saved = forward(layer, *batch[:3], lora).saved
        expected = arrays_of(backward(layer, *batch, lora, saved))
        found = arrays_of(backward(layer, *batch, lora, saved, wanted=wanted, of_x=False))
        assert set(found) == {"weights", *(f"{p} {m}" for p in wanted for m in "ab")}
        assert_same(found, expected)


def test_experts_without_rows_and_batches_without_experts():
    layer, lora, (x, ids, weights, grad_y) = made()
    with layer:
        ids[ids == 2] = -7
        layer.expert_mask[4] = False
        found = backward(layer, x, ids, weights, grad_y, lora, forward(layer, x, ids, weights, lora).saved)
        assert not found.weights[(ids < 0) | (ids == 4)].any()
        for pair in found.lora.values():
            for array in pair:
                assert not array[[2, 4]].any()
                assert array[[0, 1, 3]].any()
        ids[:] = 99
        found = backward(layer, x, ids, weights, grad_y, lora, forward(layer, x, ids, weights, lora).saved)
        assert not any(array.any() for array in arrays_of(found).values())


def test_nan_stays_with_its_token():
    layer, lora, batch = made()
    with layer:
        expected = both(layer, batch, lora)
        batch[3][7] = np.nan
        found = both(layer, batch, lora)
    others = np.arange(len(batch[0])) != 7
    for name in ("x", "weights"):
        assert same_bits(found[name][others], expected[name][others])
    assert np.isnan(found["x"][7].astype(np.float32)).all()


def test_a_replaced_expert_counts():
    layer, lora, batch = made()
    rng = np.random.default_rng(1)
    other = random_experts(rng, 5, 160, 192, biases=True)
    with layer, MoELayer(other, activations="bf16") as fresh:
        expected = both(fresh, batch, lora)
        for expert in range(5):
            layer.packed.replace(expert, {p: other.matrix(expert, p) for p in PROJECTIONS})
        assert_same(expected, both(layer, batch, lora))


def test_an_adapter_is_read_when_a_call_begins():
    layer, lora, batch = made()
    with layer:
        adapter = adapter_of(layer, lora)
        y = [np.empty_like(batch[0]) for _ in range(2)]
        mask = layer.expert_mask.view(np.uint8)
        for out in y:
            args = batch[0].view(np.uint16), batch[1].astype(np.int64), batch[2], mask, out.view(np.uint16)
            layer.packed.forward_training(*args, adapter)
            lora.pairs["down"][1][...] *= 2
        lora.pairs["down"][1][...] /= 2
        assert same_bits(y[1], forward(layer, *batch[:3], lora).y)
        assert not same_bits(y[0], y[1])


@pytest.mark.parametrize("mode", ["int8", "mxfp8"])
def test_other_modes_are_refused_by_name(mode):
    experts = random_experts(np.random.default_rng(0), 1, 64, 64)
    with MoELayer(experts, activations=mode) as layer:
        batch = training_batch(np.random.default_rng(0), experts, 2)
        with pytest.raises(UnavailableError, match='activations="bf16"'):
            forward(layer, *batch[:3])


def test_memory_that_the_system_refuses():
    layer, lora, batch = made()
    saved = forward(layer, *batch[:3], lora).saved

    def starved():
        core.release()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))
        with pytest.raises(OutOfMemoryError, match="backward of 40 tokens: the operating system refused memory"):
            backward(layer, *batch, lora, saved)
        return True

    with layer:
        assert in_child(starved)


def test_what_is_refused():
    layer, lora, batch = made(tokens=3)
    x, ids, weights, grad_y = batch
    held = SimpleNamespace(packed=layer.packed, spec=layer.spec, expert_mask=layer.expert_mask)
    with layer:
        saved = forward(layer, *batch[:3], lora).saved
        for wrong in (grad_y[:2], grad_y[:, :-1].copy()):
            with pytest.raises(InputError, match="must be"):
                backward(layer, x, ids, weights, wrong, lora, saved)
        with pytest.raises(InputError, match="saved g"):
            backward(layer, *batch, lora, (saved[0][:-1], *saved[1:]))
        with pytest.raises(InputError, match="saved t"):
            backward(layer, *batch, lora, (*saved[:2], saved[2][:, :2].copy()))
        into = {"up": (np.zeros_like(lora.pairs["up"][0]), np.zeros((1, 2, 3), np.float32))}
        with pytest.raises(InputError, match="gradient of up's b"):
            backward(layer, *batch, lora, saved, into=into)
        for scale, pairs in (
            (1.0, {}),
            (1.0, {"gates": lora.pairs["gate"]}),
            (1.0, {"up": lora.pairs["down"]}),
            (1.0, {"up": lora.pairs["up"][::-1]}),
            (
                1.0,
                {
                    "up": lora.pairs["up"],
                    "gate": tuple(np.repeat(m, 2, axis) for m, axis in zip(lora.pairs["gate"], (1, 2), strict=True)),
                },
            ),
        ):
            with pytest.raises(InputError):
                core.Adapter(layer.spec, scale, pairs)
    with pytest.raises(ClosedError):
        backward(held, *batch, lora, saved)
