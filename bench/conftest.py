"""Layers to measure, what is recorded of each measurement, and the table at the end.

Shapes are DeepSeek-V4-Flash's: 64 of its experts, hidden 4096, intermediate 2048, top-6, 0.86 GB packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import ktmoe
from ktmoe import measure, synthetic, threads
from ktmoe.backends.base import choose
from ktmoe.experts import ExpertWeights
from ktmoe.layer import MoELayer

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 64, 4096, 2048, 6


@dataclass(frozen=True)
class Subject:
    """A layer to measure, and what the machine allows it."""

    experts: ExpertWeights
    layer: MoELayer
    limits: measure.Limits
    isa: str


@pytest.fixture(scope="session", params=ktmoe.backends.ranked())
def subject(request):
    """The same experts, packed for each backend in turn."""
    backend = ktmoe.backends.get(request.param)
    if reason := backend.unavailable():
        pytest.skip(f"{request.param}: {reason}")
    experts = synthetic.deepseek_v4_experts(num_experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE)
    table = measure.backends_for(experts).get(request.param)
    if table is None:
        pytest.skip(f"{request.param}: {backend.unsupported(experts) or 'its limits cannot be measured'}")
    with MoELayer(experts, request.param) as layer:
        yield Subject(experts, layer, measure.Limits(layer, table), table.name)


@pytest.fixture
def machine(benchmark):
    """Records the machine with a benchmark."""
    benchmark.extra_info.update(cpu=threads.cpu_name(), threads=ktmoe.get_num_threads(), chosen=choose("auto")[0])


def pytest_terminal_summary(terminalreporter, config):
    session = getattr(config, "_benchmarksession", None)
    rows = [benchmark.extra_info for benchmark in session.benchmarks] if session else []
    rows = [row for row in rows if "kind" in row]  # a test that failed recorded nothing
    console = Console(width=130)
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
        row["backend"],
        row["isa"],
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
    )


def _load_row(row) -> tuple[str, ...]:
    return row["work"], row["figure"], row["contract"]


TABLES = (
    (
        "forward",
        3,
        ("backend", "ISA", "work", "tokens", "experts", "ms", "GB/s", "of read", "GFLOP/s", "of peak", "limits", "error/bound"),
        _forward_row,
    ),
    ("load", 3, ("loading", "measured", "contract"), _load_row),
)
