"""The cost model beside a results file: finds each kernel's three numbers by four calls, and predicts the other calls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench import cost_model
from bench.cases import EVERYWHERE
from bench.cost_model import Kernel, Machine
from bench.models import Model, models
from bench.results_file import Results

#: What kernels are by construction, by instruction set and activations.
KERNELS = {
    ("amx", "bf16"): Kernel(tile_rows=16, pass_rows=48, x_bytes=2, x_by_slot=True),
    ("avx512f", "bf16"): Kernel(tile_rows=1, pass_rows=192, x_bytes=4, x_by_slot=False),
    ("avx512_bf16", "bf16"): Kernel(tile_rows=1, pass_rows=192, x_bytes=2, x_by_slot=False),
    ("avx2", "int16"): Kernel(tile_rows=1, pass_rows=192, x_bytes=2, x_by_slot=False),
}
#: The calls of EVERYWHERE that the three numbers are found by, (list of a results file's layer, tokens or rows).
FITTED = {("decode", 1), ("decode", 16), ("per_expert", 6), ("per_expert", 96)}
#: What is searched for the three numbers.
RANGES = {"decode_ns": (0.0, 0.4), "efficiency": (0.1, 1.2), "overlap": (0.0, 1.0)}


@dataclass(frozen=True)
class Call:
    """A measured call, with the machine's limits of its own rounds where they were recorded."""

    kernel: tuple[str, str]
    what: tuple[str, int]
    shape: Model
    tokens: int
    machine: Machine
    seconds: float

    @property
    def fitted(self) -> bool:
        return self.shape.name == EVERYWHERE and self.what in FITTED

    def predicted(self, kernel: Kernel) -> float:
        """The predicted time as a multiple of the measured one."""
        return cost_model.seconds(self.shape, self.tokens, kernel, self.machine) / self.seconds


def calls(results: Results) -> Iterator[Call]:
    """The calls of the kernels in KERNELS."""
    for layer in results.entries("layer"):
        kernel = layer["isa"], layer["activations"]
        if kernel not in KERNELS or layer["model"] not in models():
            continue
        if kernel[0] == "amx" and layer["weights"] == "INT4":
            continue  # exact ones run avx512f's kernels or have two numbers a weight; folded ones round while decoding
        shape = replace(models()[layer["model"]], experts=layer["experts"])
        for what in ("decode", "prefill", "per_expert"):
            for point in layer.get(what, ()):
                if found := _call(results, kernel, what, shape, point):
                    yield found


def _call(results: Results, kernel: tuple[str, str], what: str, shape: Model, point: dict) -> Call | None:
    """A call of a results file; None where the file lacks a limit."""
    number = point.get("tokens") or point["rows"]
    if what == "per_expert":
        shape = replace(shape, experts=point["experts"])
    tokens = number * shape.experts // shape.top_k if what == "per_expert" else number
    limits = results.data.get("limits", {})
    read = _limit(point, "gb_s", "of_read") or limits.get("read_gb_s")
    peak = _limit(point, "gflop_s", "of_peak") or limits.get("multiply_gflop_s", {}).get(kernel[0])
    if "ms" in point:
        seconds = point["ms"] / 1e3
    elif "gflop_s" in point:
        seconds = tokens * shape.top_k * shape.slot_flops / point["gflop_s"] / 1e9
    else:
        used = cost_model.distinct_experts(shape.experts, shape.top_k, tokens)
        seconds = used * shape.expert_bytes / point["gb_s"] / 1e9
    if not read or not peak:
        return None
    machine = Machine(results.data["cpu"]["threads"], read * 1e9, peak * 1e9)
    return Call(kernel, (what, number), shape, tokens, machine, seconds)


def _limit(point: dict, rate: str, share: str) -> float | None:
    return point[rate] / point[share] if rate in point and share in point else None


def fit(base: Kernel, measured: list[Call]) -> Kernel:
    """The kernel whose predictions are nearest to the measured calls, in squares of logarithms."""
    from scipy import optimize  # only whoever measures needs it

    def error(numbers) -> float:
        kernel = replace(base, **dict(zip(RANGES, map(float, numbers), strict=True)))
        return sum(math.log(call.predicted(kernel)) ** 2 for call in measured)

    found = optimize.differential_evolution(error, list(RANGES.values()), rng=0)
    return replace(base, **{name: round(float(number), 3) for name, number in zip(RANGES, found.x, strict=True)})


def fits(results: Results) -> list[dict]:
    """A results file's `cost`: the numbers of each kernel that all calls of FITTED were measured with."""
    measured, found = list(calls(results)), []
    for name, base in KERNELS.items():
        mine = [call for call in measured if call.kernel == name and call.fitted]
        if {call.what for call in mine} == FITTED:
            kernel = fit(base, mine)
            found.append({"isa": name[0], "activations": name[1], **{number: getattr(kernel, number) for number in RANGES}})
    return found


def kernels(results: Results) -> dict[tuple[str, str], Kernel]:
    """KERNELS, with the numbers that a results file has."""
    found = {}
    for cost in results.entries("cost"):
        name = cost["isa"], cost["activations"]
        if name in KERNELS:
            found[name] = replace(KERNELS[name], **{number: cost[number] for number in RANGES})
    return found
