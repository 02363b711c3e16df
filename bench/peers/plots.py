"""The picture of a format, from its result alone: how many times as fast as the fastest peer everyone is."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.peers.formats import file_stem
from bench.peers.rounds import figures

OURS = ("#0b6e4f", "#2a9d8f", "#57a773", "#7fb069", "#a3b18a", "#c2c5aa")
PEERS = {"kt-kernel": "#d1495b", "ggml": "#edae49", "torch": "#7d6b91"}
OTHER = "#888888"
TINT = "#bfe3d0"
INK, PALE = "#222222", "#8a8a8a"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


class NothingToDrawError(Exception):
    """The result lacks what the picture shows."""


def draw(result: dict, folder: Path) -> Path:
    """Write the picture into a folder, which is made if need be. The file's name has the format."""
    file = folder / f"{file_stem('peers', result['shape']['weights'])}.png"
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 5.2), layout="constrained")
        _bars(result, figure.add_subplot())
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=180)
    return file


def _title(axes: Axes, result: dict, text: str) -> None:
    machine, shape = result["machine"], result["shape"]
    where = f"{machine['cpu']}, {machine['threads']} threads, {result['date']}"
    experts = f"{shape['experts']} {shape['weights']} experts of {shape['hidden']} x {shape['intermediate']}"
    what = f"one layer, {experts}, top-{shape['top_k']}"
    axes.set_title(text, loc="left", fontsize=13, fontweight="bold", pad=24)
    axes.text(0, 1.025, f"{what}; {where}", transform=axes.transAxes, fontsize=9, color=PALE)


def _best(result: dict, point: dict, keys: list[str]) -> tuple[str, dict] | None:
    """The fastest of some participants at a point, with its figures."""
    rows = {key: row for key in keys if (row := figures(result, point, key))}
    key = min(rows, key=lambda key: rows[key]["seconds"], default=None)
    return (key, rows[key]) if key else None


def _owners(result: dict) -> dict[str, list[str]]:
    """Participants by whose they are."""
    owners: dict[str, list[str]] = {}
    for key, participant in result["participants"].items():
        owners.setdefault(participant["owner"], []).append(key)
    return owners


def _bars(result: dict, axes: Axes) -> None:
    owners = _owners(result)
    peers = [owner for owner in owners if owner != "ktmoe"]
    wide = 0.3
    narrow = (0.86 - wide) / max(1, len(peers))
    names, places, tallest = [], [], 0.0
    for place, point in enumerate(result["points"]):
        base = figures(result, point, result["base"])
        found = {owner: _best(result, point, owners[owner]) for owner in peers}
        rows = {owner: best[1] for owner, best in found.items() if best and best[1]["ratio"]}
        if base is None or not rows:
            continue
        lead = min(row["ratio"] for row in rows.values())
        ours = _best(result, point, owners["ktmoe"])
        fastest = lead / (ours[1]["ratio"] or 1.0)
        left = place - 0.43 + wide / 2
        if fastest > 1.03 * lead:
            axes.bar(left, fastest, wide * 0.95, color=TINT, zorder=2)
            name = _short(ours[0]).removeprefix("ktmoe ")
            axes.text(left, fastest, f"{fastest:.1f}x\n{name}", ha="center", va="bottom", fontsize=8, color=OURS[1])
        axes.bar(left, lead, wide * 0.95, color=OURS[0], zorder=3)
        inside = fastest > 1.03 * lead
        axes.annotate(
            f"{lead:.1f}x",
            (left, lead),
            xytext=(0, -3 if inside else 2),
            textcoords="offset points",
            ha="center",
            va="top" if inside else "bottom",
            fontsize=9.5,
            fontweight="bold",
            color="white" if inside else OURS[0],
            zorder=5,
        )
        for number, owner in enumerate(peers, 1):
            middle = left + wide / 2 + (number - 0.5) * narrow
            if owner in rows:
                axes.bar(middle, lead / rows[owner]["ratio"], narrow * 0.92, color=_color(owner), zorder=2)
            else:
                axes.text(middle, 0.02, "none", ha="center", va="bottom", fontsize=7, rotation=90, color=PALE)
        tallest = max(tallest, fastest, lead)
        names.append(f"{_words(point)}\nktmoe {base['tokens_rate']:,.0f} tokens/s")
        places.append(place)
    if not places:
        raise NothingToDrawError("at no point were ktmoe and a peer measured")
    axes.axhline(1, color=PALE, linewidth=1, linestyle=":", zorder=1)
    axes.bar(0, 0, color=OURS[0], label=f"{_short(result['base'])}, as auto takes it")
    axes.bar(0, 0, color=TINT, label="ktmoe, its fastest backend there")
    for owner in peers:
        axes.bar(0, 0, color=_color(owner), label=f"{owner}, its fastest way")
    axes.set_xticks(places, names, fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, tallest * 1.3)
    axes.set_ylabel("speed, fastest peer = 1")
    axes.grid(True, axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", ncols=2, fontsize=9)
    _title(axes, result, "Times as fast as the fastest peer")


def _words(point: dict) -> str:
    return f"{point['name'].partition('-')[0]}\n{point['tokens']} token{'s' * (point['tokens'] > 1)}"


def _short(key: str) -> str:
    """A participant of ours, by its mode only where it is another than the exact one."""
    return key.removesuffix(" bf16")


def _color(owner: str) -> str:
    return PEERS.get(owner, OTHER)
