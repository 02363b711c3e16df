"""The picture of `ktmoe bench`: decode beside the read bandwidth, and prefill beside the multiply peak, of the same run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ktmoe.cli import results, units
from ktmoe.cli.measurements import Row
from ktmoe.errors import InputError, UnavailableError
from ktmoe.files.atomic import AtomicFile
from ktmoe.messages import install

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: What a picture's name may end in.
KINDS = (".png", ".svg", ".pdf")
_BAR, _LIMIT, _PALE = "#2a9d8f", "#d1495b", "#777777"
#: Half the width of a bar, where the next one is 1 further.
_HALF = 0.3


def check(file: Path) -> None:
    """Raise InputError if a picture could not be written there, UnavailableError without matplotlib."""
    if file.suffix.lower() not in KINDS:
        raise InputError(f"{file}: expected a picture's name that ends in {', '.join(KINDS)}, found {file.suffix!r}")
    results.check_writable(file)
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise UnavailableError(f"--picture needs matplotlib, which is not installed: {install('picture')}") from None


def write(file: Path, rows: Sequence[Row], subject: str, machine: str) -> None:
    """Draw the rows of one backend and write the picture, whole or not at all. Raises OutputError.

    subject: the layer, in words. machine: likewise.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    decode, prefill = figure.subplots(1, 2)
    calls = {work: [row.result for row in rows if row.work == work] for work in ("decode", "prefill")}
    of_decode = [(r.tokens, r.bytes_rate, r.read_limit, r.read_share) for r in calls["decode"]]
    of_prefill = [(r.tokens, r.flops_rate, r.peak_limit, r.peak_share) for r in calls["prefill"]]
    _draw(decode, "Decode", "GB/s of packed weights", "read bandwidth", of_decode)
    _draw(prefill, "Prefill", "GFLOP/s", f"multiply peak of {rows[0].isa}", of_prefill)
    figure.suptitle(f"ktmoe bench: {rows[0].label}", x=0.01, ha="left", fontweight="bold")
    disturbed = [f"DISTURBED: {words}" for row in rows for words in row.disturbed]
    below = "\n".join([subject, machine, *disturbed])
    figure.supxlabel(below, x=0.01, ha="left", fontsize=8, color=_PALE)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=file.suffix.lower().lstrip("."), dpi=150)
    with AtomicFile(file.expanduser(), overwrite=True) as written:
        written.write(drawn.getvalue())


def _draw(axes: Axes, title: str, unit: str, limit: str, calls: list[tuple[int, float, float, float]]) -> None:
    """A bar for each call, of its rate, and a line across it, of the limit. calls: (tokens, rate, limit, share
    of it); rates and limits are a second's."""
    places = range(len(calls))
    rates, limits = [rate / 1e9 for _, rate, *_ in calls], [most / 1e9 for *_, most, _ in calls]
    axes.bar(places, rates, 2 * _HALF, color=_BAR, label="ktmoe")
    starts, ends = [place - _HALF for place in places], [place + _HALF for place in places]
    axes.hlines(limits, starts, ends, color=_LIMIT, linewidth=2.5, label=f"{limit}, in the same rounds")
    for place, rate, (*_, share) in zip(places, rates, calls, strict=True):
        axes.annotate(
            units.percent(share), (place, rate), (0, -3), textcoords="offset points", ha="center", va="top", color="white"
        )
    axes.set_xticks(places, [str(tokens) for tokens, *_ in calls])
    axes.set_ylim(0, 1.3 * max([1e-9, *rates, *limits]))
    axes.set(title=title, xlabel="tokens of a call", ylabel=unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
