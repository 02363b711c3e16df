"""What the tests of MoEModel share: a small model, one that is half loaded, and a check that nothing of it is left."""

import gc
import os
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from helpers import same_bits

from ktmoe import MoELayer, MoEModel, synthetic
from ktmoe import model as model_module
from ktmoe.experts import PROJECTIONS

LAYERS, EXPERTS = 5, 4


def write_model(folder):
    """Five small layers and an MTP layer in several files."""
    sizes = {"num_experts": EXPERTS, "hidden": 128, "intermediate": 64}
    synthetic.write_deepseek_v4(folder, layers=LAYERS, mtp_layers=1, shard_bytes=1 << 16, **sizes)
    return folder


@pytest.fixture
def nothing_left():
    """Check after the test that there is no thread of ours, and no descriptor more than before."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert own_threads() == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def own_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("ktmoe-load", "ktmoe-read"))]


def wait_for_threads():
    """Wait until our threads have ended, which a finalizer does not."""
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
