"""What `ktmoe bench` and `ktmoe demo` share: a layer, its measured and checked calls, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ktmoe import measuring
from ktmoe.backends.base import Arenas
from ktmoe.cli import units
from ktmoe.errors import MissingTensorError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.loaders.base import find_layers, find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.measuring import LimitMeter
from ktmoe.measuring.inspection import top_k_of
from ktmoe.measuring.limits import Limits

#: Experts of a token in the synthetic layer, which has the shape of DeepSeek-V4-Flash's.
TOP_K = 6

#: The largest share of a limit that says something of a call. A larger one has one of _REASONS.
MOST_SHARE = 1.05
_BUSY = "others used the machine while this limit was measured"
_REASONS = {"read": f"{_BUSY}, or weights came from a cache", "peak": _BUSY}

_NOTES = (
    "all figures are medians over rounds, each with limits measured in it:",
    "  of read: of the bandwidth of reading packed weights",
    "  of peak: of the multiply peak",
    "error of bound: the worst of sampled outputs against a float64 reference; 100% is the most that rounding explains",
)


@dataclass(frozen=True)
class Row:
    """One line of the table. work: "decode" or "prefill". check: an error above 1 is wrong."""

    backend: str
    activations: str
    isa: str
    work: str
    result: measuring.Result
    check: measuring.Check

    @property
    def right(self) -> bool:
        return self.check.error <= 1

    @property
    def disturbed(self) -> list[str]:
        """The shares that say nothing, and why. Integer kernels of AVX2 multiply by another instruction than its peak."""
        shares = {"read": self.result.read_share}
        if self.isa != "avx2" or self.activations == "bf16":
            shares["peak"] = self.result.peak_share
        large = {name: share for name, share in shares.items() if share > MOST_SHARE}
        return [f"{self.what}: {units.percent(share)} of {name}: {_REASONS[name]}" for name, share in large.items()]

    @property
    def label(self) -> str:
        """The backend, and its activation mode where that is not exact."""
        return self.backend if self.activations == "bf16" else f"{self.backend} {self.activations}"

    @property
    def what(self) -> str:
        return f"{self.backend} {self.work}: {units.count(self.result.tokens, 'token')}"

    @property
    def wrong_words(self) -> str:
        return f"WRONG: {self.what}: an output is off by {self.check.error:.3g} times its bound"


def open_layer(path: Path, layer: int | str | None, top_k: int | None) -> tuple[Checkpoint, ExpertWeights, int]:
    """A layer's experts, by default the first's, and how many a token has, by default what the checkpoint says.

    The checkpoint stays open: the reference reads the experts again.
    """
    checkpoint = Checkpoint(path)
    layer = first_layer(checkpoint) if layer is None else layer
    experts = find_loader(checkpoint, layer=layer).load(checkpoint, layer)
    return checkpoint, experts, top_k_of(checkpoint, experts.num_experts, top_k)


def first_layer(checkpoint: Checkpoint) -> int | str:
    """The first layer that has routed experts. Raises MissingTensorError if there is none."""
    layer = next(iter(find_layers(checkpoint)), None)
    if layer is None:
        raise MissingTensorError(f"{checkpoint.path}: expected a layer with routed experts, found none")
    return layer


@contextmanager
def packed(
    experts: ExpertWeights,
    backend: str,
    step: Callable,
    activations: str = "auto",
    tuned_for: str = "decode",
    arenas: Arenas | None = None,
) -> Iterator[MoELayer]:
    with step(f"load for {backend}", experts.nbytes) as draw:
        layer = MoELayer(experts, backend, activations, tuned_for=tuned_for, progress=draw, arenas=arenas)
    with layer:
        yield layer


class Subject:
    """A packed layer that is measured. step: of ktmoe.progress_bar.steps. top_k: experts of a token."""

    def __init__(self, experts: ExpertWeights, layer: MoELayer, isa: str, limits: LimitMeter, top_k: int, step: Callable):
        self.layer, self.limits = layer, limits
        self._experts, self._isa, self._top_k, self._step = experts, isa, top_k, step

    def row(self, work: str, tokens: int, seconds: float, checked: int) -> Row:
        """Measure calls of so many tokens for about so long, and check that many tokens of one."""
        layer, experts = self.layer, self._experts
        batches = measuring.random_batches(tokens, self._top_k, experts.num_experts, experts.hidden)
        what = f"{layer.backend} {work}, {units.count(tokens, 'token')}"
        with self._step(f"measure {what}") as draw:
            result = measuring.run(layer, self.limits, batches, seconds=seconds, progress=lambda share: draw(share, 1.0))
        with self._step(f"check {what}"):
            check = measuring.check(experts, layer, next(batches), tokens=checked)
        return Row(layer.backend, layer.activations, self._isa, work, result, check)


def describe(experts: ExpertWeights, top_k: int) -> str:
    formats = sorted({experts.formats[projection].description for projection in PROJECTIONS})
    shape = f"{experts.num_experts} experts of {experts.hidden} x {experts.intermediate}"
    return f"{experts.name}: {shape}, {', '.join(formats)}, {units.gb(experts.nbytes)}, top-{top_k}"


def limits(rows: list[Row]) -> list[Limits]:
    """The limits of each instruction set, medians over its rows."""
    found: dict[str, list[measuring.Result]] = {}
    for row in rows:
        found.setdefault(row.isa, []).append(row.result)
    return [
        Limits(isa, statistics.median(r.read_limit for r in results), statistics.median(r.peak_limit for r in results))
        for isa, results in found.items()
    ]


def notes(rows: list[Row]) -> list[str]:
    """The machine, its limits, what the table's heads mean, and which figures others disturbed."""
    disturbed = [f"DISTURBED: {words}" for row in rows for words in row.disturbed]
    return [*units.machine(limits(rows)), *_NOTES, *disturbed]


def call(row: Row) -> dict:
    """What a row measured, under the names of the results files. Shares are of 1."""
    r = row.result
    return {
        "tokens": r.tokens,
        "ms": r.seconds * 1e3,
        "gb_s": r.bytes_rate / 1e9,
        "of_read": r.read_share,
        "gflop_s": r.flops_rate / 1e9,
        "of_peak": r.peak_share,
    }


def table(rows: list[Row]) -> Table:
    """The rows as a table, at most 80 columns wide."""
    drawn = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1), pad_edge=False)
    drawn.add_column("\nbackend")  # with its mode it may take two lines
    heads = ("\ntokens", "\nms", "\ntokens/s", "\nGB/s", "of\nread", "\nGFLOP/s", "of\npeak", "error\nof bound")
    for head in heads:
        drawn.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        r = row.result
        drawn.add_row(
            row.label,
            str(r.tokens),
            units.number(r.seconds * 1e3),
            units.number(r.tokens / r.seconds),
            f"{r.bytes_rate / 1e9:.2f}",
            units.percent(r.read_share),
            units.number(r.flops_rate / 1e9),
            units.percent(r.peak_share),
            f"{100 * row.check.error:.2g}%" if row.right else "[red]WRONG[/red]",
        )
    return drawn


def console() -> Console:
    """stdout, wide enough for the table where it is no terminal."""
    found = Console()
    return found if found.is_terminal else Console(width=100)


def print_text(to: Console, lines: list[str]) -> None:
    to.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
