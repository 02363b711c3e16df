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
from bench.modes import FORWARD
from ktmoe import MoELayer, measuring, two_stage
from ktmoe.backends.base import Found, Missing
from ktmoe.backends.native import NativeBackend
from ktmoe.experts import ExpertWeights

MODEL = models()[EVERYWHERE]
EXACT = "bf16"
MODES = ("int16", "int8", "mxfp8", "mxfp8/mxfp4", "mxfp4")
#: The experts of a layer: so many that a call's weights come from memory, and that packing takes no longer than measuring.
EXPERTS = 24
#: Tokens of a call, calls of a round by each side, and rounds, by the work.
WORK = {"1 token": (1, 5, 40), "24 tokens an expert": (24 * EXPERTS // MODEL.top_k, 1, 9)}


@dataclass(frozen=True)
class Case:
    """A way to compute. form: of the rows that its kernels take, as Found has it."""

    way: Way
    form: str

    @property
    def id(self) -> str:
        return f"{self.way.id}-by-{self.form}"


@dataclass(frozen=True)
class Pair:
    """What is measured, and what beside, in words and packed."""

    case: Case
    layer: MoELayer
    beside: str
    other: MoELayer


def every_case(experts: ExpertWeights) -> Iterator[Case]:
    """Each mode of each backend that runs here, by its own kernels and by those of bf16 if they compute it, too."""
    for name, backend in cases.native_backends():
        for mode in MODES:
            ways = (lookup(name, mode, forms, experts) for forms in (backend.forms, ()))
            by_form = {found.form: found.table.name for found in ways if isinstance(found, Found)}
            yield from (Case(Way(name, isa, mode), form) for form, isa in by_form.items())


def lookup(name: str, mode: str, forms: tuple[str, ...], experts: ExpertWeights) -> Found | Missing:
    with preferring(name, forms) as backend:
        return backend.lookup(experts, mode)


@contextmanager
def preferring(name: str, forms: tuple[str, ...]) -> Iterator[NativeBackend]:
    """While it lasts, the backend tries these forms before bf16."""
    backend = ktmoe.backends.get(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "forms", forms)
        yield backend


@pytest.fixture(scope="module")
def expected():
    """way -> the probe of its mode, which the reference computes once."""
    made: dict[str, probe.Probe] = {}

    def find(way: Way) -> probe.Probe:
        if way.activations not in made:
            made[way.activations] = probe.make(MODEL.make(EXPERTS), [*range(MODEL.top_k)], way)
        return made[way.activations]

    return find


@pytest.fixture(scope="module", params=every_case(MODEL.make(1)), ids=lambda case: case.id)
def pair(request):
    experts, case = MODEL.make(EXPERTS), request.param
    with preferring(case.way.backend, (case.form,)):
        layer = MoELayer(experts, case.way.backend, case.way.activations)
    with layer, MoELayer(experts, case.way.backend, EXACT) as exact:
        yield Pair(case, layer, EXACT, exact)


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
    found = ktmoe.backends.get(layer.backend).lookup(layer.spec, layer.activations)
    case = Case(Way(layer.backend, found.table.name, layer.activations), found.form)
    run(benchmark, Pair(case, layer, FORWARD, layer), expected, work, stages, MoELayer.forward)


def stages(layer: MoELayer, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    sorting = two_stage.moe_sorting(ids.astype(np.int32), weights, layer.num_experts)
    return two_stage.gemm2(layer, two_stage.gemm1(layer, x, sorting), sorting)


def run(benchmark, pair: Pair, expected: Callable, work: str, first: Callable, second: Callable) -> None:
    """Rounds of calls of both by turns: each call of one is followed by the other's with the same batch."""
    tokens, calls, rounds = WORK[work]
    way = pair.case.way
    batches = measuring.random_batches(tokens, MODEL.top_k, EXPERTS, MODEL.hidden)
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
    check = expected(way).check(**last)
    assert check.error <= 1
    mine, other = (seconds[1:] for seconds in took)  # the first were for warming up
    ratios = [a / b for a, b in zip(mine, other, strict=True)]
    benchmark.extra_info.update(
        record.shares(
            "modes",
            [1 / ratio for ratio in ratios],
            model=MODEL.name,
            num_experts=EXPERTS,
            backend=way.backend,
            isa=way.isa,
            activations=way.activations,
            form=pair.case.form,
            beside=pair.beside,
            work=work,
            tokens=tokens,
            ms=1e3 * statistics.median(mine),
            ratio=statistics.median(ratios),
            worst_error_of_bound=check.error,
        )
    )
