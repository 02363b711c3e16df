"""The cost model of bench/: counts against simulation, times against sums by hand, and the numbers that are found by calls."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from bench import cost_model, explain
from bench.models import Model, models
from bench.results_file import Results
from ktmoe import measuring
from ktmoe._native import core

SHAPE = Model("a model", "MXFP4", hidden=4096, intermediate=2048, experts=64, top_k=6)
#: Nothing decoded, all of the peak, all hidden: times are limits.
IDEAL = cost_model.Kernel(tile_rows=1, pass_rows=192, x_bytes=2, x_by_slot=False)
MACHINE = cost_model.Machine(threads=2, read=30e9, peak=400e9)
WEIGHTS = 3 * 4096 * 2048


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(64, 6, 1), (64, 6, 16), (256, 6, 64), (8, 2, 3), (8, 8, 5)])
def test_experts_and_rows_are_those_of_random_routing(experts, top_k, tokens):
    """Against batches as the benchmarks make them, within six standard errors."""
    batches = list(itertools.islice(measuring.random_batches(tokens, top_k, experts, 1), 400))
    rows = np.array([np.bincount(batch.ids.ravel(), minlength=experts) for batch in batches])
    m, expected = cost_model.expert_rows(experts, top_k, tokens)
    assert expected @ m == pytest.approx(tokens * top_k)
    assert expected.sum() == pytest.approx(cost_model.distinct_experts(experts, top_k, tokens))
    for i, count in zip(m.tolist(), expected.tolist(), strict=True):
        found = (rows == i).sum(axis=1)
        assert abs(found.mean() - count) <= 6 * found.std() / 20 + 0.02
    used = np.array([len(batch.experts) for batch in batches])
    assert abs(used.mean() - expected.sum()) <= 6 * used.std() / 20 + 1e-9


def test_limits_of_distinct_experts():
    assert cost_model.distinct_experts(256, 6, 1) == pytest.approx(6)
    assert cost_model.distinct_experts(256, 6, 2) == pytest.approx(12 - 36 / 256)
    assert cost_model.distinct_experts(256, 6, 10**6) == pytest.approx(256)
    assert cost_model.distinct_experts(8, 8, 1) == 8
    used = [cost_model.distinct_experts(256, 6, tokens) for tokens in range(1, 400)]
    assert all(a < b < 256 for a, b in itertools.pairwise(used))


@pytest.mark.parametrize(("weights", "bits"), [("MXFP4", 4.25), ("MXFP4, biases", 4.25), ("INT4", 4.5), ("BF16", 16)])
def test_bytes_are_those_of_the_weights(weights, bits):
    """Biases are not counted."""
    model = replace(SHAPE, weights=weights, experts=3, top_k=1, layers=5)
    assert model.expert_bytes == WEIGHTS * bits / 8
    assert model.nbytes == 15 * model.expert_bytes


def test_one_token_is_its_experts_bytes():
    read = 6 * WEIGHTS * 17 / 32 / 30e9
    rows = (4 * 4096 + 6 * (4096 + 2 * 2048) * 2) / 30e9
    assert cost_model.seconds(SHAPE, 1, IDEAL, MACHINE) == pytest.approx(read + rows)


def test_many_tokens_are_their_flops():
    slots = 4096 * 6
    compute = slots * 2 * WEIGHTS / 400e9
    took = cost_model.seconds(SHAPE, 4096, IDEAL, MACHINE)
    assert took == pytest.approx(compute, rel=0.02)  # x and h are the rest
    half = cost_model.seconds(SHAPE, 4096, replace(IDEAL, efficiency=0.5), MACHINE)
    assert half - took == pytest.approx(compute)


def test_without_overlap_times_add_up():
    multiply = 6 * 2 * WEIGHTS / 400e9
    kernel = replace(IDEAL, overlap=0.0, decode_ns=0.03)
    decode = 6 * WEIGHTS * 17 / 32 * 0.03e-9 / 2
    ideal = cost_model.seconds(SHAPE, 1, IDEAL, MACHINE)
    assert cost_model.seconds(SHAPE, 1, kernel, MACHINE) == pytest.approx(ideal + multiply + decode)
    halfway = replace(kernel, overlap=0.5)
    assert cost_model.seconds(SHAPE, 1, halfway, MACHINE) == pytest.approx(
        ideal + multiply + decode - 0.5 * (multiply + decode)
    )


def test_tiles_and_passes_are_steps():
    """Of one expert that all tokens use."""
    shape = replace(SHAPE, experts=1, top_k=1)
    slow = replace(MACHINE, peak=1e9)  # nothing but computing
    row = 2 * WEIGHTS / 1e9
    tiles = cost_model.Kernel(tile_rows=16, pass_rows=48, x_bytes=2, x_by_slot=True)
    for tokens, padded in ((1, 16), (16, 16), (17, 32), (48, 48), (49, 64)):
        assert cost_model.seconds(shape, tokens, tiles, slow) == pytest.approx(padded * row, rel=1e-3)
    decode = 0.1e-9 * WEIGHTS * 17 / 32 / 2
    for tokens, passes in ((48, 1), (49, 2), (96, 2), (97, 3)):
        with_decode = cost_model.seconds(shape, tokens, replace(tiles, decode_ns=0.1), slow)
        assert with_decode - cost_model.seconds(shape, tokens, tiles, slow) == pytest.approx(passes * decode)
    bf16 = replace(shape, weights="BF16")
    assert cost_model.seconds(bf16, 5, replace(tiles, decode_ns=0.1), slow) == cost_model.seconds(bf16, 5, tiles, slow)


def test_more_work_never_costs_less():
    kernel = replace(IDEAL, decode_ns=0.07, efficiency=0.8, overlap=0.7)

    def took(**changed):
        return cost_model.seconds(replace(SHAPE, **changed), 32, kernel, MACHINE)

    assert took() < took(hidden=8192) < took(hidden=8192, intermediate=4096)
    assert took(hidden=8192) == pytest.approx(2 * took(), rel=0.01)
    assert took() < took(experts=128) < took(experts=256)
    times = [cost_model.seconds(SHAPE, tokens, kernel, MACHINE) for tokens in range(1, 600)]
    assert all(a < b for a, b in itertools.pairwise(times))
    per_token = [time / tokens for tokens, time in enumerate(times, 1)]
    assert per_token[-1] < per_token[63] < per_token[0]


def test_what_is_known_of_the_driver():
    assert core.tune()["scratch_bytes"] == cost_model.SCRATCH_BYTES


def test_scratch_memory_cuts_a_batch():
    most = cost_model.chunk_tokens(SHAPE, 1 << 16, IDEAL)
    row = 6 * 2 * 2048 + 2 * 4096
    assert most == (1 << 16) // 8
    assert most * row <= cost_model.SCRATCH_BYTES < 2 * most * row
    assert cost_model.chunk_tokens(SHAPE, 100, IDEAL) == 100
    assert cost_model.chunk_tokens(SHAPE, 1 << 16, replace(IDEAL, x_by_slot=True)) < most
    whole = cost_model.seconds(SHAPE, most, IDEAL, MACHINE)
    assert cost_model.seconds(SHAPE, 3 * most, IDEAL, MACHINE) == pytest.approx(3 * whole)
    rest = cost_model.seconds(SHAPE, 7, IDEAL, MACHINE)
    assert cost_model.seconds(SHAPE, 2 * most + 7, IDEAL, MACHINE) == pytest.approx(2 * whole + rest, rel=0.01)


def test_crossover_is_where_both_take_as_long():
    rows = cost_model.crossover(SHAPE, IDEAL, MACHINE)
    assert rows * 2 * WEIGHTS / 400e9 == pytest.approx(WEIGHTS * 17 / 32 / 30e9)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weights": "FP7"}, "weights 'FP7' are unknown; known are 'MXFP4'"),
        ({"hidden": 0}, "hidden: expected a whole number of at least 1, found 0"),
        ({"experts": 2.5}, "experts: expected a whole number of at least 1, found 2.5"),
        ({"top_k": 65}, "top_k: expected at most the 64 experts, found 65"),
    ],
)
def test_bad_shapes(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(SHAPE, **wrong)


@pytest.mark.parametrize("name", ["threads", "read", "peak"])
def test_bad_machines(name):
    with pytest.raises(ValueError, match=f"{name}: expected more than 0, found 0"):
        replace(MACHINE, **{name: 0})


def test_no_tokens():
    with pytest.raises(ValueError, match="tokens: expected at least 1, found 0"):
        cost_model.seconds(SHAPE, 0, IDEAL, MACHINE)


def measured(kernel: cost_model.Kernel, calls: dict[str, tuple[int, ...]]) -> Results:
    """What a machine would measure that is exactly as the model says: rates, and shares of MACHINE's limits."""
    model = models()["V4-Flash"]
    layer = {"model": model.name, "isa": "avx2", "activations": "int16", "weights": model.weights, "experts": model.experts}
    for what, numbers in calls.items():
        points = layer.setdefault(what, [])
        for number in numbers:
            among = 64 if what == "per_expert" else model.experts
            tokens = number * among // model.top_k if what == "per_expert" else number
            took = cost_model.seconds(replace(model, experts=among), tokens, kernel, MACHINE)
            used = cost_model.distinct_experts(among, model.top_k, tokens)
            gb_s, gflop_s = used * model.expert_bytes / took / 1e9, tokens * model.top_k * model.slot_flops / took / 1e9
            rates = {"gb_s": gb_s, "of_read": gb_s / 30, "gflop_s": gflop_s, "of_peak": gflop_s / 400}
            points.append({"rows" if what == "per_expert" else "tokens": number, "experts": among, **rates})
    return Results({"cpu": {"name": "a CPU", "threads": 2}, "layer": [layer]})


CALLS = {"decode": (1, 2, 4, 16), "prefill": (64, 1024), "per_expert": (6, 24, 96)}


def test_the_numbers_that_made_the_calls_are_found():
    kernel = replace(explain.KERNELS["avx2", "int16"], decode_ns=0.08, efficiency=0.75, overlap=0.9)
    results = measured(kernel, CALLS)
    (cost,) = explain.fits(results)
    assert cost["efficiency"] == pytest.approx(0.75, rel=0.03)
    found = explain.kernels(Results({**results.data, "cost": [cost]}))["avx2", "int16"]
    calls = list(explain.calls(results))
    assert sorted(call.what for call in calls if call.fitted) == sorted(explain.FITTED)
    assert len(calls) == 9
    assert all(call.predicted(found) == pytest.approx(1, rel=0.02) for call in calls)


def test_without_the_calls_that_they_are_found_by_there_are_no_numbers():
    kernel = explain.KERNELS["avx2", "int16"]
    assert explain.fits(measured(kernel, {**CALLS, "per_expert": (6, 24)})) == []


def test_a_call_without_a_limit_is_left_out():
    results = measured(explain.KERNELS["avx2", "int16"], {"decode": (1, 2)})
    del results.data["layer"][0]["decode"][0]["of_peak"]
    assert [call.what for call in explain.calls(results)] == [("decode", 2)]
    results.data["limits"] = {"multiply_gflop_s": {"avx2": 400.0}}
    assert [call.what for call in explain.calls(results)] == [("decode", 1), ("decode", 2)]
