"""KTMoEWrapper's mode "sft": what it refuses, what callers look at, and the output that a checkpointed layer keeps."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import BF16, same_bits, unaligned
from kt_wrappers import batch
from sft_wrappers import (
    ALPHA,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    METHODS,
    RANK,
    SKIPS,
    arguments,
    checkpoint,
    dirty,
    gradient,
    matrices,
    wrapper,
)

from ktmoe.compat import methods
from ktmoe.compat.kt_kernel import KTMoEWrapper
from ktmoe.compat.sft import SFTWrapper
from ktmoe.errors import ClosedError, InputError, UnavailableError

pytestmark = pytest.mark.usefixtures("nothing_is_leased")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint("MXFP4_SFT", tmp_path_factory.mktemp("mxfp4"))


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
    assert w._cache_depth == 1
    w.close()
    w.close()
    assert w._cache_depth == 0
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
        ("up_lora_a", lambda t: np.asfortranarray(t), "up_lora_a must be C-contiguous and aligned"),
        ("up_lora_b", unaligned, "up_lora_b must be C-contiguous and aligned; found .* aligned False"),
        ("grad_up_lora_b", unaligned, "grad_up_lora_b must be C-contiguous, aligned and writeable; found .* aligned False"),
        ("grad_up_lora_b", lambda t: t[:5], r"grad_up_lora_b must have shape \[8, 128, 4\], found \[5, 128, 4\]"),
        ("grad_up_lora_b", lambda t: np.broadcast_to(t[:1], t.shape), "grad_up_lora_b must be C-contiguous, aligned and"),
        (
            "grad_down_lora_a",
            lambda t: np.frombuffer(t.tobytes(), BF16).reshape(t.shape),
            "grad_down_lora_a must be .* writeable F",
        ),
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
