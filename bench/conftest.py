"""Layers to measure, what is recorded of each measurement, and the table at the end.

Every backend, on the best of its instruction sets and in each of its activation modes, with each weight format that it has;
and every instruction set with MXFP4. Shapes are DeepSeek-V4-Flash's for all formats, so that they compare: hidden 4096,
intermediate 2048, top-6; 64 experts of 4 bits are 0.86 GB packed, 32 of bfloat16 1.6 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import ktmoe
from ktmoe import measure, synthetic, threads
from ktmoe.backends.base import choose
from ktmoe.backends.native import NativeBackend
from ktmoe.experts import ExpertWeights
from ktmoe.formats import BF16, MXFP4, int4
from ktmoe.layer import MoELayer

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 64, 4096, 2048, 6
SHAPE = {"hidden": HIDDEN, "intermediate": INTERMEDIATE}
FORMATS = {
    "MXFP4": (MXFP4, lambda: synthetic.deepseek_v4_experts(num_experts=EXPERTS, **SHAPE)),
    "INT4": (int4(32), lambda: synthetic.kimi_k2_experts(num_experts=EXPERTS, **SHAPE)),
    "BF16": (BF16, lambda: synthetic.qwen3_experts(num_experts=EXPERTS // 2, **SHAPE)),
}


@dataclass(frozen=True)
class Case:
    """What to measure. isa: one of the backend's."""

    format: str
    backend: str
    isa: str
    activations: str
    scales: str

    @property
    def id(self) -> str:
        words = [self.format, self.backend, self.isa, self.activations]
        return "-".join([*words, *([self.scales] if self.scales != "exact" else [])])


def cases() -> Iterator[Case]:
    """All that run on this CPU, a backend's on worse instruction sets last; what several backends share, once."""
    shared = set()
    for format, (weight_format, _) in FORMATS.items():
        for name in ktmoe.backends.available():
            backend = ktmoe.backends.get(name)
            if not isinstance(backend, NativeBackend):
                continue
            for mode in backend.activations:
                tables = [table for table in backend.usable(mode)[0] if (format, table.name, mode) not in shared]
                shared |= {(format, isa, mode) for isa in backend.also.get(mode, ())}
                for table in tables if format == "MXFP4" else tables[:1]:
                    if table.serves(weight_format, mode):
                        yield Case(format, name, table.name, mode, "exact")
                    if _rounds(table, weight_format, mode):
                        yield Case(format, name, table.name, mode, "folded")


def _rounds(table, weight_format, mode) -> bool:
    """Whether it has kernels that round scaled weights to bfloat16."""
    scale = weight_format.scale
    kernels = {(family, kind, activations) for family, kind, _, activations, folded in table.kernels() if folded}
    return scale is not None and scale.kind == "bf16" and (weight_format.family, "bf16", mode) in kernels


@dataclass(frozen=True)
class Subject:
    """A layer to measure, and what the machine allows it."""

    case: Case
    experts: ExpertWeights
    layer: MoELayer
    limits: measure.Limits


@pytest.fixture(scope="session", params=cases(), ids=lambda case: case.id)
def subject(request):
    """Experts packed for each case in turn."""
    case = request.param
    backend = ktmoe.backends.get(case.backend)
    experts = FORMATS[case.format][1]()
    with pytest.MonkeyPatch.context() as patch:
        if case.activations in backend.also:
            patch.setattr(backend, "also", {case.activations: (case.isa,)})
        else:
            patch.setattr(backend, "isas", (case.isa,))
        table = backend.table(experts, case.activations)
        with MoELayer(experts, case.backend, case.activations, scales=case.scales) as layer:
            yield Subject(case, experts, layer, measure.Limits(layer, table))


@pytest.fixture
def machine(benchmark):
    """Records the machine with a benchmark."""
    benchmark.extra_info.update(cpu=threads.cpu_name(), threads=ktmoe.get_num_threads(), chosen=choose("auto")[0])


def pytest_terminal_summary(terminalreporter, config):
    session = getattr(config, "_benchmarksession", None)
    rows = [benchmark.extra_info for benchmark in session.benchmarks] if session else []
    rows = [row for row in rows if "kind" in row]  # a test that failed recorded nothing
    console = Console(width=180)
    with console.capture() as capture:
        for kind, left, heads, cells in TABLES:
            table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
            for number, head in enumerate(heads):
                table.add_column(head, justify="left" if number < left else "right", no_wrap=True)
            for row in rows:
                if row["kind"] == kind:
                    table.add_row(*cells(row))
            if table.row_count:
                console.print(table)
        for row in rows[:1]:
            console.print(f"{row['cpu']}, {row['threads']} threads. Medians over rounds; each round measures its own limits.")
    terminalreporter.write("\n" + capture.get() if rows else "")


def _forward_row(row) -> tuple[str, ...]:
    return (
        row["format"],
        row["backend"],
        row["isa"],
        row["activations"],
        row["scales"],
        row["work"],
        f"{row['tokens']}",
        f"{row['experts']}",
        f"{row['ms']:.2f}",
        f"{row['read_gb_s']:.2f}",
        f"{row['share_of_read_bandwidth']:.1%}",
        f"{row['gflop_s']:.1f}",
        f"{row['share_of_multiply_peak']:.1%}",
        f"{row['limit_read_gb_s']:.1f}, {row['limit_gflop_s']:.0f}",
        f"{100 * row['worst_error_of_bound']:.2g}%",
        f"{100 * row['bound_of_output']:.2g}%",
    )


def _load_row(row) -> tuple[str, ...]:
    return row["work"], row["figure"], row["contract"]


TABLES = (
    (
        "forward",
        6,
        (
            "weights",
            "backend",
            "ISA",
            "mode",
            "scales",
            "work",
            "tokens",
            "experts",
            "ms",
            "GB/s",
            "of read",
            "GFLOP/s",
            "of peak",
            "limits",
            "error/bound",
            "bound/output",
        ),
        _forward_row,
    ),
    ("load", 3, ("loading", "measured", "contract"), _load_row),
)
