"""Layers on several NUMA nodes, which this machine need not have: their bits, their threads, their memory, their limits."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from exact import down_layer, forward, odd_scales, random_codes, random_factor, scaled_by, weights_of
from helpers import BF16, KINDS, assert_right, crowd, random_batch, random_experts, same_bits, shards_of
from shards import added_up
from topology import CPUS, masks, workers

from ktmoe import BF16 as B16
from ktmoe import MoELayer, backends, config, int4, set_num_threads
from ktmoe._native import core
from ktmoe.errors import InputError, OutOfMemoryError
from ktmoe.experts import ROUTER_WEIGHTS
from ktmoe.machine import numa
from ktmoe.weights.formats import FP8_PER_ROW, fp8, nvfp4
from ktmoe.weights.scales import Factor

pytestmark = pytest.mark.usefixtures("three_nodes")
#: Fewer threads than shards, as many, uneven teams, more than one a CPU.
THREADS = (1, 2, 3, 7)


# Bits


@pytest.mark.cover("values")
@pytest.mark.parametrize("weights", KINDS.values(), ids=KINDS)
def test_a_layer_is_its_shards_added_up(backend, weights):
    """Bit for bit, with every number of threads; 418 is 14 units of 32, the last one shorter, and 4 of 128; 600 is 3 of 256."""
    rng = np.random.default_rng(1)
    intermediate = 600 if any("super" in name for name, kind in KINDS.items() if kind == weights) else 418
    experts = random_experts(rng, 3, 100, intermediate, biases=True, **weights)
    one_unfolded = not weights.get("fold", True)  # its scale is in the first shard alone, and a matrix has one kernel
    for nodes, tokens in (([1, 0], 1), ([2, 0, 1], 9)):
        with MoELayer(experts, backend, numa_nodes=nodes) as layer:
            batch = random_batch(rng, experts, tokens, 2, np.float32)
            y = assert_right(layer, experts, *batch)
            if not one_unfolded:
                assert same_bits(y, added_up(experts, len(nodes), batch, backend, activations=layer.activations))
            for threads in THREADS:
                set_num_threads(threads)
                assert same_bits(layer.forward(*batch), y)


@pytest.mark.parametrize("divides", [False, True], ids=["factor", "divisor"])
@pytest.mark.parametrize("weight_format", [fp8(), nvfp4(), FP8_PER_ROW], ids=["fp8", "nvfp4", "fp8-row"])
def test_every_shard_has_the_factor(backend, weight_format, divides):
    """Sums of a shard are exact, the factor rounds each of them to float32, once, and they are added in ascending order. Scales
    differ by 128 columns, where the shards are cut."""
    rng = np.random.default_rng(17)
    weight_format = replace(weight_format, factor=Factor(weight_format == FP8_PER_ROW, divides))
    n = k = 450
    codes, scales = random_codes(rng, n, k, weight_format), odd_scales(rng, n, k, weight_format, 3)
    factor = random_factor(rng, n, weight_format)
    weights = weights_of(codes, scales, weight_format)
    x = rng.integers(-7, 8, (9, k)).astype(float)
    for nodes in ([0], [0, 1], [1, 2, 0]):
        with down_layer(backend, codes, scales, weight_format, factor=factor, activations="bf16", numa_nodes=nodes) as layer:
            expected = np.zeros((9, n), np.float32)
            for first, last in numa.split(k, 128 if weight_format.unit[1] == 128 else 32, len(nodes)):
                total = x[:, first:last] @ weights[:, first:last].T
                expected += scaled_by(total, weight_format, factor).astype(np.float32)
            for tokens in (1, 9):
                assert np.array_equal(forward(layer, x[:tokens]), expected[:tokens])


def test_the_number_of_nodes_decides_and_not_which_or_in_what_order(backend):
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 4, 64, 288)
    batch = random_batch(rng, experts, 7, 2, np.float32)
    outputs = {}
    for nodes in (None, [0], [2], [0, 1], [1, 0], [2, 0], [0, 1, 2], [2, 1, 0]):
        with MoELayer(experts, backend, numa_nodes=nodes) as layer:
            count = layer.placement.shards
            assert layer.placement.nodes == tuple([0, 1, 2] if nodes is None else nodes)
            assert same_bits(layer.forward(*batch), outputs.setdefault(count, layer.forward(*batch)))
    assert sorted(outputs) == [1, 2, 3]
    assert not same_bits(outputs[1], outputs[2])  # or this test would show nothing


def test_2880_columns_on_two_nodes(backend):
    """1440 each, which is 22.5 panels: gpt-oss's."""
    rng = np.random.default_rng(3)
    experts = random_experts(rng, 1, 192, 2880, biases=True)
    with MoELayer(experts, backend, numa_nodes=[0, 1]) as layer:
        assert shards_of(layer, experts) == [(0, 1440), (1440, 2880)]
        assert_right(layer, experts, *random_batch(rng, experts, 3, 1))


@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
def test_router_weights(backend, router_weight):
    rng = np.random.default_rng(4)
    experts = random_experts(rng, 3, 100, 200, biases=True)
    with MoELayer(experts, backend, router_weight=router_weight, numa_nodes=[0, 2]) as layer:
        for dtype in (BF16, np.float32):
            assert_right(layer, experts, *random_batch(rng, experts, 6, 2, dtype))


def test_both_forms_of_phase_b_and_chunks_have_the_same_bits(backend, is_emulated):
    rng = np.random.default_rng(5)
    experts = random_experts(rng, 5, *((100, 96) if is_emulated else (260, 192)))
    with MoELayer(experts, backend, numa_nodes=[0, 1, 2]) as layer:
        batch = random_batch(rng, experts, 45, 3)
        y = assert_right(layer, experts, *batch)
        for settings in ({"reduce_slots": 0}, {"reduce_slots": 10**6}, {"scratch_bytes": 1 << 19}, {"uneven": 5}):
            old = core.tune(**settings)
            try:
                assert same_bits(layer.forward(*batch), y), settings
                for t in (0, 22, 44):  # a token by itself
                    assert same_bits(layer.forward(*(a[t : t + 1] for a in batch)), y[t : t + 1])
            finally:
                core.tune(**old)
        many = crowd(layer, 200)
        assert_right(layer, experts, *many)


def test_skipped_experts_and_no_tokens(backend):
    rng = np.random.default_rng(6)
    experts = random_experts(rng, 4, 64, 96)
    with MoELayer(experts, backend, numa_nodes=[0, 1]) as layer:
        layer.expert_mask[1] = False
        x, _, weights = random_batch(rng, experts, 3, 4)
        ids = np.array([[0, 1, -1, 4], [1, 1, -5, 99], [3, 3, 0, 1]])
        y = assert_right(layer, experts, x, ids, weights)
        assert not y[1].any()
        assert layer.forward(x[:0], ids[:0], weights[:0]).shape == (0, 64)


# Threads


def test_workers_are_kept_to_their_nodes_and_the_caller_is_not(backend):
    rng = np.random.default_rng(7)
    experts = random_experts(rng, 2, 64, 96)
    own = os.sched_getaffinity(0)
    core.release()
    others = masks()
    set_num_threads(4)
    with MoELayer(experts, backend, numa_nodes=[0, 1]) as layer:
        old = core.tune(by_turns=True)  # a thread that came too late for a call might not be kept anywhere yet
        layer.forward(*random_batch(rng, experts, 3, 2))
        core.tune(**old)
        assert workers(3, others) == sorted([str(CPUS[0]), str(CPUS[-1]), str(CPUS[-1])])  # worker 0 is the caller
        assert os.sched_getaffinity(0) == own
    core.release()
    assert workers(0, others) == []


def test_threads_by_default_are_the_nodes_cores(backend, fake_nodes):
    rng = np.random.default_rng(8)
    experts = random_experts(rng, 2, 64, 96)
    batch = random_batch(rng, experts, 3, 2)
    core.release()
    before = masks()
    with MoELayer(experts, backend, numa_nodes=[1]) as layer:
        layer.forward(*batch)
        assert workers(0, before) == []  # one CPU: the caller alone
        set_num_threads(3)
        layer.forward(*batch)
        assert len(workers(2, before)) == 2


def test_layers_of_different_placements_side_by_side(backend):
    rng = np.random.default_rng(9)
    experts = random_experts(rng, 3, 64, 128)
    batches = [random_batch(rng, experts, tokens, 2) for tokens in (1, 4, 30)]
    with (
        MoELayer(experts, backend, numa_nodes=[0]) as one,
        MoELayer(experts, backend, numa_nodes=[1, 0]) as two,
        MoELayer(experts, backend, numa_nodes=[0, 1, 2]) as three,
        ThreadPoolExecutor(4) as callers,
    ):
        expected = {(layer, i): layer.forward(*batch) for layer in (one, two, three) for i, batch in enumerate(batches)}
        jobs = [(key, callers.submit(key[0].forward, *batches[key[1]])) for key in list(expected) * 5]
        assert all(same_bits(job.result(), expected[key]) for key, job in jobs)


def test_a_forked_child_computes_the_same(backend):
    rng = np.random.default_rng(10)
    experts = random_experts(rng, 2, 64, 96)
    batch = random_batch(rng, experts, 4, 2)
    with MoELayer(experts, backend, numa_nodes=[0, 1]) as layer:
        y = layer.forward(*batch)
        child = os.fork()
        if not child:
            os._exit(0 if same_bits(layer.forward(*batch), y) else 1)
        assert os.waitpid(child, 0)[1] == 0


# Memory and limits


def test_packed_bytes_are_what_was_said_before(backend):
    experts = random_experts(np.random.default_rng(11), 3, 100, 192)
    for nodes in ([0], [0, 1], [0, 1, 2]):
        with MoELayer(experts, backend, numa_nodes=nodes) as layer:
            assert layer.nbytes == backends.get(layer.backend).packed_nbytes(experts, layer.placement)


def test_memory_that_is_not_there(backend, monkeypatch):
    experts = random_experts(np.random.default_rng(12), 3, 100, 192)
    monkeypatch.setattr("ktmoe.machine.memory.available_bytes", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match=r"packing 3 experts needs .* GiB of memory, 0\.00 GiB is available"):
        MoELayer(experts, backend, numa_nodes=[0, 1])


def test_the_default_takes_no_more_nodes_than_there_is_work_for(backend):
    rng = np.random.default_rng(13)
    for intermediate, weight_format, nodes in ((32, B16, ()), (64, B16, (0, 1)), (128, int4(128), ()), (129, B16, (0, 1, 2))):
        experts = random_experts(rng, 2, 256, intermediate, formats=weight_format)
        with MoELayer(experts, backend) as layer:
            assert layer.placement.nodes == nodes
            assert_right(layer, experts, *random_batch(rng, experts, 3, 2))
    with pytest.raises(InputError, match="cut at multiples of 32 into 1 to 1 shards, found 2"):
        MoELayer(random_experts(rng, 2, 64, 32), backend, numa_nodes=[0, 1])


def test_more_nodes_than_a_layer_can_have(backend, fake_nodes):
    fake_nodes({node: {CPUS[0]} for node in range(33)})
    experts = random_experts(np.random.default_rng(14), 1, 32, 33 * 32)
    with pytest.raises(InputError, match="at most 32 NUMA nodes, found 33"):
        MoELayer(experts, backend)


def test_show_config_says_where_layers_are():
    assert config.config()["numa_nodes"] == [0, 1, 2]


def test_cpus_that_the_system_refuses_are_no_error(backend, fake_nodes):
    """The affinity mask may have changed since the nodes were looked at."""
    fake_nodes({0: {4000}, 1: {CPUS[0]}}, usable={4000, CPUS[0]})
    rng = np.random.default_rng(15)
    experts = random_experts(rng, 2, 64, 96)
    own = os.sched_getaffinity(0)
    with MoELayer(experts, backend, numa_nodes=[0, 1]) as layer:
        assert_right(layer, experts, *random_batch(rng, experts, 4, 2))
    assert os.sched_getaffinity(0) == own
