"""Activation modes side by side: calls in each mode and the same calls in exact bf16 of the same backend, by turns.

GPU engines say a16w4 for mode bf16, a8w4 for mxfp8 and a4w4 for mxfp4. An MX mode is measured with the kernels that the
backend takes for it and, where those are others, with the kernels of bf16, too. The two stages of ktmoe.two_stage are
measured beside forward(). Results are asserted, speed is not.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

import ktmoe
from bench import cases, probe, record
from bench.cases import EVERYWHERE, Way
from bench.models import models
from ktmoe import MoELayer, measure, two_stage
from ktmoe.backends.base import Found
from ktmoe.experts import ExpertWeights
from ktmoe.modes import mode_of

MODEL = models()[EVERYWHERE]
EXACT = "bf16"
MODES = ("int16", "int8", "mxfp8", "mxfp8/mxfp4", "mxfp4")
#: So many that a call's weights come from memory, and that packing takes no longer than measuring.
EXPERTS = 24
#: By the work: tokens of a call, calls of a round by each side, rounds.
WORK = {"1 token": (1, 5, 40), "24 tokens an expert": (24 * EXPERTS // MODEL.top_k, 1, 9)}


@dataclass(frozen=True)
class Pair:
    """What is measured, and what beside. way: of the first. beside: the second in words."""

    way: Way
    layer: MoELayer
    other: MoELayer
    beside: str


def ways(experts: ExpertWeights) -> Iterator[Way]:
    """Each mode of each backend that runs here by its own kernels, and by those of bf16 where it might take them."""
    for name, backend in cases.native_backends():
        exact = backend.lookup(experts, EXACT).table.name
        for mode in MODES:
            if isinstance(found := backend.lookup(experts, mode), Found):
                for isa in dict.fromkeys([found.table.name, *([exact] if EXACT in mode_of(mode).forms else [])]):
                    yield Way(name, isa, mode)


@contextmanager
def kernels(way: Way, experts: ExpertWeights) -> Iterator[None]:
    """While it lasts, the backend computes its mode by that instruction set."""
    backend = ktmoe.backends.get(way.backend)
    with pytest.MonkeyPatch.context() as patch:
        if backend.lookup(experts, way.activations).table.name != way.isa:
            patch.setattr(backend, "isas", {EXACT: backend.isas[EXACT]})
        assert backend.lookup(experts, way.activations).table.name == way.isa
        yield


ONE = MODEL.make(1)


@pytest.fixture(scope="module")
def expected():
    """way -> the probe of its mode, which the reference computes once."""
    made: dict[str, probe.Probe] = {}

    def find(way: Way) -> probe.Probe:
        if way.activations not in made:
            made[way.activations] = probe.make(MODEL.make(EXPERTS), [*range(MODEL.top_k)], way)
        return made[way.activations]

    return find


@pytest.fixture(scope="module", params=ways(ONE), ids=lambda way: way.id)
def pair(request):
    experts = MODEL.make(EXPERTS)
    with kernels(request.param, experts):
        layer = MoELayer(experts, request.param.backend, request.param.activations)
    with layer, MoELayer(experts, request.param.backend, EXACT) as exact:
        yield Pair(request.param, layer, exact, "bf16")


@pytest.mark.parametrize("work", WORK)
def test_mode(benchmark, pair, expected, work):
    run(benchmark, pair, expected, work, MoELayer.forward, MoELayer.forward)


@pytest.fixture(scope="module", params=["bf16", "mxfp8", "mxfp4"])
def layer(request):
    with MoELayer(MODEL.make(EXPERTS), activations=request.param) as layer:
        yield layer


@pytest.mark.parametrize("work", WORK)
def test_two_stages(benchmark, layer, expected, work):
    """The sort and both stages, beside forward() of the same layer."""
    table = ktmoe.backends.get(layer.backend).lookup(layer.spec, layer.activations).table
    way = Way(layer.backend, table.name, layer.activations)
    run(benchmark, Pair(way, layer, layer, "forward()"), expected, work, stages, MoELayer.forward)


def stages(layer: MoELayer, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    sorting = two_stage.moe_sorting(ids.astype(np.int32), weights, layer.num_experts)
    return two_stage.gemm2(layer, two_stage.gemm1(layer, x, sorting), sorting)


def run(benchmark, pair: Pair, expected: Callable, work: str, first: Callable, second: Callable) -> None:
    """Rounds of calls of both by turns: each call of one is followed by the other's with the same batch."""
    tokens, calls, rounds = WORK[work]
    batches = measure.random_batches(tokens, MODEL.top_k, EXPERTS, MODEL.hidden)
    sides, took, last = [(first, pair.layer), (second, pair.other)], ([], []), {}
    turns = itertools.cycle([(0, 1), (1, 0)])

    def call() -> None:
        seconds = [0.0, 0.0]
        for batch in itertools.islice(batches, calls):
            for side in next(turns):
                forward, layer = sides[side]
                start = time.perf_counter()
                y = forward(layer, batch.x, batch.ids, batch.weights)
                seconds[side] += time.perf_counter() - start
                if side == 0:
                    last.update(layer=layer, batch=batch, y=y)
        for each, found in zip(seconds, took, strict=True):
            each /= calls
            found.append(each)

    benchmark.pedantic(call, rounds=rounds, warmup_rounds=1)
    check = expected(pair.way).check(**last)
    assert check.error <= 1
    mine, other = (seconds[1:] for seconds in took)  # the first were for warming up
    ratios = [a / b for a, b in zip(mine, other, strict=True)]
    benchmark.extra_info.update(
        record.shares(
            "modes",
            [1 / ratio for ratio in ratios],
            model=MODEL.name,
            num_experts=EXPERTS,
            backend=pair.way.backend,
            isa=pair.way.isa,
            activations=pair.way.activations,
            beside=pair.beside,
            work=work,
            tokens=tokens,
            ms=1e3 * statistics.median(mine),
            ratio=statistics.median(ratios),
            worst_error_of_bound=check.error,
        )
    )
