"""A picture of a whole model beside llama.cpp, from a result alone."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.engines import whole_report
from bench.peers.plots import INK, OURS, PALE, STYLE, NothingToDrawError
from bench.results_file import file_stem, short_name

#: Of llama.cpp's ways.
THEIRS = ("#d1495b", "#e8998d")


def draw(result: dict, comparison: dict, folder: Path) -> Path:
    """Write the picture of one comparison into a folder, which is made if need be.

    Raises NothingToDrawError if nothing was measured.
    """
    found = {way: figures for way in comparison["ways"] if (figures := whole_report.figures(comparison, way))}
    if not found:
        raise NothingToDrawError(f"{comparison['model']}: no way was measured")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 5.2), layout="constrained")
        parts = [part for part in ("decode", "prefill") if any(figures[part] for figures in found.values())]
        for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
            _bars(axes, part, found, comparison)
        machine = f"{short_name(result['cpu']['name'])}, {result['cpu']['threads']} threads, {result['date']}"
        layers = f"{comparison['layers']} of {comparison['of_layers']} layers"
        figure.suptitle(f"{comparison['model']}, {layers}: {machine}", x=0.01, ha="left", fontsize=12, fontweight="bold")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8.5)
        folder.mkdir(parents=True, exist_ok=True)
        name = file_stem(f"{comparison['comparison']} {comparison['model']}")
        file = folder / f"{name}.png"
        figure.savefig(file, dpi=180)
    return file


def _bars(axes: Axes, part: str, found: dict[str, dict], comparison: dict) -> None:
    """A group for each call; a line above a bar of decode is at what reading alone would allow."""
    calls = list(dict.fromkeys(call for figures in found.values() for call in figures[part]))
    colors = {"ktmoe": iter(OURS), "llama.cpp": iter(THEIRS)}
    width = 0.85 / len(found)
    for number, (way, figures) in enumerate(found.items()):
        places = [place + (number + 0.5) * width - 0.425 for place, call in enumerate(calls) if call in figures[part]]
        rows = [figures[part][call] for call in calls if call in figures[part]]
        rates = [row["rate"] for row in rows]
        axes.bar(places, rates, width * 0.92, color=next(colors[comparison["ways"][way]["owner"]]), label=way, zorder=2)
        for place, row in zip(places, rows, strict=True):
            axes.text(place, row["rate"], f"{row['rate']:.3g}", ha="center", va="bottom", fontsize=7, color=INK)
            if limit := row.get("of_limit"):
                axes.hlines(row["rate"] / limit, place - width / 2, place + width / 2, color=PALE, linewidth=1.2, zorder=3)
    axes.set_xticks(range(len(calls)), [_words(part, call) for call in calls], fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(f"{part}, tokens/s" + ("; line: the limit of reading" if part == "decode" else ""))
    axes.grid(True, axis="y", color="#eeeeee")
    axes.set_axisbelow(True)


def _words(part: str, call: int | tuple[int, int]) -> str:
    if part == "prefill":
        return f"{call:,} tokens"
    texts, after = call
    return f"{texts} text{'s' * (texts > 1)}\nafter {after:,}"
