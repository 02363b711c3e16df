"""Measures a layer against the machine: its calls and the machine's limits, interleaved round by round.

A speed alone says little on a machine that others share. So each round measures the read bandwidth, on the same pages as
the packed weights, and the multiply peak, both with the pool's own threads, and then the call; what counts is the median
over rounds of the call's share of that round's limits. `ktmoe demo`, `ktmoe bench` and `make bench` measure with this module.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ktmoe import backends, reference
from ktmoe._native import core
from ktmoe.backends.base import Found
from ktmoe.experts import ExpertWeights
from ktmoe.layer import MoELayer

#: For how long a round measures each limit: long against waking the pool, and a share of a call, so that both meet alike
#: whatever else the machine is doing.
LEAST_SECONDS = 0.01
MOST_SECONDS = 0.2
SHARE_OF_CALL = 0.1
READ_BYTES = 128 << 20
_PAGE = 4096
#: What a thread reads at once: on Intel's cores, more than one stream is faster.
STREAMS = (1, 2, 4, 8)
#: Reading has settled when three looks in a row agree. A look is for so long with each number of streams.
_LOOK_SECONDS, _MOST_LOOKS, _ALIKE = 0.03, 20, 1.02
#: Exponent of skewed routing's popularity, by Zipf's law: the r-th most popular expert is asked for in proportion to r^-SKEW.
#: 1 is what vLLM's benchmark_moe.py takes for skewed load (its pull request 57100 adds -log(rank) to the router's logits).
#: Among 256 experts and 6 a token, the most popular one then serves two tokens of three.
SKEW = 1.0


@dataclass(frozen=True)
class Batch:
    """One call's input, x [tokens, hidden] bfloat16, and what it costs.

    experts: the distinct ones that it uses, whose packed weights it must read. slots: (token, expert) pairs to multiply.
    """

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    experts: np.ndarray
    slots: int


def random_batches(
    tokens: int, top_k: int, num_experts: int, hidden: int, *, among: int | None = None, skew: float = 0.0, seed: int = 0
) -> Iterator[Batch]:
    """Endless batches with random routing: a token's experts are distinct, and every set of them is equally likely.

    Experts rotate, so that the weights come from memory and not from a cache; one token alone also avoids the experts of the
    call before. among: use so many experts a batch, others every time, to bound its work; all by default.
    skew: draw a token's experts one after the other by popularity, r^-skew for the r-th in an order that each batch has anew.
    """
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, hidden), np.float32).astype(ml_dtypes.bfloat16)
    among = min(among or num_experts, num_experts)
    top_k = min(top_k, among)
    last = np.empty(0, np.int64)
    while True:
        pool = random.permutation(num_experts)
        if tokens == 1:
            pool = pool[np.argsort(np.isin(pool, last), kind="stable")][: max(top_k, num_experts - len(last))]
        pool = pool[:among]
        # Whoever's exponential clock of rate r^-skew rings first: the same as drawing by popularity without replacement.
        clocks = random.standard_exponential((tokens, len(pool))) * np.arange(1, len(pool) + 1) ** skew
        ids = pool[np.argsort(clocks, axis=1)[:, :top_k]].astype(np.int64)
        weights = random.random(ids.shape, np.float32)
        weights /= weights.sum(axis=1, keepdims=True)
        last = np.unique(ids)
        yield Batch(x, ids, weights, last, ids.size)


def slot_flops(shape) -> int:
    """Of one token in one expert. shape: whatever has `hidden` and `intermediate`."""
    return 2 * 3 * shape.hidden * shape.intermediate


class Limits:
    """The machine's limits as one backend meets them: with its instructions, on its threads and on its packed pages.

    layer: of a native backend. table: the kernel table that serves it. streams: see STREAMS.
    """

    def __init__(self, layer: MoELayer, table: core.KernelTable, streams: int = 1):
        self._packed, self._table, self.streams = layer.packed, table, streams
        self._at = 0
        iterations, seconds = 1 << 10, 0.0
        while seconds < LEAST_SECONDS / 4:
            iterations *= 2
            _, seconds = table.peak(iterations)
        self._iterations_per_second = iterations / seconds

    def read(self, seconds: float) -> float:
        """Bytes per second that all threads read of the packed weights, for about so long; it goes on where it stopped."""
        nbytes = min(READ_BYTES, self._packed.nbytes)
        total, took = 0, 0.0
        while took < seconds:
            if self._at + nbytes > self._packed.nbytes:
                self._at = 0
            took += self._packed.read_seconds(self._table, self._at, nbytes, self.streams)
            total += nbytes
            self._at += -(-nbytes // _PAGE) * _PAGE
        return total / took

    def peak(self, seconds: float) -> float:
        """FLOPs per second of multiplies from registers, on all threads, for about so long."""
        flops, took = self._table.peak(max(1, round(self._iterations_per_second * seconds)))
        return flops / took


def settled(layer: MoELayer, table: core.KernelTable) -> Limits:
    """The limits, once reading is as fast as just before: for a second or so after packing it was found to be slower.

    Each thread reads as many streams as were the fastest by then.
    """
    ways, looks = [Limits(layer, table, streams) for streams in STREAMS], []
    while len(looks) < _MOST_LOOKS:
        looks.append([way.read(_LOOK_SECONDS) for way in ways])
        best = [max(look) for look in looks[-3:]]
        if len(best) > 2 and max(best) < _ALIKE * min(best):
            break
    rates = [statistics.median(rates) for rates in zip(*looks[-3:], strict=True)]
    return ways[rates.index(max(rates))]


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; shares are medians of each round's own ratio. Rates are per second.

    limit_shares: of each round, the share of the nearer limit, which is the larger one.
    streams: that each thread read at once for the read limit.
    """

    tokens: int
    seconds: float
    bytes_rate: float
    flops_rate: float
    read_limit: float
    peak_limit: float
    read_share: float
    peak_share: float
    limit_shares: tuple[float, ...]
    streams: int


class Rounds:
    """One measurement: prepare() before each call, finish() with the seconds of the last calls.

    batches: endless. A batch is counted as the packed bytes of the distinct experts that it uses, once each, and
    2 FLOPs for each of an expert's 3 * hidden * intermediate weights and each (token, expert) pair.
    least: seconds for which a round measures each limit, at least.
    """

    def __init__(self, layer: MoELayer, limits: Limits, batches: Iterator[Batch], *, least: float = LEAST_SECONDS):
        self._limits, self._batches, self._least = limits, batches, least
        self._expert_bytes = layer.nbytes / layer.num_experts
        self._slot_flops = slot_flops(layer)
        self._rounds: list[tuple[Batch, float, float]] = []
        self._prepared = time.perf_counter()

    def prepare(self) -> Batch:
        """Measure the limits, which also takes the last batch's weights out of the caches; the next call's batch."""
        batch = next(self._batches)
        call = time.perf_counter() - self._prepared
        seconds = min(max(self._least, SHARE_OF_CALL * call), MOST_SECONDS)
        self._rounds.append((batch, self._limits.peak(seconds), self._limits.read(seconds)))
        self._prepared = time.perf_counter()
        return batch

    def finish(self, seconds: list[float]) -> Result:
        """seconds: of the last len(seconds) prepared calls; earlier ones were for warming up."""
        rows, tokens = [], 0
        for (batch, peak, read), took in zip(self._rounds[-len(seconds) :], seconds, strict=True):
            tokens = len(batch.x)
            nbytes, flops = len(batch.experts) * self._expert_bytes / took, batch.slots * self._slot_flops / took
            rows.append((took, nbytes, flops, read, peak, nbytes / read, flops / peak))
        limit_shares = tuple(max(row[-2:]) for row in rows)
        return Result(
            tokens, *(statistics.median(column) for column in zip(*rows, strict=True)), limit_shares, self._limits.streams
        )


def run(
    layer: MoELayer,
    limits: Limits,
    batches: Iterator[Batch],
    *,
    seconds: float = 2.0,
    least: int = 3,
    most: int = 50,
    progress: Callable[[float], object] | None = None,
) -> Result:
    """Measure forward calls of a layer: rounds for about so many seconds, but at least and at most so many.

    progress: called with the share that is done, after each round.
    """
    measurement, took = Rounds(layer, limits, batches), []
    start = time.perf_counter()
    while len(took) <= least or (len(took) <= most and time.perf_counter() - start < seconds):
        batch = measurement.prepare()
        called = time.perf_counter()
        layer.forward(batch.x, batch.ids, batch.weights)
        took.append(time.perf_counter() - called)
        if progress:
            done = (time.perf_counter() - start) / seconds if seconds else len(took) / (least + 1)
            progress(min(1.0, max(done, len(took) / (most + 1))))
    return measurement.finish(took[1:])  # the first was for warming up


def backends_for(experts: ExpertWeights) -> dict[str, core.KernelTable]:
    """The backends that can run these experts here, best first, each with the kernel table that it serves them with.

    Those with a kernel table: the limits of others cannot be measured from here.
    """
    found = {}
    for name in backends.ranked():
        match backends.get(name).claim(experts):
            case Found(table=table) if table is not None:
                found[name] = table
    return found


@dataclass(frozen=True)
class Check:
    """A call's sampled outputs against the float64 reference.

    error: the largest as a share of its bound: above 1 is wrong. bound: the median bound as a share of the outputs' rms.
    """

    error: float
    bound: float

    @classmethod
    def of(cls, y: np.ndarray, expected: reference.Reference) -> Check:
        """Of float32 outputs, alike in shape."""
        scale = float(np.sqrt(np.mean(np.square(expected.y))))
        return cls(expected.worst(y), float(np.median(expected.bound)) / scale if scale else math.nan)


def check(experts: ExpertWeights, layer: MoELayer, batch: Batch, *, tokens: int = 1, columns: int = 64) -> Check:
    """Compare a sample of a call's outputs with the reference.

    The sample is taken with float32 outputs, whose bound is the computation's own; rounded, all of them must equal the
    measured call's bfloat16 outputs bit for bit, or the error is infinite. The reference takes seconds for a token.
    """
    y = layer.forward(batch.x, batch.ids, batch.weights)
    y32 = layer.forward(batch.x.astype(np.float32), batch.ids, batch.weights)
    if not np.array_equal(y32.astype(y.dtype).view(np.uint16), y.view(np.uint16)):
        return Check(math.inf, math.nan)
    random = np.random.default_rng(len(batch.x))
    rows = random.choice(len(batch.x), min(tokens, len(batch.x)), replace=False)
    outputs = np.sort(random.choice(experts.hidden, min(columns, experts.hidden), replace=False))
    expected = reference.forward(
        experts,
        batch.x[rows],
        batch.ids[rows],
        batch.weights[rows],
        router_weight=layer.router_weight,
        out_dtype="float32",
        columns=outputs,
        activations=layer.activations,
        rounding=layer.rounding,
        tuned_for=layer.tuned_for,
    )
    return Check.of(y32[rows][:, outputs], expected)
