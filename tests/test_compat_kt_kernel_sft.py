"""KTMoEWrapper's mode "sft" on numpy arrays: what it computes, its weights, its kept forwards, and what it refuses."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import BF16, same_bits
from kt_wrappers import batch
from sft_wrappers import (
    ALPHA,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    METHODS,
    RANK,
    SKIPS,
    TOP_K,
    arguments,
    checkpoint,
    dirty,
    experts_of,
    lora,
    matrices,
    wrapper,
)

from ktmoe import MoELayer, load_experts
from ktmoe.compat import methods, weights
from ktmoe.compat.kt_kernel import KTMoEWrapper
from ktmoe.compat.sft import SFTWrapper
from ktmoe.errors import ClosedError, FormatError, InputError, OutOfMemoryError, UnavailableError
from ktmoe.experts import PROJECTIONS
from ktmoe.reference_gradients import ReferenceTraining
from ktmoe.training import Training

pytestmark = pytest.mark.usefixtures("nothing_is_leased")


@pytest.fixture
def nothing_is_leased():
    yield
    gc.collect()
    assert weights.Lease.leased == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint("MXFP4_SFT", tmp_path_factory.mktemp("mxfp4"))


def gradient(seed=0, tokens=5):
    return np.random.default_rng(seed + 100).standard_normal((tokens, HIDDEN)).astype(BF16)


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
        for w in (one, other, one):
            w.forward(*call)
            w.backward(gradient())
            KTMoEWrapper.clear_sft_buffer_cache()
        for w, tensors, written in ((one, small, buffers[0]), (other, large, buffers[1])):
            training, adapter = Training(w.moe), lora(tensors)
            expected = training.backward(training.forward(*call, adapter)[1], gradient(), adapter)
            for found, wanted in zip(written.values(), rounded(expected.lora), strict=True):
                assert same_bits(found, wanted)


def test_forked(folder):
    """A child has its own queue, and what was kept."""
    with wrapper(folder, tensors=matrices()) as w:
        w.forward(*batch())
        w.submit_forward(*batch(1))
        child = os.fork()
        if not child:
            try:
                w.backward(gradient())
                w.forward(*batch(2))
                w.backward(gradient())
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        w.sync_forward()


# Weights


def stacked(experts, kind) -> dict[str, np.ndarray]:
    return {p: np.stack([getattr(experts.matrix(e, p), kind) for e in range(EXPERTS)]) for p in PROJECTIONS}


def check_same(made, expected, call):
    with made as w:
        w.init_lora_weights(*matrices().values(), *dirty(matrices()).values())
        assert same_bits(w.forward(*call), expected.forward(*call))


@pytest.mark.parametrize("physical", [None, np.arange(EXPERTS)[::-1]], ids=["each its own", "reversed"])
def test_tensors_of_a_format(tmp_path, physical):
    """kt-kernel's containers, and bfloat16 tensors for methods that round: as from the checkpoint."""
    call = batch(3)
    for method in ("MXFP4_SFT", "RAWINT4_SFT", "AMXFP8_SFT", "AMXBF16_SFT", "AMXINT8_SFT"):
        folder = checkpoint(method, tmp_path / method)
        experts = load_experts(folder, 0)
        with wrapper(folder, method, matrices()) as expected:
            if physical is not None:
                expected.close()
                expected = KTMoEWrapper(**arguments(weight_path=str(folder), method=method))
                expected.load_weights(physical)
                expected.init_lora_weights(*matrices().values(), *dirty(matrices()).values())
            made = KTMoEWrapper(**arguments(method=method, swiglu_limit=experts.activation.limit or 0.0))
            codes = stacked(experts, "codes")
            if method in ("AMXBF16_SFT", "AMXINT8_SFT"):
                made.load_weights_from_tensors(*codes.values(), physical)
            else:
                scales = stacked(experts, "scales")
                if method == "MXFP4_SFT":
                    scales = {p: (array.astype(np.uint16) << 7).view(BF16) for p, array in scales.items()}
                    given = codes | {f"{p}_scale": array for p, array in scales.items()}
                    made.load_mxfp4_weights(given, physical)
                else:
                    named = {f"{p}_proj": array for p, array in codes.items()} | {f"{p}_scale": scales[p] for p in PROJECTIONS}
                    if method == "RAWINT4_SFT":
                        made.load_rawint4_weights(SimpleNamespace(**named, group_size=32), physical)
                    else:
                        made.load_block_fp8_weights(SimpleNamespace(**named, block_size=(128, 128)), physical)
            check_same(made, expected, call)
            expected.close()


def test_scales_of_mxfp4(tmp_path):
    """A power of two is UE8M0's byte, 2**-127 among them; all else is refused, by its place."""
    experts = load_experts(checkpoint("MXFP4_SFT", tmp_path), 0)
    codes, scales = stacked(experts, "codes"), stacked(experts, "scales")
    given = codes | {f"{p}_scale": (array.astype(np.uint16) << 7) for p, array in scales.items()}
    given["up_scale"][0, 0, 0] = 0x0040
    with KTMoEWrapper(**arguments()) as w:
        w.load_mxfp4_weights(given)
        assert w.moe.export_expert(0)[0]["up"].scales[0, 0] == 0
    for bits in (0, 0x0041, 0x3F81, 0x7F80, 0xBF80):
        given["up_scale"][1, 2, 3] = bits
        w = KTMoEWrapper(**arguments())
        with pytest.raises(InputError, match=r"layer 0.1.up scales \[2, 3\] must be a power of two, found"):
            w.load_mxfp4_weights(given)
    del given["up_scale"]
    with pytest.raises(InputError, match="experts_data must have gate, gate_scale, up, up_scale, down, down_scale, found"):
        w.load_mxfp4_weights(given)


def test_wrong_tensors(tmp_path):
    experts = load_experts(checkpoint("RAWINT4_SFT", tmp_path), 0)
    codes, scales = stacked(experts, "codes"), stacked(experts, "scales")
    named = {f"{p}_proj": array for p, array in codes.items()} | {f"{p}_scale": scales[p] for p in PROJECTIONS}
    w = KTMoEWrapper(**arguments(method="RAWINT4_SFT"))
    for changed, message in (
        ({"up_scale": scales["up"][:5]}, r"weights and scales must be of as many experts each, found \[5, 8\]"),
        ({"gate_scale": scales["gate"].astype(np.float32)}, "layer 0.0.gate scales must be bfloat16, found float32"),
        ({"down_proj": codes["down"].astype(np.int32)}, "layer 0.0.down codes must be bytes of two dimensions, found int32"),
        ({"group_size": 0}, "group_size must be a whole number, 1 or more, found 0"),
    ):
        given = SimpleNamespace(**({"group_size": 32} | named | changed))
        with pytest.raises(InputError, match=message):
            w.load_rawint4_weights(given)
    assert w.moe is None
    w = KTMoEWrapper(**arguments(method="AMXFP8_SFT"))
    with pytest.raises(FormatError, match="method 'AMXFP8_SFT' expects E4M3 with a scale per 128 x 128, found"):
        w.load_rawint4_weights(SimpleNamespace(**named, group_size=32))


def test_weights_are_loaded_once(folder):
    with wrapper(folder) as w:
        layer = w.moe
        w.load_weights()
        assert w.moe is layer
        tensors = [np.zeros((EXPERTS, n, k), BF16) for n, k in ((128, 128),) * 3]
        with pytest.raises(UnavailableError, match="its weights are frozen"):
            w.load_weights_from_tensors(*tensors)


# What is refused, and what callers look at


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"full_weight_grad": True}, UnavailableError, "full_weight_grad: packed weights are frozen"),
        ({"lora_dropout": 0.1}, UnavailableError, r"lora_dropout must be 0: experts have no dropout, as in PEFT; found 0\.1"),
        ({"num_gpu_experts": 2}, UnavailableError, "the CPU computes all experts"),
        ({"gpu_experts_mask": np.ones(EXPERTS, bool)}, UnavailableError, "the CPU computes all experts"),
        ({"lora_rank": 0}, InputError, "lora_rank must be a whole number, from 1 to 256, found 0"),
        ({"lora_rank": 257}, InputError, "lora_rank must be a whole number, from 1 to 256, found 257"),
        ({"lora_alpha": 0.0}, InputError, r"lora_alpha must be finite and above 0, found 0\.0"),
        ({"lora_alpha": float("nan")}, InputError, "lora_alpha must be finite and above 0, found nan"),
        ({"max_cache_depth": 0}, InputError, "max_cache_depth must be a whole number, 1 or more, found 0"),
        ({"hidden_size": 0}, InputError, "hidden_size must be"),
        ({"method": "MXFP4"}, InputError, "method must be one of AMXBF16_SFT, .* in mode 'sft', found 'MXFP4'"),
    ],
)
def test_wrong_arguments(changed, kind, message):
    with pytest.raises(kind, match=message):
        KTMoEWrapper(**arguments(**changed))


def test_methods():
    """Sixteen, of which kt-kernel has no class for four; a fifth is there for us alone."""
    assert set(methods.TUNED) == {*METHODS, *SKIPS}
    assert len(methods.MODES["sft"]) == len(set(methods.MODES["sft"])) == 16
    for method in ("AMXINT4_1_SFT", "AMXINT4_1_SFT_SkipLoRA", "AMXINT4_1KGroup_SFT", "AMXINT4_1KGroup_SFT_SkipLoRA"):
        message = f"method '{method}': kt-kernel 0.7.2 lists it and has no class for it, .*; what works in mode 'sft' is"
        with pytest.raises(UnavailableError, match=message):
            KTMoEWrapper(**arguments(method=method))


def test_full_fine_tuning(folder):
    with wrapper(folder) as w:
        for call in (w.update_base_weights, lambda: w.init_full_weight_grad_buffers(None, None, None)):
            with pytest.raises(UnavailableError, match="packed weights are frozen"):
                call()
        assert (w._full_weight_grad, w.gate_proj_buf) == (False, None)


def test_wrong_order(folder):
    tensors, call = matrices(), batch()
    w = KTMoEWrapper(**arguments())
    with pytest.raises(InputError, match=r"load_weights\(\) must come first, found no weights"):
        w.forward(*call)
    with pytest.raises(InputError, match="load_weights needs weight_path"):
        w.load_weights()
    w = wrapper(folder)
    with pytest.raises(InputError, match=r"init_lora_weights\(\) must come first, found no adapter"):
        w.forward(*call)
    with pytest.raises(InputError, match=r"init_lora_weights\(\) must come first, found no adapter"):
        w.update_lora_weights()
    w.init_lora_weights(*tensors.values(), *dirty(tensors).values())
    w.forward(*call)
    w.close()
    w.close()
    for closed in (lambda: w.forward(*call), lambda: w.backward(gradient())):
        with pytest.raises(ClosedError):
            closed()
    with pytest.raises(ClosedError):
        w.load_weights()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate_lora_a", lambda t: t[:, :2], r"gate_lora_a must have shape \[8, 4, 128\], found \[8, 2, 128\]"),
        ("down_lora_b", lambda t: t.astype(np.float64), "down_lora_b must be .*; found an array of float64"),
        ("up_lora_a", lambda t: np.asfortranarray(t), "up_lora_a must be contiguous"),
        ("grad_up_lora_b", lambda t: t[:5], r"grad_up_lora_b must have shape \[8, 128, 4\], found \[5, 128, 4\]"),
        ("grad_up_lora_b", lambda t: np.broadcast_to(t[:1], t.shape), "grad_up_lora_b must be contiguous"),
        ("grad_down_lora_a", lambda t: np.frombuffer(t.tobytes(), BF16).reshape(t.shape), "grad_down_lora_a must be writeable"),
    ],
)
def test_wrong_adapters(folder, name, change, message):
    tensors = matrices()
    given = tensors | {f"grad_{name}": buffer for name, buffer in dirty(tensors).items()}
    with wrapper(folder) as w:
        with pytest.raises(InputError, match=message):
            w.init_lora_weights(**given | {name: change(given[name])})
        assert not w._lora_initialized
        w.init_lora_weights(**given)
        assert w.grad_up_lora_b is given["grad_up_lora_b"]


def test_what_callers_look_at(folder):
    """kt-kernel's torch layers read these, and call the rest."""
    w = KTMoEWrapper(**arguments(max_cache_depth=2))
    assert isinstance(w, SFTWrapper)
    assert (w.mode, w.method, w.lora_rank, w.lora_alpha, w.lora_scaling) == ("sft", "MXFP4_SFT", RANK, ALPHA, ALPHA / RANK)
    assert (w.max_cache_depth, w.hidden_size, w.moe_intermediate_size, w.num_gpu_experts) == (2, HIDDEN, INTERMEDIATE, 0)
    assert (w._weights_loaded, w._lora_initialized, w._cache_depth, w._is_skip_lora) == (False, False, 0, False)
    assert (w._uses_authoritative_optimizer_grads, w.authoritative_optimizer_grads) == (True, ())
    assert (w.reuse_checkpoint_forward, w.share_backward_bb, w.moe) == (False, False, None)
    w.submit_backward_repack()
    w.wait_backward_repack()
    assert not KTMoEWrapper(**arguments(method="AMXINT4_SFT"))._uses_authoritative_optimizer_grads
    assert w.cpu_infer is KTMoEWrapper(**arguments()).cpu_infer
    named = {key: value for key, value in arguments().items() if key not in ("mode", "gpu_experts_mask")}
    assert SFTWrapper(*[named.pop(key) for key in list(named)[:6]], **named).num_experts == EXPERTS


# The output of a checkpointed forward


def test_an_output_is_kept():
    w, y = KTMoEWrapper(**arguments()), np.ones((5, HIDDEN), BF16)
    w.validate_checkpoint_cache_empty()
    with pytest.raises(UnavailableError, match="no output of a checkpointed forward is kept"):
        w.get_checkpoint_output(5)
    w.cache_checkpoint_output(y, 4)
    assert (w.checkpoint_cache_state, w._kt_has_cached_forward) == ("READY", True)
    assert same_bits(w.get_checkpoint_output(4), y[:4])
    w.clear_checkpoint_output()
    assert (w.checkpoint_cache_state, w._kt_has_cached_forward) == ("EMPTY", False)
    w.validate_checkpoint_cache_empty()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda w, y: w.get_checkpoint_output(4), "expected the kept output of 4 tokens, found that of 5"),
        (lambda w, y: w.validate_checkpoint_cache_empty(), "found one that is kept"),
        (lambda w, y: w.cache_checkpoint_output(y, 5), "an output is kept already"),
        (lambda w, y: w.clear_checkpoint_output() or w.cache_checkpoint_output(y, 6), "must have at least 6 rows, found 5"),
    ],
)
def test_poison(wrong, message):
    """After an error nothing is kept or given any more, and it says why."""
    w, y = KTMoEWrapper(**arguments()), np.ones((5, HIDDEN), BF16)
    w.cache_checkpoint_output(y, 5)
    with pytest.raises((UnavailableError, InputError), match=message):
        wrong(w, y)
    assert w.checkpoint_cache_state == "POISONED"
    w.clear_checkpoint_output()
    for call in (
        lambda: w.cache_checkpoint_output(y, 5),
        lambda: w.get_checkpoint_output(5),
        w.validate_checkpoint_cache_empty,
    ):
        with pytest.raises(UnavailableError, match="is poisoned: "):
            call()
