"""What the figures of demo and bench are made of: batches, counts, and medians of per-round shares."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from ktmoe import MoELayer, measure, synthetic


@pytest.fixture(scope="module")
def experts():
    return synthetic.deepseek_v4_experts(num_experts=8, hidden=64, intermediate=96)


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "among"), [(1, 6, 64, None), (16, 6, 64, None), (50, 6, 64, 12), (3, 6, 4, None)]
)
def test_routing_is_random_and_rotates(tokens, top_k, num_experts, among):
    used = np.zeros(num_experts)
    last = np.empty(0)
    for batch in itertools.islice(measure.random_batches(tokens, top_k, num_experts, 32, among=among), 300):
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


class FakeLimits:
    """Limits that double in every round."""

    def __init__(self):
        self.rounds = 0

    def peak(self, seconds):
        self.rounds += 1
        return 1e9 * 2**self.rounds

    def read(self, seconds):
        return 1e6 * 2**self.rounds


def test_shares_are_medians_of_each_rounds_own(experts):
    with MoELayer(experts, "fp32_lut") as layer:
        rounds = measure.Rounds(layer, FakeLimits(), measure.random_batches(1, 2, 8, 64))
        for _ in range(4):
            rounds.prepare()
        result = rounds.finish([0.5, 0.25, 0.125])  # the first round was for warming up
        nbytes, flops = 2 * layer.nbytes / 8, 2 * 2 * 3 * 64 * 96
    assert result.tokens == 1
    assert result.seconds == 0.25
    assert result.bytes_rate == nbytes / 0.25
    assert result.flops_rate == flops / 0.25
    # the call got faster just as the machine did, so that all three shares are equal
    assert result.read_share == nbytes / 0.25 / 8e6
    assert result.peak_share == flops / 0.25 / 8e9
    assert (result.read_limit, result.peak_limit) == (8e6, 8e9)


def test_limits_are_measured_on_this_machine(experts):
    with MoELayer(experts, "fp32_lut") as layer:
        limits = measure.Limits(layer, measure.backends_for(experts)["fp32_lut"])
        assert 1e6 < limits.peak(1e-4) < 1e14
        assert 1e6 < limits.read(1e-4) < 1e13


def test_check(experts, backend):
    batch = next(measure.random_batches(9, 6, 8, 64))
    with MoELayer(experts, backend) as layer:
        assert 0 < measure.check(experts, layer, batch, tokens=9).error <= 1
        other = synthetic.deepseek_v4_experts(num_experts=8, hidden=64, intermediate=96, seed=1)
        assert measure.check(other, layer, batch).error > 100
