"""What KTMoEWrapper does with CUDA streams that are not captured, on a stand-in for torch and CUDA (fake_cuda/).

It shows the order of copies, events and tasks, also where there is no GPU. That torch itself takes these calls is for
test_compat_kt_kernel_torch.py, on a machine that has one.
"""

import numpy as np
import pytest
from fake_cuda import runtime as kernels
from helpers import same_bits
from kt_graphs import on_device, value
from kt_wrappers import EXPERTS, batch, wrapper

from ktmoe import MoELayer
from ktmoe.compat.engine import ENGINE
from ktmoe.compat.kt_kernel import KTMoEWrapper

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def torch(fake_torch):
    return fake_torch


@pytest.fixture(scope="module")
def layer(folder):
    with MoELayer.from_checkpoint(folder, 0) as made:
        yield made


@pytest.mark.parametrize("given", ["none", "zero", "number", "object"])
def test_copies_are_in_the_callers_stream(torch, folder, layer, given):
    """Work that was in the stream before submit_forward() counts, and what comes after it does not."""
    case, side = batch(), torch.cuda.Stream()
    used = torch.cuda.default_stream() if given in ("none", "zero") else side
    stream = {"none": None, "zero": 0, "number": side.cuda_stream, "object": side}[given]
    x, ids, scores = on_device(torch, case)

    def negate():
        with torch.cuda.stream(used):
            torch.launch(kernels.NEGATE_BF16, x, x)

    with wrapper(folder) as w:
        with torch.held(used):
            negate()
            w.submit_forward(x, ids, scores, stream)
            negate()
        with torch.held(used):
            y = w.sync_forward(None, stream)
            assert (y.device.type, y.dtype) == ("cuda", torch.bfloat16)
            assert (y.array.view(np.uint8) == 0xFF).all()  # nothing waited for the copy back
    assert same_bits(value(y), layer.forward(np.negative(case[0]), *case[1:]))


@pytest.mark.parametrize("captured", [[], [5]])
def test_a_result_is_not_overwritten_before_it_is_copied(torch, folder, layer, captured):
    """Calls of one slot on two streams, of which the first gets to its copy last."""
    KTMoEWrapper.set_capture_batch_sizes(captured)
    cases = [batch(seed) for seed in range(6)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    with wrapper(folder) as w:
        results = []
        for turn, case in enumerate(cases):
            stream = streams[turn % 2]
            w.submit_forward(*on_device(torch, case), stream)
            torch.delay(stream, 5)
            y = w.sync_forward(None, stream)
            if captured:
                assert same_bits(value(y), layer.forward(*case))
            results.append(y)
        if captured:
            assert len({id(y) for y in results}) == 1
        else:
            for y, case in zip(results, cases, strict=True):
                assert same_bits(value(y), layer.forward(*case))
    assert len(ENGINE.pool.kept) == len(captured)  # one slot's were enough all the time


def test_deferral(torch, folder):
    """As on the host."""
    host = [wrapper(folder, index, max_deferred_experts_per_token=d) for index, d in enumerate((2, 2, 0))]
    expected = [w.forward(*batch(index, 2)) for index, w in enumerate(host)]
    stream = torch.cuda.Stream()
    for index, w in enumerate(host):
        w.submit_forward(*on_device(torch, batch(index, 2)), stream)
        assert same_bits(value(w.sync_forward(None, stream)), expected[index])
        w.close()


def test_the_mask_counts_at_submission(torch, folder, layer):
    case = batch()
    with wrapper(folder) as w:
        w.gpu_experts_mask[:3] = True
        w.submit_forward(*on_device(torch, case), 0)
        w.gpu_experts_mask[:] = True
        y = w.sync_forward(None, 0)
    assert EXPERTS > 3
    assert same_bits(value(y), layer.forward(case[0], np.where(case[1] < 3, -1, case[1]), case[2]))
