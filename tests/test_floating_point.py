"""NaN and infinity stay with their token; the caller's floating-point state neither matters nor changes."""

import ctypes
import ctypes.util
from contextlib import contextmanager

import numpy as np
import pytest
from helpers import BF16, DEEPSEEK, WEIGHTS, bits, random_batch, random_experts, same_bits

from ktmoe import MoELayer, set_num_threads
from ktmoe._native import core
from ktmoe.experts import ROUTER_WEIGHTS

NAN, INF = np.nan, np.inf


@pytest.fixture(
    scope="module",
    params=[
        "folded",
        "unfolded",
        "int4-32",
        "int4-128",
        "b16",
        "all three",
        "gptq-32",
        "nvfp4",
        "mxfp8",
        "fp8",
        "fp8-row",
        "int8-row",
    ],
)
def experts(request):
    return random_experts(np.random.default_rng(1), 3, 100, 64, activation=DEEPSEEK, **WEIGHTS[request.param])


@pytest.mark.cover("values")
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("tokens", [2, 6, 20])
def test_nan_and_infinity_touch_only_their_own_token(backend, experts, router_weight, tokens):
    rng = np.random.default_rng(2)
    x, _, weights = random_batch(rng, experts, tokens, 2)
    ids = np.tile([0, 2], (tokens, 1))
    bad = tokens // 2
    with MoELayer(experts, backend, router_weight=router_weight) as layer:
        clean = layer.forward(x, ids, weights)
        for value in (NAN, INF, -INF):
            for spoil in (x, weights):
                kept = spoil[bad].copy()
                for at in (0, spoil.shape[1] - 1):
                    spoil[bad, at] = value
                    for reduce_slots in (0, 10**9):
                        core.tune(reduce_slots=reduce_slots)
                        y = layer.forward(x, ids, weights)
                        assert same_bits(np.delete(y, bad, 0), np.delete(clean, bad, 0))
                        assert not np.isfinite(y[bad].astype(np.float32)).any()
                        if np.isnan(value) or (layer.activations != "bf16" and spoil is x):
                            assert np.isnan(y[bad].astype(np.float32)).all()  # integers know no infinity
                    spoil[bad] = kept
        assert same_bits(layer.forward(x, ids, weights), clean)


@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_a_skipped_slot_is_zero_even_where_x_and_weight_are_nan(backend, experts, dtype):
    x, ids, weights = random_batch(np.random.default_rng(3), experts, 3, 2, dtype)
    x[1], weights[1], ids[1] = NAN, NAN, [-1, 3]
    with MoELayer(experts, backend) as layer:
        y = layer.forward(x, ids, weights)
    assert not bits(y[1]).any()
    assert np.isfinite(y.astype(np.float32)).all()


@pytest.mark.cover("values")
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
def test_what_earlier_calls_left_in_the_scratch_does_not_matter(backend, experts, router_weight):
    """NaN everywhere, from a layer of other sizes: padding that nobody wrote would make of it NaN times zero."""
    rng = np.random.default_rng(7)
    other = random_experts(rng, 3, 192, 160)
    poison = np.full((24, 192), NAN, np.float32), *random_batch(rng, other, 24, 2)[1:]
    with MoELayer(other, backend) as poisoner, MoELayer(experts, backend, router_weight=router_weight) as layer:
        for tokens, dtype in ((1, BF16), (7, np.float32), (15, BF16)):
            batch = random_batch(rng, experts, tokens, 2, dtype)
            clean = layer.forward(*batch)
            assert np.isfinite(clean.astype(np.float32)).all()
            poisoner.forward(*poison)
            assert same_bits(layer.forward(*batch), clean)


@pytest.mark.cover("values")
def test_every_nan_is_still_nan_when_rounded(backend, experts):
    """Also the ones whose payload lies in the bits that bfloat16 cuts off: they must not become infinity."""
    x, ids, weights = random_batch(np.random.default_rng(4), experts, 4, 1, np.float32)
    x[:, 5] = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    with MoELayer(experts, backend) as layer:
        assert np.isnan(layer.forward(x, ids, weights)).all()


@pytest.mark.cover("values")
def test_an_output_beyond_bfloat16_is_infinite(backend, experts):
    x, ids, _ = random_batch(np.random.default_rng(5), experts, 4, 1)
    x *= BF16.type(4)
    with MoELayer(experts, backend) as layer:
        weights = np.array([[2.0**120], [2.0**120], [2.0**127], [2.0**127]], np.float32)
        y = layer.forward(x.astype(np.float32), ids, weights)
        rounded = layer.forward(x, ids, weights)
    with np.errstate(over="ignore"):
        assert same_bits(rounded, y.astype(BF16))
    for values in (y, rounded.astype(np.float32)):
        assert np.isinf(values).any()
        assert np.isfinite(values).any()
        assert not np.isnan(values).any()


# The caller's MXCSR

MXCSR_AT = 28  # in glibc's fenv_t on x86-64
DEFAULT, FLAGS = 0x1F80, 0x3F
WEIRD = {
    "flush to zero": DEFAULT | 0x8000,
    "denormals are zero": DEFAULT | 0x40,
    "both": DEFAULT | 0x8040,
    "round down": DEFAULT | 0x2000,
    "round up": DEFAULT | 0x4000,
    "round towards zero": DEFAULT | 0x6000,
}


class FloatingPoint:
    """The calling thread's MXCSR, through the C library."""

    def __init__(self):
        self.libm = ctypes.CDLL(ctypes.util.find_library("m"))

    def read(self) -> int:
        state = ctypes.create_string_buffer(32)
        assert self.libm.fegetenv(state) == 0
        return int.from_bytes(state[MXCSR_AT : MXCSR_AT + 4], "little")

    @contextmanager
    def set(self, mxcsr):
        old = ctypes.create_string_buffer(32)
        assert self.libm.fegetenv(old) == 0
        new = ctypes.create_string_buffer(old.raw, 32)
        new[MXCSR_AT : MXCSR_AT + 4] = mxcsr.to_bytes(4, "little")
        assert self.libm.fesetenv(new) == 0
        try:
            yield
        finally:
            self.libm.fesetenv(old)


@pytest.mark.parametrize("mxcsr", WEIRD.values(), ids=WEIRD.keys())
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("weights", [WEIGHTS[name] for name in ("folded", "int4-64", "b16")], ids=["folded", "int4", "b16"])
def test_the_callers_floating_point_state(backend, weights, mxcsr, threads):
    """Same bits under every state, and the state is what it was. Outputs include denormals, which flushing would lose."""
    rng = np.random.default_rng(6)
    experts = random_experts(rng, 2, 100, 64, scales=(100, 124), **weights)
    x, ids, weights = random_batch(rng, experts, 16, 2, np.float32)
    weights[:4] *= np.float32(2.0**-126)
    floating_point = FloatingPoint()
    with MoELayer(experts, backend) as layer:
        set_num_threads(threads + 1)
        expected = layer.forward(x, ids, weights)
        expected_bf16 = layer.forward(x.astype(BF16), ids, weights)
        with floating_point.set(mxcsr):
            set_num_threads(threads)  # workers that start now inherit the state
            y = layer.forward(x, ids, weights)
            y_bf16 = layer.forward(x.astype(BF16), ids, weights)
            after = floating_point.read()
            job = layer.submit(x, ids, weights).result()
    assert after & ~FLAGS == mxcsr
    assert same_bits(y, expected)
    assert same_bits(job, expected)
    assert same_bits(y_bf16, expected_bf16)
    magnitude = np.abs(expected[:4])
    assert ((magnitude > 0) & (magnitude < 2.0**-126)).any()
    assert np.abs(x).min() > 2.0**-126
