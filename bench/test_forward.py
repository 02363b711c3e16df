"""Forward calls with random routing; expert sets rotate, so that weights come from memory. No speed is asserted."""

from __future__ import annotations

import pytest
from conftest import HIDDEN, TOP_K

from ktmoe import measure

DECODE_TOKENS = (1, 2, 4, 8, 16)
TOKENS_PER_EXPERT = (6, 24, 96)
#: For one call: a slower backend gets fewer experts, each with as many tokens, so that the whole suite stays bearable.
MOST_SECONDS = 2.0
FEWEST_EXPERTS = 2 * TOP_K


@pytest.mark.parametrize("tokens", DECODE_TOKENS)
def test_decode(benchmark, machine, subject, tokens):
    batches = measure.random_batches(tokens, TOP_K, subject.experts.num_experts, HIDDEN)
    run(benchmark, subject, batches, "decode", rounds=30)


@pytest.mark.parametrize("mean", TOKENS_PER_EXPERT)
def test_prefill(benchmark, machine, subject, mean):
    experts = subject.experts.num_experts
    while experts > FEWEST_EXPERTS and mean * experts / slots_per_second(subject) > MOST_SECONDS:
        experts = max(FEWEST_EXPERTS, experts // 2)
    whole = experts == subject.experts.num_experts
    batches = measure.random_batches(mean * experts // TOP_K, TOP_K, subject.experts.num_experts, HIDDEN, among=experts)
    run(benchmark, subject, batches, f"prefill, {mean}/expert", rounds=5 if whole else 2)


def slots_per_second(subject) -> float:
    """How many (token, expert) pairs a backend serves, roughly."""
    batches = measure.random_batches(32, TOP_K, subject.experts.num_experts, HIDDEN, among=FEWEST_EXPERTS)
    result = measure.run(subject.layer, subject.limits, batches, seconds=0, least=1)
    return 32 * TOP_K / result.seconds


def run(benchmark, subject, batches, work, rounds):
    measurement = measure.Rounds(subject.layer, subject.limits, batches)

    def prepare():
        batch = measurement.prepare()
        return (batch.x, batch.ids, batch.weights), {}

    benchmark.pedantic(subject.layer.forward, setup=prepare, rounds=rounds, warmup_rounds=1)
    result = measurement.finish(benchmark.stats.stats.data)
    batch = next(batches)
    check = measure.check(subject.experts, subject.layer, batch)
    assert check.error <= 1
    benchmark.extra_info.update(
        kind="forward",
        format=subject.case.format,
        backend=subject.case.backend,
        isa=subject.case.isa,
        activations=subject.case.activations,
        scales=subject.case.scales,
        work=work,
        tokens=result.tokens,
        experts=len(batch.experts),
        ms=result.seconds * 1e3,
        read_gb_s=result.bytes_rate / 1e9,
        gflop_s=result.flops_rate / 1e9,
        limit_read_gb_s=result.read_limit / 1e9,
        limit_gflop_s=result.peak_limit / 1e9,
        share_of_read_bandwidth=result.read_share,
        share_of_multiply_peak=result.peak_share,
        worst_error_of_bound=check.error,
        bound_of_output=check.bound,
    )
