"""The picture of docs/low-precision.md: the numbers that a block may have, and the errors of a layer."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.low_precision.layer import DATA
from bench.peers.plots import INK, OURS, PALE, STYLE
from ktmoe.weights.elements import E2M1, E4M3, Element

#: The largest number of the block that is shown: E2M1 has it exactly, with the scale 1.
LARGEST = 6.0
#: The modes of the second part, from small errors to large ones.
SHOWN = ("int16", "int8", "mxfp8", "mxfp8/mxfp4", "mxfp4")
MARKERS = {"Gaussian": ("o", OURS[0]), "heavy tails": ("s", "#edae49"), "outlier channels": ("D", "#d1495b")}


def draw(data: dict, file: Path) -> Path:
    """data: as results.SCHEMA has it."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
        _numbers(left)
        _errors(right, data)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=150)
    return file


def numbers() -> dict[str, np.ndarray]:
    """The numbers from 0 to LARGEST that a block with this largest one may have, by mode."""
    e4m3 = np.exp2(np.ceil(np.log2(LARGEST / 448))) * _sizes(E4M3)
    return {"int8": LARGEST / 127 * np.arange(128), "mxfp8": e4m3[e4m3 <= LARGEST], "mxfp4": _sizes(E2M1)}


def _sizes(element: Element) -> np.ndarray:
    return np.unique([abs(value) for value in element.values if value is not None])


def _numbers(axes: Axes) -> None:
    found = numbers()
    for height, points in enumerate(reversed(found.values())):
        axes.vlines(points, height - 0.28, height + 0.28, color=OURS[0], linewidth=0.9)
    axes.set_yticks(range(len(found)), [*reversed(found)])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"size of a number; the largest of its block of 32 is {LARGEST:g}")
    axes.set_title("The numbers that there are", loc="left", fontsize=12, fontweight="bold")


def _errors(axes: Axes, data: dict) -> None:
    found = {(error["activations"], error["data"]): error["relative"] for error in data["layer"]["error"]}
    for name, offset in zip(DATA, (-0.18, 0.0, 0.18), strict=True):
        marker, color = MARKERS[name]
        heights = [height + offset for height in range(len(SHOWN))]
        shares = [100 * found[mode, name] for mode in SHOWN]
        axes.plot(shares, heights, linestyle="", marker=marker, color=color, markersize=6, label=name)
    axes.set_yticks(range(len(SHOWN)), SHOWN)
    axes.invert_yaxis()  # as on the left: few bits below
    axes.set_xscale("log")
    axes.set_xticks([0.01, 0.1, 1, 10, 100], ["0.01 %", "0.1 %", "1 %", "10 %", "100 %"])
    axes.minorticks_off()
    axes.grid(True, axis="x", color="#eeeeee")
    axes.set_xlabel("error of a layer's output beside exact bf16")
    axes.legend(loc="upper right", fontsize=8.5)
    axes.set_title("Errors of the modes", loc="left", fontsize=12, fontweight="bold", color=INK)
    layer = data["layer"]
    where = f"one layer of {layer['model']}'s shape, {layer['experts']} experts, {layer['tokens']} tokens"
    axes.text(1, 1.02, where, transform=axes.transAxes, ha="right", fontsize=8, color=PALE)
