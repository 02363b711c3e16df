"""The calls that are measured, and their measurement."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import ktmoe
from bench.cases import Way
from bench.cost_model import Kernel, Machine
from bench.models import models
from ktmoe import measure, synthetic
from ktmoe.errors import OutOfMemoryError
from ktmoe.experts import ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.machine import threads

#: What kernels are by construction, and the FLOPs a cycle of their instruction on Intel's server cores, which tell the clock.
KERNELS = {
    "amx": (Kernel(tile_rows=16, pass_rows=48, x_bytes=2, x_by_slot=True), 1024),
    "fp32_lut": (Kernel(tile_rows=1, pass_rows=192, x_bytes=4, x_by_slot=False), 64),
    "avx512_bf16": (Kernel(tile_rows=1, pass_rows=192, x_bytes=2, x_by_slot=False), 32),
    "avx2": (Kernel(tile_rows=1, pass_rows=192, x_bytes=2, x_by_slot=False), 32),
}
#: The instruction set that these are of: a CPU with a better one for a backend is measured with this one all the same.
ISAS = {"amx": "amx", "fp32_lut": "avx512f", "avx512_bf16": "avx512_bf16", "avx2": "avx2"}

FIT_SHAPE = "V4-Flash, 64 experts"
SHAPES = {**models(), FIT_SHAPE: replace(models()["V4-Flash"], name=FIT_SHAPE, experts=64)}
#: (backend, shape, threads, tokens). The numbers are found with FITS; CHECKS are predicted, and then measured.
FITS = [(backend, FIT_SHAPE, 2, tokens) for backend in KERNELS for tokens in (1, 16, 128, 512, 1024)]
CHECKS = [
    (backend, shape, count, tokens)
    for backends, shape, count, calls in (
        (("amx", "fp32_lut"), FIT_SHAPE, 2, (2, 4, 8, 32, 64, 256)),
        (("avx512_bf16", "avx2"), FIT_SHAPE, 2, (4, 64)),
        (("amx",), FIT_SHAPE, 2, (2048, 4096)),
        (tuple(KERNELS), FIT_SHAPE, 1, (1, 16, 256)),
        (("amx", "fp32_lut"), "gpt-oss-120b", 2, (1, 16, 256, 2048)),
        (("amx", "fp32_lut"), "Qwen3-30B-A3B", 2, (1, 32, 512, 4096)),
        (("fp32_lut",), "V4-Flash", 2, (1, 64, 512)),
        (("fp32_lut",), "Mixtral-8x7B", 2, (1, 64)),
    )
    for backend in backends
    for tokens in calls
]
SECONDS_A_POINT = 0.5
#: A point is measured again, so often at most, if the machine multiplied at less than this share of its best: others used it.
QUIET_SHARE, ATTEMPTS = 0.85, 3


@dataclass(frozen=True)
class Point:
    """One measured call: medians over rounds. read, peak: the machine's limits in the same rounds."""

    backend: str
    shape: str
    threads: int
    tokens: int
    seconds: float
    read: float
    peak: float

    @property
    def case(self) -> tuple[str, str, int, int]:
        return self.backend, self.shape, self.threads, self.tokens

    def machine(self, call: float) -> Machine:
        hertz = self.peak / self.threads / KERNELS[self.backend][1]
        return Machine(self.threads, self.read, self.peak, hertz, call)


@dataclass(frozen=True)
class Measured:
    """call: seconds of a call with next to nothing to read and to compute."""

    cpu: str
    call: float
    points: tuple[Point, ...]


def run(backends: Iterable[str], progress: Callable[[str], object]) -> Measured:
    """Measure all points of these backends that can run here; what does not fit into memory is left out, and said."""
    points: list[Point] = []
    for name in dict.fromkeys(shape for _, shape, _, _ in FITS + CHECKS):
        cases = {b: found for b in backends if (found := [c for c in FITS + CHECKS if c[:2] == (b, name)])}
        experts = SHAPES[name].make(SHAPES[name].experts)
        for way in _ways(cases, experts):
            try:
                with way.table(experts) as table, MoELayer(experts, way.backend, way.activations) as layer:
                    for case in cases[way.backend]:
                        points.append(_point(layer, table, *case))
                        progress(f"{case}: {points[-1].seconds * 1e3:.2f} ms")
            except OutOfMemoryError as error:
                progress(f"{way.backend}, {name}: left out: {error}")
    return Measured(threads.cpu_name(), _call_seconds(), tuple(points))


def _ways(backends: Iterable[str], experts: ExpertWeights) -> Iterator[Way]:
    """Those of these backends that can run here, with the instruction sets of ISAS."""
    runnable = measure.backends_for(experts)
    for name in backends:
        if name in runnable:
            backend = ktmoe.backends.get(name)
            way = Way(name, ISAS[name], backend.lookup(experts).activations)
            with way.table(experts) as table:
                runs = table is not None
            if runs:
                yield way


def _point(layer: MoELayer, table, backend: str, name: str, count: int, tokens: int) -> Point:
    shape = SHAPES[name]
    ktmoe.set_num_threads(count)
    limits = measure.Limits(layer, table)
    best = max(limits.peak(measure.LEAST_SECONDS) for _ in range(10))
    for _ in range(ATTEMPTS):
        batches = measure.random_batches(tokens, shape.top_k, shape.experts, shape.hidden)
        result = measure.run(layer, limits, batches, seconds=SECONDS_A_POINT, least=2)
        if result.peak_limit >= QUIET_SHARE * best:
            break
    return Point(backend, name, count, tokens, result.seconds, result.read_limit, result.peak_limit)


def _call_seconds() -> float:
    """A call of one expert of 64 x 64 on 2 threads."""
    ktmoe.set_num_threads(2)
    took = []
    with MoELayer(synthetic.deepseek_v4_experts(num_experts=1, hidden=64, intermediate=64)) as layer:
        batch = next(measure.random_batches(1, 1, 1, 64))
        for _ in range(1000):
            start = time.perf_counter()
            layer.forward(batch.x, batch.ids, batch.weights)
            took.append(time.perf_counter() - start)
    return statistics.median(took)


def typical(measured: Measured, backend: str) -> Machine:
    """With 2 threads, medians over the points."""
    machines = [p.machine(measured.call) for p in measured.points if p.case[:3] == (backend, FIT_SHAPE, 2)]
    read, peak, hertz = (statistics.median(getattr(m, name) for m in machines) for name in ("read", "peak", "hertz"))
    return Machine(2, read, peak, hertz, measured.call)


def load(path: Path) -> Measured:
    saved = json.loads(path.read_text())
    return Measured(saved["cpu"], saved["call"], tuple(Point(**point) for point in saved["points"]))


def save(measured: Measured, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(measured), indent=1))
