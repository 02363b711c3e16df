"""The pictures of a format, from its result alone: the roofline, and bars against the peers."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.peers.formats import file_stem
from bench.peers.rounds import figures

OURS = ("#0b6e4f", "#2a9d8f", "#57a773", "#7fb069", "#a3b18a", "#c2c5aa")
PEERS = {"kt-kernel": ("#d1495b", "s"), "ggml": ("#edae49", "D"), "torch": ("#7d6b91", "^")}
OTHER = ("#888888", "v")
TINT = "#bfe3d0"
INK, PALE = "#222222", "#8a8a8a"
#: The instruction of each table of kernels, as readers know it.
INSTRUCTIONS = {
    "amx": "AMX TDPBF16PS",
    "avx512f": "AVX-512 FMA",
    "avx512_bf16": "VDPBF16PS",
    "avx512_vnni": "VPDPBUSD, AVX-512",
    "avx_vnni": "VPDPBUSD, AVX",
    "avx2": "AVX2 FMA",
    "portable": "portable C",
}
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
    """The result lacks what a picture shows."""


def draw(result: dict, name: str, folder: Path) -> Path:
    """Write one of PICTURES into a folder, which is made if need be. The file's name has the format, too."""
    file = folder / f"{file_stem(name, result['shape']['weights'])}.png"
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 5.2), layout="constrained")
        PICTURES[name](result, figure.add_subplot())
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


def _roofline(result: dict, axes: Axes) -> None:
    owners, rounds = _owners(result), [row for point in result["points"] for row in point["rounds"]]
    if not rounds:
        raise NothingToDrawError("no round was measured")
    series = {key: [figures(result, point, key) for point in result["points"]] for key in owners.get("ktmoe", [])}
    for owner, keys in owners.items():
        if owner != "ktmoe":
            best = [_best(result, point, keys) for point in result["points"]]
            series[owner] = [found[1] if found else None for found in best]
    series = {name: [row for row in rows if row] for name, rows in series.items()}
    series = {name: rows for name, rows in series.items() if rows}

    read = statistics.median(row["read"] for row in rounds)
    used = [p["about"].get("kernels") for p in result["participants"].values()]
    peaks = {name: statistics.median(r["peaks"][name] for r in rounds) for name in rounds[0]["peaks"] if name in used}
    left = min(row["intensity"] for rows in series.values() for row in rows) / 1.6
    right = max(row["intensity"] for rows in series.values() for row in rows) * 2.2
    right = max(right, 1.6 * max(peaks.values(), default=0.0) / read)
    for (name, peak), at in zip(peaks.items(), _apart([*peaks.values()]), strict=True):
        axes.plot([max(left, peak / read), right], [peak / 1e9] * 2, color=PALE, linewidth=1, zorder=1)
        label = f"{INSTRUCTIONS.get(name, name)}\n{_rate(peak)}"
        axes.text(right * 1.03, at / 1e9, label, ha="left", va="center", fontsize=8, color=PALE, linespacing=1.0)
    top = max(peaks.values(), default=read * right)
    axes.plot([left, top / read], [left * read / 1e9, top / 1e9], color=PALE, linewidth=1, zorder=1)

    ours = 0
    for name, rows in sorted(series.items(), key=lambda item: (item[0] in owners, item[0] != result["base"], item[0])):
        x, y = [row["intensity"] for row in rows], [row["flops_rate"] / 1e9 for row in rows]
        if name in owners:
            color, marker = PEERS.get(name, OTHER)
            axes.plot(x, y, color=color, marker=marker, markersize=6, linewidth=1.1, linestyle="--", label=name, zorder=3)
        else:
            width, size = (2.4, 8) if name == result["base"] else (1.2, 5)
            label = f"{_short(name)} (auto)" if name == result["base"] else _short(name)
            color = OURS[min(ours, len(OURS) - 1)]
            axes.plot(x, y, color=color, marker="o", markersize=size, linewidth=width, label=label, zorder=4 - 0.1 * ours)
            ours += 1
    axes.set(xscale="log", yscale="log", xlim=(left, right))
    axes.set_xlabel("FLOPs per byte of packed weights read  (one token on the left, long prefill on the right)")
    axes.set_ylabel("GFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.grid(True, which="major", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", ncols=2, fontsize=8.5)
    _title(axes, result, "How near to the machine's limits")
    at = left * 1.25
    axes.text(
        at,
        1.1 * at * read / 1e9,
        f"memory, {read / 1e9:.0f} GB/s",
        rotation=math.degrees(math.atan2(read / 1e9, 1.0)),  # of the line's direction in data
        rotation_mode="anchor",
        transform_rotates_text=True,
        fontsize=8,
        color=PALE,
    )


def _apart(values: list[float], least: float = 1.42) -> list[float]:
    """Where to put labels of lines at these heights, in their order: at least a factor apart."""
    order = sorted(range(len(values)), key=values.__getitem__)
    places = list(values)
    for below, above in itertools.pairwise(order):
        places[above] = max(places[above], places[below] * least)
    return places


def _rate(flops: float) -> str:
    return f"{flops / 1e12:.1f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.0f} GFLOP/s"


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
    return PEERS.get(owner, OTHER)[0]


PICTURES = {"roofline": _roofline, "peers": _bars}
