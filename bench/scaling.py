"""How cost grows, predicted and measured. `make scaling` measures this machine, finds three numbers of each backend, predicts
other calls and other CPUs with them, and prints tables; ARGS=--write puts them into docs/performance.md as well.
The model is cost_model.py's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import ktmoe
from bench import cost_model
from bench.cost_model import Kernel, Machine
from ktmoe import measure, synthetic, threads
from ktmoe.layer import MoELayer

HERE = Path(__file__).parent
POINTS = HERE.parent / ".benchmarks" / "scaling.json"
PERFORMANCE = HERE.parent / "docs" / "performance.md"
FIGURE = HERE.parent / "docs" / "img" / "scaling.png"

#: What kernels are by construction, and the FLOPs a cycle of their instruction on Intel's server cores, which tell the clock.
KERNELS = {
    "amx": (Kernel(tile_rows=16, pass_rows=48, x_bytes=2, x_by_slot=True), 1024),
    "fp32_lut": (Kernel(tile_rows=1, pass_rows=192, x_bytes=4, x_by_slot=False), 64),
    "avx512_bf16": (Kernel(tile_rows=1, pass_rows=192, x_bytes=2, x_by_slot=False), 32),
    "avx2": (Kernel(tile_rows=1, pass_rows=192, x_bytes=2, x_by_slot=False), 32),
}
#: What is searched for the three numbers.
RANGES = {"decode_cycles": (0.0, 1.0), "efficiency": (0.1, 1.2), "overlap": (0.0, 1.0)}

SHAPES = cost_model.read_shapes(HERE / "models.toml")
FIT_SHAPE = "V4-Flash, 64 experts"
SHAPES[FIT_SHAPE] = replace(SHAPES["V4-Flash"], experts=64)
MAKERS = {
    "MXFP4": synthetic.deepseek_v4_experts,
    "MXFP4, biases": synthetic.gpt_oss_experts,
    "INT4": synthetic.kimi_k2_experts,
    "BF16": synthetic.qwen3_experts,
}
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

MODELS = ("V4-Flash", "V4-Pro", "gpt-oss-20b", "gpt-oss-120b")
PREFILL_TOKENS = 2048
#: Of nominal memory bandwidth: what AMD and Intel claimed for STREAM on EPYC 7601 and Xeon 8176 (250 of 307, 199 of 256 GB/s;
#: AnandTech, 2017). Not measured here: a virtual machine does not know its memory.
SUSTAINED = 0.8
#: Seconds that each thread adds to a call by what it has to take and to say at counters and barriers: an assumption.
CALL_PER_THREAD = 0.1e-6


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


def run(backends: Iterable[str], progress: Callable[[Point], object]) -> Measured:
    """Measure all points of these backends."""
    points: list[Point] = []
    shapes = dict.fromkeys(shape for _, shape, _, _ in FITS + CHECKS)
    for name in shapes:
        shape = SHAPES[name]
        cases = {b: [c for c in FITS + CHECKS if c[:2] == (b, name)] for b in backends}
        if not any(cases.values()):
            continue
        sizes = {"hidden": shape.hidden, "intermediate": shape.intermediate}
        experts = MAKERS[shape.weights](num_experts=shape.experts, **sizes)
        tables = measure.backends_for(experts)
        for backend in (b for b in cases if cases[b] and b in tables):
            with MoELayer(experts, backend) as layer:
                for case in cases[backend]:
                    points.append(_point(layer, tables[backend], *case))
                    progress(points[-1])
    return Measured(threads.cpu_name(), _call_seconds(), tuple(points))


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


def fit(base: Kernel, samples: list[tuple[cost_model.Shape, int, Machine, float]]) -> Kernel:
    """The kernel whose predictions are nearest to measured (shape, tokens, machine, seconds), in squares of logarithms.

    A grid that narrows around its best point, since the predictions have kinks.
    """

    def error(kernel: Kernel) -> float:
        return sum(math.log(cost_model.seconds(s, t, kernel, m) / took) ** 2 for s, t, m, took in samples)

    best = base
    width = {name: (high - low) / 2 for name, (low, high) in RANGES.items()}
    middle = {name: (high + low) / 2 for name, (low, high) in RANGES.items()}
    for _ in range(24):
        values = [
            np.unique(np.clip(middle[name] + width[name] * np.linspace(-1, 1, 5), low, high)).tolist()
            for name, (low, high) in RANGES.items()
        ]
        tried = [replace(base, **dict(zip(RANGES, point, strict=True))) for point in itertools.product(*values)]
        best = min(tried, key=error)
        middle = {name: getattr(best, name) for name in RANGES}
        width = {name: w * 0.75 for name, w in width.items()}
    return best


@dataclass(frozen=True)
class Row:
    """A point, what was predicted for it, and whether the numbers were found with it."""

    point: Point
    predicted: float
    fitted: bool

    @property
    def ratio(self) -> float:
        return self.predicted / self.point.seconds


def fits(measured: Measured) -> dict[str, Kernel]:
    """Each measured backend's numbers."""
    found = {}
    for backend, (base, _) in KERNELS.items():
        points = [p for p in measured.points if p.backend == backend and p.case in FITS]
        if points:
            samples = [(SHAPES[p.shape], p.tokens, p.machine(measured.call), p.seconds) for p in points]
            found[backend] = fit(base, samples)
    return found


def compare(measured: Measured, kernels: dict[str, Kernel]) -> list[Row]:
    """All points beside their predictions, each with the machine's limits of the same rounds."""
    order = {case: number for number, case in enumerate(FITS + CHECKS)}
    points = sorted((p for p in measured.points if p.case in order), key=lambda p: order[p.case])
    return [
        Row(p, cost_model.seconds(SHAPES[p.shape], p.tokens, kernels[p.backend], p.machine(measured.call)), p.case in FITS)
        for p in points
    ]


Cells = tuple[tuple[str, ...], list[tuple[str, ...]]]  # heads, rows; the first columns of text are left-aligned


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
    return heads, rows


def typical(measured: Measured, backend: str) -> Machine:
    """With 2 threads, medians over the points."""
    machines = [p.machine(measured.call) for p in measured.points if p.case[:3] == (backend, FIT_SHAPE, 2)]
    read, peak, hertz = (statistics.median(getattr(m, name) for m in machines) for name in ("read", "peak", "hertz"))
    return Machine(2, read, peak, hertz, measured.call)


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
    return heads, cells


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


def prediction_table(cpus: dict[str, cost_model.Cpu], kernels: dict[str, Kernel], call: float) -> Cells:
    """Tokens a second of all layers' routed experts, decode / prefill; a dash where they do not fit into the CPU's memory."""
    heads = ("CPU", "backend", "threads", "GB/s", "TFLOP/s", *MODELS)
    rows = []
    for name, cpu in cpus.items():
        if cpu.backend not in kernels:
            continue
        kernel, machine = kernels[cpu.backend], cpu.machine(SUSTAINED, call, CALL_PER_THREAD)
        rates = [_rates(SHAPES[model], kernel, machine, cpu.memory_gb) for model in MODELS]
        limits = f"{machine.weight_read / 1e9:.0f}", f"{machine.peak / 1e12:.1f}"
        rows.append((name, f"`{cpu.backend}`", f"{machine.threads}", *limits, *rates))
    return heads, rows


def _rates(shape: cost_model.Shape, kernel: Kernel, machine: Machine, memory_gb: float) -> str:
    if shape.nbytes > memory_gb * 1e9:
        return "-"
    calls = [(tokens, shape.layers * cost_model.seconds(shape, tokens, kernel, machine)) for tokens in (1, PREFILL_TOKENS)]
    return " / ".join(_digits(tokens / took, 2) for tokens, took in calls)


def _digits(value: float, digits: int) -> str:
    """Rounded to so many digits, without an exponent."""
    return f"{float(f'{value:.{digits}g}'):.10g}"


def rich_table(cells: Cells) -> Table:
    heads, rows = cells
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if _is_number(rows, number) else "left")
    for row in rows:
        table.add_row(*(cell.strip("`") for cell in row))
    return table


def markdown_table(cells: Cells) -> str:
    heads, rows = cells
    lines = [heads, ["--:" if _is_number(rows, number) else "---" for number in range(len(heads))], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _is_number(rows: list[tuple[str, ...]], column: int) -> bool:
    return all(row[column][0].isdigit() or row[column] == "-" for row in rows) and ":" not in rows[0][column] and column > 0


def replace_part(text: str, name: str, part: str) -> str:
    """text with what stands between the marks of that name replaced."""
    begin, end = f"<!-- scaling: {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"expected the marks {begin.strip()!r} and {end!r}, found {'only the first' if found else 'neither'}")
    return before + begin + part + end + after


def draw(measured: Measured, kernels: dict[str, Kernel], path: Path) -> None:
    """Seconds of a call over tokens: predicted curves, measured points, and the two limits that bend them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shape = SHAPES[FIT_SHAPE]
    tokens = np.unique(np.geomspace(1, 4096, 120).round().astype(int)).tolist()
    figure, axes = plt.subplots(figsize=(7.2, 4.4), dpi=160, layout="constrained")
    for backend, color in (("fp32_lut", "#c2571a"), ("amx", "#1f5fa8")):
        points = [p for p in measured.points if p.case[:3] == (backend, FIT_SHAPE, 2)]
        if not points:
            continue
        machine, kernel = typical(measured, backend), kernels[backend]
        used = [cost_model.distinct_experts(shape.experts, shape.top_k, t) for t in tokens]
        flops = [t * shape.top_k * shape.slot_flops / machine.peak / kernel.efficiency for t in tokens]
        if backend == "fp32_lut":
            reading = [1e3 * shape.expert_bytes * u / machine.read for u in used]
            axes.plot(tokens, reading, color="0.55", lw=1, ls="--", label="reading alone")
        axes.plot(
            tokens, [1e3 * f for f in flops], color=color, lw=1, ls=":", label="multiplying alone" if backend == "amx" else None
        )
        curve = [1e3 * cost_model.seconds(shape, t, kernel, machine) for t in tokens]
        axes.plot(tokens, curve, color=color, lw=1.8, label=f"{backend}: predicted")
        for fitted, fill in ((True, color), (False, "white")):
            some = [p for p in points if (p.case in FITS) == fitted]
            label = f"{backend}: measured{', fitted to' if fitted else ''}"
            at = [p.tokens for p in some], [1e3 * p.seconds for p in some]
            axes.plot(*at, "o", ms=5.5, mfc=fill, mec=color, mew=1.4, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens in a call", ylabel="ms", ylim=(1.5, None))
    axes.set_xticks([4**i for i in range(7)], [f"{4**i}" for i in range(7)])
    axes.set_yticks([2, 10, 100, 1000, 5000], ["2", "10", "100", "1000", "5000"])
    axes.minorticks_off()
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def report(measured: Measured, write: bool, console: Console) -> None:
    """Print the tables, and with `write` put them and the figure into docs."""
    kernels = fits(measured)
    rows = compare(measured, kernels)
    parts = {
        "numbers": kernel_table(measured, kernels),
        "checks": check_table(rows),
        "predictions": prediction_table(cost_model.read_cpus(HERE / "cpus.toml"), kernels, measured.call),
    }
    for cells in parts.values():
        console.print(rich_table(cells))
    console.print(f"{measured.cpu}. A call costs {measured.call * 1e6:.1f} us at least. {summary(rows)}", highlight=False)
    if write:
        text = PERFORMANCE.read_text()
        for name, cells in parts.items():
            text = replace_part(text, name, markdown_table(cells) + (f"\n{summary(rows)}\n" if name == "checks" else ""))
        PERFORMANCE.write_text(text)
        draw(measured, kernels, FIGURE)


def load(path: Path) -> Measured:
    if not path.exists():
        raise SystemExit(f"{path} does not exist: nothing has been measured yet; leave out --saved")
    saved = json.loads(path.read_text())
    return Measured(saved["cpu"], saved["call"], tuple(Point(**point) for point in saved["points"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicts what layer calls cost, and checks it on this machine.")
    parser.add_argument("--backends", default=",".join(KERNELS), help="measure these, and keep what was measured of the others")
    parser.add_argument("--saved", action="store_true", help="measure nothing: tables of what was measured last")
    parser.add_argument("--write", action="store_true", help="put tables and figure into docs, too")
    arguments = parser.parse_args()
    chosen = arguments.backends.split(",")
    unknown = sorted(set(chosen) - set(KERNELS))
    if unknown:
        parser.error(f"--backends: expected some of {', '.join(KERNELS)}, found {', '.join(unknown)}")
    console = Console(width=None if Console().is_terminal else 200)
    if arguments.saved:
        measured = load(POINTS)
    else:
        measured = run(chosen, lambda p: console.print(f"{p.case}: {p.seconds * 1e3:.2f} ms", highlight=False))
        if set(chosen) != set(KERNELS) and POINTS.exists():
            kept = tuple(p for p in load(POINTS).points if p.backend not in chosen)
            measured = replace(measured, points=kept + measured.points)
        POINTS.parent.mkdir(exist_ok=True)
        POINTS.write_text(json.dumps(asdict(measured), indent=1))
    report(measured, arguments.write, console)


if __name__ == "__main__":
    main()
