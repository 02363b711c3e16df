"""What the figures of demo and bench are made of: batches, counts, and medians of per-round shares."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from ktmoe import MoELayer, measuring, set_num_threads, synthetic
from ktmoe._native import core
from ktmoe.errors import InputError


@pytest.fixture(scope="module")
def experts():
    return synthetic.deepseek_v4_experts(num_experts=8, hidden=64, intermediate=96)


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "among"), [(1, 6, 64, None), (16, 6, 64, None), (50, 6, 64, 12), (3, 6, 4, None)]
)
def test_routing_is_random_and_rotates(tokens, top_k, num_experts, among):
    used = np.zeros(num_experts)
    last = np.empty(0)
    for batch in itertools.islice(measuring.random_batches(tokens, top_k, num_experts, 32, among=among), 300):
        chosen = min(top_k, num_experts)
        assert batch.x.shape == (tokens, 32)
        assert batch.ids.shape == batch.weights.shape == (tokens, chosen)
        assert all(len(set(row)) == chosen for row in batch.ids.tolist())
        assert np.allclose(batch.weights.sum(axis=1), 1)
        assert batch.slots == tokens * chosen
        assert batch.experts.tolist() == sorted(set(batch.ids.ravel().tolist()))
        if among:
            assert len(batch.experts) <= among
        if tokens == 1:
            assert not np.isin(batch.experts, last).any()
        last = batch.experts
        np.add.at(used, batch.ids.ravel(), 1)
    # each expert equally often: within six standard deviations of a binomial distribution
    expected = used.sum() / num_experts
    assert np.abs(used - expected).max() <= 6 * math.sqrt(expected * (tokens if among else 1))


def test_skewed_routing_follows_zipfs_law():
    """One expert a token: the r-th most popular one has a share of r^-skew; and which one that is changes."""
    tokens, num_experts, skew = 20_000, 8, 1.5
    shares = np.arange(1, num_experts + 1) ** -skew
    expected = tokens * shares / shares.sum()
    orders = set()
    for batch in itertools.islice(measuring.random_batches(tokens, 1, num_experts, 32, skew=skew), 5):
        counts = np.bincount(batch.ids.ravel(), minlength=num_experts)
        order = np.argsort(-counts)
        orders.add(tuple(order))
        assert np.all(np.abs(counts[order] - expected) <= 6 * np.sqrt(expected))
    assert len(orders) > 1


def test_skewed_routing_without_replacement():
    """Two of three experts, drawn one after the other: an expert is left out when the other two are drawn in either order."""
    tokens = 20_000
    batch = next(measuring.random_batches(tokens, 2, 3, 32, skew=1.0))
    p = np.array([6, 3, 2]) / 11
    left_out = [p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j]) for i, j in ((1, 2), (0, 2), (0, 1))]
    expected = tokens * (1 - np.array(left_out))
    counts = np.sort(np.bincount(batch.ids.ravel(), minlength=3))[::-1]
    assert np.all(np.abs(counts - expected) <= 6 * np.sqrt(tokens / 4))
    assert all(len(set(row)) == 2 for row in batch.ids.tolist())


class FakeLimits:
    """Limits that double in every round."""

    streams = 4

    def __init__(self):
        self.rounds = 0

    def peak(self, seconds):
        self.rounds += 1
        return 1e9 * 2**self.rounds

    def read(self, seconds):
        return 1e6 * 2**self.rounds


def test_shares_are_medians_of_each_rounds_own(experts):
    with MoELayer(experts, "fp32_lut") as layer:
        rounds = measuring.Rounds(layer, FakeLimits(), measuring.random_batches(1, 2, 8, 64))
        for _ in range(4):
            rounds.prepare()
        result = rounds.finish([0.5, 0.25, 0.125])  # the first round was for warming up
        nbytes, flops = 2 * layer.nbytes / 8, 2 * 2 * 3 * 64 * 96
    assert result.tokens == 1
    assert result.streams == 4
    assert result.seconds == 0.25
    assert result.bytes_rate == nbytes / 0.25
    assert result.flops_rate == flops / 0.25
    # the call got faster just as the machine did, so that all three shares are equal
    assert result.read_share == nbytes / 0.25 / 8e6
    assert result.peak_share == flops / 0.25 / 8e9
    assert (result.read_limit, result.peak_limit) == (8e6, 8e9)
    assert result.limit_shares == pytest.approx([max(result.read_share, result.peak_share)] * 3)


def test_progress_without_a_time(experts):
    """Rounds are all that is asked for."""
    done = []
    with MoELayer(experts, "fp32_lut") as layer:
        measuring.run(layer, FakeLimits(), measuring.random_batches(1, 2, 8, 64), seconds=0, least=3, progress=done.append)
    assert done == [0.25, 0.5, 0.75, 1.0]


def test_limits_are_measured_on_this_machine(experts):
    with MoELayer(experts, "fp32_lut") as layer:
        limits = measuring.LimitMeter(layer, measuring.backends_for(experts)["fp32_lut"])
        assert 1e6 < limits.peak(1e-4) < 1e14
        assert 1e6 < limits.read(1e-4) < 1e13


class FakePacked:
    """Four streams are read twice as fast as any other number of them."""

    nbytes = 1 << 20

    def __init__(self):
        self.asked = []

    def read_seconds(self, table, offset, nbytes, streams):
        self.asked.append(streams)
        return 0.5 if streams == 4 else 1.0


def test_reading_is_by_as_many_streams_as_are_fastest(experts):
    packed = FakePacked()
    limits = measuring.settled(SimpleNamespace(packed=packed), measuring.backends_for(experts)["fp32_lut"])
    assert set(packed.asked) == set(measuring.STREAMS)
    packed.asked.clear()
    assert limits.read(1.0) == 2 * packed.nbytes
    assert limits.streams == 4
    assert set(packed.asked) == {4}


def test_check(experts, backend):
    batch = next(measuring.random_batches(9, 6, 8, 64))
    with MoELayer(experts, backend) as layer:
        assert 0 < measuring.check(experts, layer, batch, tokens=9).error <= 1
        other = synthetic.deepseek_v4_experts(num_experts=8, hidden=64, intermediate=96, seed=1)
        assert measuring.check(other, layer, batch).error > 100


@pytest.mark.parametrize("latency", [core.pool_gate, core.pool_handoff])
def test_a_mean_of_none(latency):
    set_num_threads(2)
    with pytest.raises(InputError, match="count must be at least 1, found 0"):
        latency(0)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_latencies_of_the_pool(number):
    set_num_threads(number)
    assert 0 < core.pool_wake(0) < 10
    assert 0 < core.pool_wake(200) < 10
    assert 0 <= core.pool_gate(20) < 10
    if number > 1:
        assert 0 < core.pool_handoff(20) < 10
    else:
        with pytest.raises(InputError, match="needs 2 threads or more"):
            core.pool_handoff(20)
