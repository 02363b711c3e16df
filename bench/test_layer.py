"""Forward calls of whole layers: decode and prefill, random and skewed routing. Results are asserted, speed is not.

Weights come from memory: experts rotate, and layers where one is small. On DeepSeek-V4-Flash with all its experts, prefill with
256, 1024 and 4096 tokens means 6, 24 and 96 tokens an expert; test_tokens_per_expert has those for every backend, among
fewer experts, so that it ends.
"""

from __future__ import annotations

import itertools

import pytest

from bench import record
from bench.cases import EVERYWHERE
from ktmoe import measuring

DECODE_TOKENS = (1, 2, 4, 8, 16)
PREFILL_TOKENS = (64, 256, 1024, 4096)
TOKENS_PER_EXPERT = (6, 24, 96)
ROUTING = {"random": 0.0, "skewed": measuring.SKEW}
DECODE_ROUNDS = 20
#: The longest call that is not left out by default; the seconds that all rounds' calls take about; the fewest and most rounds.
LONGEST_CALL = 2.5
PREFILL_SECONDS = 4.0
PREFILL_ROUNDS = (3, 10)
#: The longest call of test_tokens_per_expert: a slower backend gets fewer experts, each with as many tokens.
LONGEST_SHARE = 1.0
MOST_EXPERTS, FEWEST_EXPERTS = 64, 12


@pytest.mark.parametrize("routing", ROUTING)
@pytest.mark.parametrize("tokens", DECODE_TOKENS)
def test_decode(benchmark, subject, tokens, routing):
    run(benchmark, subject, subject.batches(tokens, skew=ROUTING[routing]), DECODE_ROUNDS, "decode", routing)


@pytest.mark.parametrize("routing", ROUTING)
@pytest.mark.parametrize("tokens", PREFILL_TOKENS)
def test_prefill(benchmark, subject, pytestconfig, tokens, routing):
    seconds = tokens * subject.model.top_k / subject.slots_per_second
    if seconds > LONGEST_CALL and not pytestconfig.getoption("--full"):
        pytest.skip(f"{tokens} tokens take {subject.way.id} more than {LONGEST_CALL} s; --full measures them")
    run(benchmark, subject, subject.batches(tokens, skew=ROUTING[routing]), rounds_of(seconds), "prefill", routing)


@pytest.mark.parametrize("mean", TOKENS_PER_EXPERT)
def test_tokens_per_expert(benchmark, subject, mean):
    if subject.model.name != EVERYWHERE:
        pytest.skip(f"for {EVERYWHERE} only")
    experts = min(MOST_EXPERTS, subject.num_experts)
    while experts > FEWEST_EXPERTS and mean * experts / subject.slots_per_second > LONGEST_SHARE:
        experts = max(FEWEST_EXPERTS, experts // 2)
    tokens = mean * experts // subject.model.top_k
    rounds = rounds_of(mean * experts / subject.slots_per_second)
    run(benchmark, subject, subject.batches(tokens, among=experts), rounds, f"{mean} an expert", "random", experts)


def rounds_of(seconds: float) -> int:
    """The rounds for calls that take so long."""
    least, most = PREFILL_ROUNDS
    return max(least, min(most, round(PREFILL_SECONDS / seconds)))


def run(benchmark, subject, batches, rounds, work, routing, among=None):
    measurement = measuring.Rounds(subject.layers[0], subject.limits, batches)
    layers = itertools.cycle(subject.layers)
    last = {}

    def prepare():
        last.update(layer=next(layers), batch=measurement.prepare())
        return (last["layer"], last["batch"]), {}

    def call(layer, batch):
        last["y"] = layer.forward(batch.x, batch.ids, batch.weights)

    benchmark.pedantic(call, setup=prepare, rounds=rounds, warmup_rounds=1)
    result = measurement.finish(benchmark.stats.stats.data)
    check = subject.probe.check(**last)
    assert check.error <= 1
    benchmark.extra_info.update(
        record.forward(
            "layer",
            subject.way,
            result,
            last["batch"],
            check,
            model=subject.model.name,
            work=work,
            routing=routing,
            num_experts=subject.num_experts,
            among=among or subject.num_experts,
            layers=len(subject.layers),
            footprint_of_llc=subject.footprint_of_llc,
        )
    )
