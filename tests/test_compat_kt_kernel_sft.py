"""KTMoEWrapper's mode "sft" on numpy arrays: what it computes, its weights, its kept forwards, and what it refuses."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from helpers import BF16, same_bits
from kt_wrappers import batch
from sft_wrappers import (
    EXPERTS,
    HIDDEN,
    METHODS,
    SKIPS,
    TOP_K,
    checkpoint,
    dirty,
    experts_of,
    gradient,
    lora,
    matrices,
    wrapper,
)

from ktmoe import MoELayer, load_experts
from ktmoe.compat.kt_kernel import KTMoEWrapper
from ktmoe.errors import InputError, OutOfMemoryError, UnavailableError
from ktmoe.experts import PROJECTIONS
from ktmoe.reference.gradients import ReferenceTraining
from ktmoe.training import Training

pytestmark = pytest.mark.usefixtures("nothing_is_leased")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint("MXFP4_SFT", tmp_path_factory.mktemp("mxfp4"))


def rounded(pairs) -> list[np.ndarray]:
    """An adapter's gradients as bfloat16, in the order of init_lora_weights()."""
    return [array.astype(BF16) for projection in PROJECTIONS for array in pairs[projection]]


# What it computes


@pytest.mark.parametrize("method", [*METHODS, *SKIPS])
def test_every_method(method, tmp_path):
    """Training's bits: y, all gradients, and those of the adapter rounded once."""
    folder, tensors = checkpoint(method, tmp_path), matrices()
    adapter, buffers = None if method in SKIPS else lora(tensors), dirty(tensors)
    (x, ids, scores), grad = batch(), gradient()
    with wrapper(folder, method, tensors, buffers) as w, MoELayer(experts_of(method, folder), activations="bf16") as layer:
        training = Training(layer)
        y, saved = training.forward(x, ids, scores, adapter)
        expected = training.backward(saved, grad, adapter)
        assert same_bits(w.forward(x, ids, scores), y)
        of_x, of_weights = w.backward(grad)
        assert of_x.dtype == BF16
        assert same_bits(of_x, expected.x)
        assert same_bits(of_weights, expected.weights)
        if adapter is None:
            assert all(np.isnan(buffer).all() for buffer in buffers.values())
        else:
            for found, wanted in zip(buffers.values(), rounded(expected.lora), strict=True):
                assert same_bits(found, wanted)


def test_values(folder):
    """Near float64: a swapped matrix, or a scale that is not alpha / rank, would be far from it."""
    tensors = matrices()
    (x, ids, scores), grad, buffers = batch(1, 9), gradient(1, 9), dirty(tensors)
    reference = ReferenceTraining(load_experts(folder, 0))
    adapter = lora({name: tensor.astype(np.float32) for name, tensor in tensors.items()})
    y, saved = reference.forward(x, ids, scores, adapter)
    expected = reference.backward(saved, grad, adapter)
    with wrapper(folder, tensors=tensors, gradients=buffers) as w:
        found = [w.forward(x, ids, scores), *w.backward(grad), *buffers.values()]
    wanted = [y, expected.x, expected.weights, *(array for p in PROJECTIONS for array in expected.lora[p])]
    for one, other in zip(found, wanted, strict=True):
        assert np.linalg.norm(one.astype(np.float64) - other) < 0.01 * np.linalg.norm(other)


def test_kinds_of_arguments(folder):
    """float32 is rounded once, uint16 holds bits; ids of any integers; an id that is no expert adds nothing."""
    tensors = matrices()
    x, ids, scores = batch()
    ids[0, :2] = -1, EXPERTS
    with wrapper(folder, tensors=tensors) as w:
        y = w.forward(x, ids, scores)
        of_x, of_weights = w.backward(gradient())
        assert (of_weights[0, :2] == 0).all()
        assert same_bits(w.forward(x.astype(np.float32), ids.astype(np.int32), scores.astype(np.float64)), y)
        bits = w.forward(x.view(np.uint16), ids, scores)
        assert bits.dtype == np.uint16
        assert same_bits(bits.view(BF16), y)
        again, _ = w.backward(gradient().astype(np.float32))
        assert same_bits(again, of_x)


@pytest.mark.parametrize("tokens", [0, 1, 200])
def test_any_number_of_tokens(folder, tokens):
    """chunked_prefill_size is 4, which kt-kernel would not exceed."""
    tensors, (x, ids, scores) = matrices(), batch(2, tokens)
    buffers = dirty(tensors)
    with wrapper(folder, tensors=tensors, gradients=buffers) as w:
        assert w.forward(x, ids, scores).shape == (tokens, HIDDEN)
        of_x, of_weights = w.backward(gradient(2, tokens))
    assert (of_x.shape, of_weights.shape) == ((tokens, HIDDEN), (tokens, TOP_K))
    assert all(np.isfinite(buffer.astype(np.float32)).all() for buffer in buffers.values())


def test_the_scale_of_gradients(folder):
    tensors = matrices()
    plain, scaled, call = dirty(tensors), dirty(tensors), batch()
    with wrapper(folder, tensors=tensors, gradients=plain) as w:
        w.forward(*call)
        of_x, _ = w.backward(gradient())
        w.init_lora_weights(*tensors.values(), *scaled.values())
        w.forward(*call)
        again, _ = w.backward(gradient(), optimizer_grad_scale=0.25)
    assert same_bits(again, of_x)
    for one, other in zip(scaled.values(), plain.values(), strict=True):
        assert same_bits(one, (other.astype(np.float32) / 4).astype(BF16))


def test_a_float32_adapter(folder):
    """Its gradients are not rounded."""
    tensors = {name: tensor.astype(np.float32) / 3 for name, tensor in matrices().items()}
    buffers, call = dirty(tensors), batch()
    with wrapper(folder, tensors=tensors, gradients=buffers) as w:
        w.forward(*call)
        w.backward(gradient())
        training = Training(w.moe)
        expected = training.backward(training.forward(*call, lora(tensors))[1], gradient(), lora(tensors)).lora
    for found, wanted in zip(buffers.values(), (array for p in PROJECTIONS for array in expected[p]), strict=True):
        assert same_bits(found, wanted)


def test_an_adapter_with_nan(folder):
    """It is no error: NaN comes out."""
    tensors = matrices()
    tensors["down_lora_b"][:, 7] = np.nan
    with wrapper(folder, tensors=tensors) as w:
        y = w.forward(*batch()).astype(np.float32)
    assert np.isnan(y[:, 7]).all()
    assert np.isfinite(np.delete(y, 7, 1)).all()


def test_an_adapter_that_changes(folder):
    """In place it counts at once; other memory counts after update_lora_weights()."""
    tensors, other, call = matrices(), matrices(1), batch()
    with wrapper(folder, tensors=tensors) as w, wrapper(folder, tensors=other) as second:
        before, expected = w.forward(*call), second.forward(*call)
        assert not same_bits(before, expected)
        for name, tensor in tensors.items():
            tensor[...] = other[name]
        assert same_bits(w.forward(*call), expected)
        for name, tensor in matrices().items():
            setattr(w, name, tensor)
        assert same_bits(w.forward(*call), expected)
        w.update_lora_weights()
        assert same_bits(w.forward(*call), before)


def test_serving(folder):
    """The same bits, and nothing is kept."""
    call = batch()
    with wrapper(folder, tensors=matrices()) as w:
        expected = w.forward(*call, save_for_backward=False)
        w.submit_forward_inference(*call, 0)
        with pytest.raises(InputError, match=r"sync_forward_inference\(\) must come first"):
            w.submit_forward_inference(*call, 0)
        assert same_bits(w.sync_forward_inference(0), expected)
        with pytest.raises(InputError, match="sync_forward_inference needs a submit before it, found none"):
            w.sync_forward_inference(0)
        w.submit_forward_inference(*call, 0)  # close() gives it up
        with pytest.raises(UnavailableError, match="backward needs a forward that was saved for it, found none"):
            w.backward(gradient())


# Calls that are submitted, and forwards that are kept


def test_arguments_are_copied(folder):
    (x, ids, scores), grad = batch(), gradient()
    with wrapper(folder, tensors=matrices()) as w:
        expected = w.forward(x, ids, scores), *w.backward(grad)
        w.submit_forward(x, ids, scores)
        for array in (x, ids, scores):
            array[...] = 0
        y = w.sync_forward()
        w.submit_backward_async(grad)
        grad[...] = 0
        for found, wanted in zip((y, *w.sync_backward()), expected, strict=True):
            assert same_bits(found, wanted)


def test_a_forward_that_is_given_up(folder):
    first, second = batch(0), batch(1)
    with wrapper(folder, tensors=matrices()) as w:
        expected = w.forward(*second), *w.backward(gradient())
        w.submit_forward(*first)
        w.submit_forward(*second)
        assert same_bits(w.sync_forward(), expected[0])
        with pytest.raises(InputError, match="sync_forward needs a submit_forward before it, found none"):
            w.sync_forward()
        assert same_bits(w.backward(gradient())[0], expected[1])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth(folder, depth):
    """The newest forwards are kept; each serves one backward, the newest first."""
    calls = [batch(seed) for seed in range(3)]
    with wrapper(folder, tensors=matrices(), max_cache_depth=depth) as w:
        expected = []
        for call in calls:
            w.forward(*call)
            expected.append(w.backward(gradient())[0])
        for call in calls:
            w.forward(*call)
            w.forward(*batch(9), save_for_backward=False)
        for number in range(2, 2 - depth, -1):
            assert same_bits(w.backward(gradient())[0], expected[number])
        with pytest.raises(UnavailableError, match="backward needs a forward that was saved for it, found none"):
            w.backward(gradient())


def test_wrong_backwards(folder):
    """What is refused uses nothing up."""
    with wrapper(folder, tensors=matrices()) as w:
        w.forward(*batch())
        with pytest.raises(InputError, match=r"grad_output must have shape \[5, 128\], found \[4, 128\]"):
            w.backward(gradient(0, 4))
        for scale in (0, -1.0, np.inf, np.nan, "half"):
            with pytest.raises(InputError, match="optimizer_grad_scale must be finite and above 0"):
                w.backward(gradient(), optimizer_grad_scale=scale)
        with pytest.raises(InputError, match="grad_output must be floating-point numbers, found int64"):
            w.backward(np.zeros((5, HIDDEN), np.int64))
        w.submit_backward_async(gradient())
        with pytest.raises(UnavailableError, match=r"sync_backward\(\) must come first"):
            w.submit_backward_async(gradient())
        w.sync_backward()
        with pytest.raises(InputError, match="sync_backward needs a submit_backward_async before it, found none"):
            w.sync_backward()


def test_a_backward_that_fails(folder, monkeypatch):
    """No gradient is written, and a new forward is needed."""
    tensors = matrices()
    buffers = dirty(tensors)

    def refused(*_arguments, **_named):
        raise OutOfMemoryError("the system refused memory")

    with wrapper(folder, tensors=tensors, gradients=buffers) as w:
        w.forward(*batch())
        with monkeypatch.context() as patch:
            patch.setattr(Training, "backward", refused)
            with pytest.raises(OutOfMemoryError):
                w.backward(gradient())
        assert all(np.isnan(buffer).all() for buffer in buffers.values())
        with pytest.raises(UnavailableError, match="found none"):
            w.backward(gradient())
        w.forward(*batch())
        w.backward(gradient())
        assert not any(np.isnan(buffer.astype(np.float32)).any() for buffer in buffers.values())


def test_shared_memory_of_gradients(folder):
    """Layers of different ranks in turn; what they share can be given up at any time."""
    small, large = matrices(rank=2), matrices(rank=8)
    buffers, call = (dirty(small), dirty(large)), batch()
    with (
        wrapper(folder, tensors=small, gradients=buffers[0], lora_rank=2) as one,
        wrapper(folder, tensors=large, gradients=buffers[1], lora_rank=8) as other,
    ):
        KTMoEWrapper.clear_sft_buffer_cache()
        for w in (one, other, one):  # it grows
            w.forward(*call)
            w.backward(gradient())
        KTMoEWrapper.clear_sft_buffer_cache()
        other.forward(*call)
        other.backward(gradient())
        for w, tensors, written in ((one, small, buffers[0]), (other, large, buffers[1])):
            training, adapter = Training(w.moe), lora(tensors)
            expected = training.backward(training.forward(*call, adapter)[1], gradient(), adapter)
            for found, wanted in zip(written.values(), rounded(expected.lora), strict=True):
                assert same_bits(found, wanted)


def test_forked(folder):
    """A child has its own queue, and what was kept. What was submitted is the parent's."""
    with wrapper(folder, tensors=matrices()) as w:
        w.forward(*batch())
        w.submit_forward(*batch(1))
        child = os.fork()
        if not child:
            try:
                signal.alarm(60)  # it would wait for its parent's thread for ever
                with pytest.raises(InputError, match="found none"):
                    w.sync_forward()
                w.backward(gradient())
                w.forward(*batch(2))
                w.backward(gradient())
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        w.sync_forward()
