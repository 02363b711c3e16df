"""KTMoEWrapper's method LLAMAFILE: kt-kernel's own on the GGUF files that ktmoe reads. Where tools/test_kt_kernel.py has it."""

from __future__ import annotations

import numpy as np
import pytest
import rounding
from cases import EXPERTS, ON_GPU, TOP_K
from helpers import BF16
from original import Original, needed

from ktmoe import load_experts
from ktmoe.compat.kt_kernel import KTMoEWrapper
from ktmoe.synthetic import write_gguf

pytestmark = needed
SIZE, LAYERS = 512, 2
#: Types, and of how many k of x and h kt-kernel makes integers of 8 bits with one scale.
TYPES = {"Q4_0": 32, "Q5_0": 32, "Q8_0": 32, "Q2_K": 256, "Q4_K_M": 256, "Q6_K": 256, "IQ4_XS": 256, "BF16": None, "F16": None}
#: An fp16 scale is off by 2**-11, and the largest integer by 127 / 2**11, 1/16 of a step: half a step becomes 9/16.
ROUNDED_SCALE = 9 / 8


@pytest.mark.smoke("one")
@pytest.mark.parametrize("types", TYPES)
def test_both_read_the_same_weights(tmp_path, types):
    """Each stays within the bound of its own roundings of the same real numbers: prefill and decode, two layers of one file."""
    folder = tmp_path / "model"
    write_gguf(folder, types=types, num_experts=EXPERTS, hidden=SIZE, intermediate=SIZE, layers=LAYERS, top_k=TOP_K)
    keywords = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "hidden_size": SIZE,
        "moe_intermediate_size": SIZE,
        "cpuinfer_threads": 2,
        "threadpool_count": 1,
        "numa_nodes": [0],
        "weight_path": str(folder / "model.gguf"),
        "chunked_prefill_size": 64,
        "method": "LLAMAFILE",
        "swiglu_limit": 0.0,
    }
    original, rng, calls = Original(), np.random.default_rng(7), []
    for layer in range(LAYERS):
        original.wrapper(name=str(layer), mask=ON_GPU, logical=np.arange(EXPERTS), layer_idx=layer, **keywords)
        for tokens in (1, 17):
            x = rng.standard_normal((tokens, SIZE)).astype(BF16)
            ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
            weights = rng.random((tokens, TOP_K), np.float32)
            calls.append((layer, f"{layer} {tokens}", x, ids, weights))
            original.call(wrapper=str(layer), x=x, ids=ids, weights=weights, out=calls[-1][1])
    answer = original.run(tmp_path)
    for layer, name, x, ids, weights in calls:
        experts = load_experts(folder, layer)
        roundings = rounding.Roundings(sums=False, int8_group=TYPES[types])
        real = rounding.forward(experts, x, ids, weights, roundings, exact=True, skip=ON_GPU)
        theirs = answer[name].view(BF16).astype(np.float64)
        assert (np.abs(theirs - real.y) <= ROUNDED_SCALE * real.bound).all(), name
        assert np.abs(theirs - real.y).mean() < 0.1 * np.abs(real.y).mean()  # the bound is for the worst of all roundings
        with KTMoEWrapper(layer_idx=layer, gpu_experts_mask=ON_GPU, **keywords) as wrapper:
            wrapper.load_weights()
            ours = wrapper.forward(x, ids, weights).astype(np.float64)
        exact = rounding.forward(experts, x, ids, weights, rounding.KTMOE, exact=True, skip=ON_GPU)
        assert (np.abs(ours - exact.y) <= exact.bound).all(), name
