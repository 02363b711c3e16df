"""Which experts see which tokens, with which weight, and in which order their outputs are added."""

import sys
import threading

import numpy as np
import pytest
from helpers import BF16, assert_right, bits, random_batch, random_experts, same_bits

from ktmoe import MoELayer
from ktmoe._native import core

NUM_EXPERTS = 5


@pytest.fixture(scope="module")
def experts():
    return random_experts(np.random.default_rng(1), NUM_EXPERTS, 64, 64)


@pytest.fixture(scope="module")
def layer(backend, experts):
    with MoELayer(experts, backend) as layer:
        yield layer


@pytest.fixture(autouse=True)
def every_expert(layer):
    layer.expert_mask = np.ones(NUM_EXPERTS, bool)


@pytest.mark.parametrize("reduce_slots", [0, 10**9])
def test_outputs_are_added_in_ascending_expert_then_slot_order(layer, experts, reduce_slots):
    """Bit for bit: y starts at zero; each product r * d and each sum is rounded to float32."""
    rng = np.random.default_rng(2)
    core.tune(reduce_slots=reduce_slots)
    x, _, weights = random_batch(rng, experts, 12, 6, np.float32)
    ids = rng.integers(-1, NUM_EXPERTS + 1, (12, 6))
    one = np.ones((12, 1), np.float32)
    d = [layer.forward(x, np.full((12, 1), expert), one) for expert in range(NUM_EXPERTS)]
    expected = np.zeros_like(x)
    for token, (its_ids, its_weights) in enumerate(zip(ids, weights, strict=True)):
        for slot in np.argsort(its_ids, kind="stable"):
            if 0 <= its_ids[slot] < NUM_EXPERTS:
                expected[token] += its_weights[slot] * d[its_ids[slot]][token]
    assert same_bits(layer.forward(x, ids, weights), expected)
    assert same_bits(layer.forward(x.astype(BF16), ids, weights), expected.astype(BF16))


SKIPPED = {
    np.int64: [-1, NUM_EXPERTS, -(2**63), 2**63 - 1, 2**32, 2**32 + 1, -(2**32)],
    np.int32: [-1, NUM_EXPERTS, -(2**31), 2**31 - 1],
    np.int16: [-1, NUM_EXPERTS, -(2**15), 2**15 - 1],
    np.int8: [-1, NUM_EXPERTS, -128, 127],
    np.uint64: [2**64 - 1, NUM_EXPERTS, 2**63, 2**63 + 1, 2**32, 2**32 + 1],
    np.uint32: [2**32 - 1, NUM_EXPERTS, 2**31],
    np.uint16: [2**16 - 1, NUM_EXPERTS],
    np.uint8: [255, NUM_EXPERTS, 128],
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", SKIPPED, ids=lambda dtype: dtype.__name__)
def test_ids_out_of_range_add_zero(layer, experts, dtype):
    rng = np.random.default_rng(3)
    skipped = np.array(SKIPPED[dtype], dtype)
    x, _, weights = random_batch(rng, experts, len(skipped), 3)
    ids = np.array([[id_, 2, id_] for id_ in skipped.tolist()], dtype)
    assert same_bits(layer.forward(x, ids, weights), layer.forward(x, ids[:, 1:2], weights[:, 1:2]))
    assert not bits(layer.forward(x, ids[:, :1], weights[:, :1])).any()
    assert_right(layer, experts, x, ids, weights)


def test_the_last_expert_is_within_range(layer, experts):
    for dtype in SKIPPED:
        x, _, weights = random_batch(np.random.default_rng(4), experts, 2, 1)
        y = assert_right(layer, experts, x, np.full((2, 1), NUM_EXPERTS - 1, dtype), weights)
        assert bits(y).all()


def test_no_expert_selected(layer, experts):
    x, _, weights = random_batch(np.random.default_rng(5), experts, 9, 4)
    for dtype in (BF16, np.float32):
        y = layer.forward(x.astype(dtype), np.full((9, 4), -1), weights, out=np.full((9, 64), np.nan, dtype))
        assert not bits(y).any()


def test_a_repeated_id_counts_as_often_as_it_stands_there(layer, experts):
    x, _, weights = random_batch(np.random.default_rng(6), experts, 4, 3, np.float32)
    ids = np.array([[1, 1, 1], [3, 0, 3], [2, 2, 4], [0, 0, 0]])
    assert_right(layer, experts, x, ids, weights)
    once = layer.forward(x, ids[:, :1], np.ones((4, 1), np.float32))
    thrice = layer.forward(x, np.tile(ids[:, :1], 4), np.ones((4, 4), np.float32))
    assert same_bits(thrice, 4 * once)


def test_expert_ids_of_every_dtype_agree(layer, experts):
    x, ids, weights = random_batch(np.random.default_rng(7), experts, 6, 3)
    y = layer.forward(x, ids, weights)
    for dtype in (*SKIPPED, ">i8", ">u2"):
        assert same_bits(layer.forward(x, ids.astype(dtype), weights), y)


# expert_mask


def test_masked_experts_are_skipped(layer, experts):
    x, ids, weights = random_batch(np.random.default_rng(8), experts, 20, 3)
    everything = layer.forward(x, ids, weights)
    for masked in ([2], [0, 4], range(NUM_EXPERTS)):
        layer.expert_mask[:] = True
        layer.expert_mask[list(masked)] = False
        y = assert_right(layer, experts, x, ids, weights)
        assert same_bits(y, layer.forward(x, np.where(np.isin(ids, masked), -1, ids), weights))
        assert not same_bits(y, everything)
    layer.expert_mask[:] = True
    assert same_bits(layer.forward(x, ids, weights), everything)


def test_the_mask_may_be_replaced_and_need_not_be_contiguous(layer, experts):
    x, ids, weights = random_batch(np.random.default_rng(9), experts, 6, 3)
    layer.expert_mask[1:3] = False
    expected = layer.forward(x, ids, weights)
    spread = np.zeros((NUM_EXPERTS, 3), bool)
    spread[:, 1] = layer.expert_mask
    layer.expert_mask = spread[:, 1]
    assert same_bits(layer.forward(x, ids, weights), expected)
    reversed_ = layer.expert_mask[::-1].copy()
    layer.expert_mask = reversed_[::-1]
    assert same_bits(layer.forward(x, ids, weights), expected)


def test_a_masked_expert_may_leave_only_its_own_share_out(layer, experts):
    """float32 sums show it exactly: no other expert's part changes."""
    x, _, _ = random_batch(np.random.default_rng(10), experts, 3, 1, np.float32)
    ids, weights = np.tile([0, 3], (3, 1)), np.ones((3, 2), np.float32)
    layer.expert_mask[0] = False
    assert same_bits(layer.forward(x, ids, weights), layer.forward(x, np.full((3, 1), 3), weights[:, :1]))


@pytest.mark.cover("any backend")
@pytest.mark.parametrize("scratch_bytes", [256 << 20, 1], ids=["at once", "in chunks"])
def test_the_mask_is_read_once_when_a_call_begins(layer, experts, is_emulated, scratch_bytes):
    """Another thread changes it all the time: a call sees all of one state, however many chunks it takes."""
    core.tune(scratch_bytes=scratch_bytes)
    tokens = 20 if is_emulated else 100
    x = np.tile(random_batch(np.random.default_rng(11), experts, 1, 1)[0], (tokens, 1))
    ids, weights = np.tile([1, 2], (tokens, 1)), np.ones((tokens, 2), np.float32)
    states = []
    for mask in ([True, True], [False, True]):
        layer.expert_mask[1:3] = mask
        states.append(layer.forward(x, ids, weights).tobytes())
    stop = threading.Event()

    def flip():
        while not stop.is_set():
            layer.expert_mask[1] ^= True

    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 50)  # or each call would wait so long for a thread that never rests
    thread = threading.Thread(target=flip)
    thread.start()
    try:
        mixed = [layer.forward(x, ids, weights).tobytes() not in states for _ in range(10)]
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not any(mixed)
