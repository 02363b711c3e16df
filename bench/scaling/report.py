"""The tables: a backend's numbers, predictions beside what was measured, and predictions for other CPUs."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from bench import cost_model
from bench.cost_model import Kernel, Machine
from bench.cpus import Cpu
from bench.models import Model
from bench.scaling.fit import Row
from bench.scaling.points import FIT_SHAPE, SHAPES, Measured, typical

MODELS = ("V4-Flash", "V4-Pro", "gpt-oss-20b", "gpt-oss-120b")
PREFILL_TOKENS = 2048
#: Of nominal memory bandwidth: what AMD and Intel claimed for STREAM on EPYC 7601 and Xeon 8176 (250 of 307, 199 of 256 GB/s;
#: AnandTech, 2017). Not measured here: a virtual machine does not know its memory.
SUSTAINED = 0.8
#: Seconds that each thread adds to a call by what it has to take and to say at counters and barriers: an assumption.
CALL_PER_THREAD = 0.1e-6


@dataclass(frozen=True)
class Cells:
    """A table's. names: so many columns are words, the others are numbers."""

    heads: tuple[str, ...]
    names: int
    rows: list[tuple[str, ...]]


def kernel_table(measured: Measured, kernels: dict[str, Kernel]) -> Cells:
    heads = (
        "backend",
        "decoding, cycles a byte",
        "efficiency",
        "overlap",
        "read, GB/s",
        "peak, GFLOP/s",
        "crossover, tokens an expert",
    )
    rows = []
    for backend, kernel in kernels.items():
        machine = typical(measured, backend)
        numbers = f"{kernel.decode_cycles:.2f}", f"{kernel.efficiency:.2f}", f"{kernel.overlap:.2f}"
        limits = f"{machine.read / 1e9:.0f}", f"{machine.peak / 1e9:.0f}"
        rows.append((f"`{backend}`", *numbers, *limits, f"{cost_model.crossover(SHAPES[FIT_SHAPE], kernel, machine):.1f}"))
    return Cells(heads, 1, rows)


def check_table(rows: list[Row]) -> Cells:
    """Calls of one backend, shape and thread count in a line; what the numbers were found with is left out."""
    heads = ("backend", "experts", "threads", "tokens: measured ms, predicted / measured", "median", "worst")
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if not row.fitted:
            groups.setdefault((row.point.backend, row.point.shape, row.point.threads), []).append(row)
    cells = []
    for (backend, shape, count), group in groups.items():
        calls = "; ".join(f"{r.point.tokens}: {_digits(r.point.seconds * 1e3, 3)}, {r.ratio:.2f}" for r in group)
        cells.append((f"`{backend}`", shape, f"{count}", calls, *_median_and_worst(group)))
    return Cells(heads, 4, cells)


def _median_and_worst(rows: list[Row]) -> tuple[str, str]:
    ratios = [row.ratio for row in rows]
    return f"{statistics.median(ratios):.2f}", f"{max(ratios, key=lambda ratio: abs(math.log(ratio))):.2f}"


def summary(rows: list[Row]) -> str:
    """One sentence: how well the checks were predicted."""
    checks = [row for row in rows if not row.fitted]
    tiles = [row for row in checks if row.point.backend == "amx" and SHAPES[row.point.shape].weights == "BF16"]
    parts = []
    for what, group in (
        ("", [row for row in checks if row not in tiles]),
        (" of `amx` with bfloat16 weights", tiles),
    ):
        if group:
            off = [abs(math.log(row.ratio)) for row in group]
            median, worst = math.exp(statistics.median(off)) - 1, _median_and_worst(group)[1]
            parts.append(f"{len(group)} calls{what}: off by {median:.0%} in the median, the worst predicted / measured {worst}")
    return "; ".join(parts) + "."


def prediction_table(cpus: dict[str, Cpu], kernels: dict[str, Kernel], call: float) -> Cells:
    """Tokens a second of all layers' routed experts, decode / prefill; a dash where they do not fit into the CPU's memory."""
    heads = ("CPU", "backend", "threads", "GB/s", "TFLOP/s", *MODELS)
    rows = []
    for name, cpu in cpus.items():
        if cpu.backend not in kernels:
            continue
        kernel, machine = kernels[cpu.backend], cpu.machine(SUSTAINED, call, CALL_PER_THREAD)
        rates = [_rates(SHAPES[model], kernel, machine, cpu.memory_gb) for model in MODELS]
        limits = f"{machine.read / 1e9:.0f}", f"{machine.peak / 1e12:.1f}"
        rows.append((name, f"`{cpu.backend}`", f"{machine.threads}", *limits, *rates))
    return Cells(heads, 2, rows)


def _rates(model: Model, kernel: Kernel, machine: Machine, memory_gb: float) -> str:
    if model.nbytes > memory_gb * 1e9:
        return "-"
    calls = [(tokens, model.layers * cost_model.seconds(model, tokens, kernel, machine)) for tokens in (1, PREFILL_TOKENS)]
    return " / ".join(_digits(tokens / took, 2) for tokens, took in calls)


def _digits(value: float, digits: int) -> str:
    """Rounded to so many digits, without an exponent."""
    return f"{float(f'{value:.{digits}g}'):.10g}"
