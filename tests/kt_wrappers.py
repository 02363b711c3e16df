"""What the tests of KTMoEWrapper share: wrappers on small checkpoints, and a check that nothing of them is left."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from helpers import BF16

from ktmoe import synthetic
from ktmoe.compat import weights
from ktmoe.compat.engine import ENGINE
from ktmoe.compat.kt_kernel import KTMoEWrapper

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 4, 128, 128
REVERSED = np.arange(EXPERTS)[::-1]
WRITERS = {"MXFP4": synthetic.write_deepseek_v4, "RAWINT4": synthetic.write_kimi_k2, "BF16": synthetic.write_qwen3}


def write(method, folder, layers=1, **more):
    """A checkpoint that this method reads."""
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K}
    WRITERS[method](folder, **sizes, layers=layers, **more)
    return folder


def arguments(**changed) -> dict:
    """The arguments that SGLang gives."""
    return {
        "layer_idx": 0,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "gpu_experts_mask": None,
        "cpuinfer_threads": 2,
        "threadpool_count": 2,
        "weight_path": "",
        "chunked_prefill_size": 4,
        "method": "MXFP4",
        "max_deferred_experts_per_token": 0,
    } | changed


@pytest.fixture(scope="module", params=WRITERS)
def checkpoint(request, tmp_path_factory):
    """A method, and a checkpoint that it reads."""
    return request.param, write(request.param, tmp_path_factory.mktemp(request.param), layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write("MXFP4", tmp_path_factory.mktemp("mxfp4"), layers=3)


def wrapper(folder, layer=0, physical=None, **changed) -> KTMoEWrapper:
    """A wrapper with its weights."""
    made = KTMoEWrapper(**arguments(weight_path=str(folder), layer_idx=layer, **changed))
    made.load_weights(np.arange(made.num_experts) if physical is None else physical)
    return made


def batch(seed=0, tokens=5, top_k=TOP_K, experts=EXPERTS):
    """x, ids, weights as SGLang has them: a token's experts are different, some slots are padding."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, HIDDEN)).astype(BF16)
    ids = np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)], np.int64).reshape(tokens, top_k)
    return x, ids, rng.random((tokens, top_k), np.float32)


@pytest.fixture
def nothing_is_left():
    """Each test closes or drops its wrappers and graphs. Then no checkpoint is open, no layer known, and no graph."""
    yield
    gc.collect()
    KTMoEWrapper.set_capture_batch_sizes([])
    KTMoEWrapper.clear_buffer_cache()
    assert weights.Lease.leased == {}
    assert ENGINE.passes.layers == {}
    assert ENGINE.passes.pending == {}
    gone = eventually(lambda: (ENGINE.captures.settle(), ENGINE.captures.live == {})[1])
    ENGINE.captures.live.clear()  # a test that failed keeps its graphs, which are no other one's
    assert gone


def eventually(condition, seconds=10) -> bool:
    """Whether it is so before long: CUDA calls destructors on a thread of its own."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.001)
    return bool(found)
