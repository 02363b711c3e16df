"""The picture: seconds of a call over tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bench import cost_model
from bench.cost_model import Kernel
from bench.scaling.points import FIT_SHAPE, FITS, SHAPES, Measured, typical


def draw(measured: Measured, kernels: dict[str, Kernel], path: Path) -> None:
    """Seconds of a call over tokens: predicted curves, measured points, and the two limits that bend them."""
    shape = SHAPES[FIT_SHAPE]
    tokens = np.unique(np.geomspace(1, 4096, 120).round().astype(int)).tolist()
    figure = Figure(figsize=(7.2, 4.4), dpi=160, layout="constrained")
    axes = figure.add_subplot()
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
