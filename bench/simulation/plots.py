"""The picture of docs/simulation.md: efficiency by threads."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.peers.plots import OURS, PALE, STYLE
from bench.simulation.grid import MODELS, THREADS, TOKENS

#: Nodes of the lines.
NODES = {1: ":", 2: "-", 8: "--"}


def draw(data: dict, file: Path) -> Path:
    """data: as files.SIMULATED has it."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        axes = figure.subplots(1, len(MODELS), sharey=True)
        for model, axis in zip(MODELS, axes, strict=True):
            for tokens, color in zip(TOKENS, (OURS[0], "#edae49", "#d1495b", "#7d6b91"), strict=True):
                for nodes, style in NODES.items():
                    points = {
                        p["threads"]: 100 * p["efficiency"]
                        for p in data["point"]
                        if (p["model"], p["tokens"], p["nodes"]) == (model, tokens, nodes)
                    }
                    label = f"{tokens:,} token{'s' * (tokens > 1)}" if nodes == 2 else None
                    width = 2.0 if nodes == 2 else 0.9
                    axis.plot(points.keys(), points.values(), style, color=color, linewidth=width, label=label)
            axis.set(xscale="log", xlabel="threads, of 128 cores", ylim=(0, 100))
            axis.set_xticks(THREADS, [f"{threads}" if threads != 96 else "" for threads in THREADS])
            axis.minorticks_off()
            axis.grid(True, color="#eeeeee")
            axis.set_title(model, loc="left", fontsize=11)
        axes[0].set_ylabel("% of the nearer limit")
        axes[0].legend(loc="lower left", fontsize=8.5)
        text = (
            f"Simulation: one layer call, costs of {data['machine']}, {data['bandwidth_gb_s']:.0f} GB/s of all nodes together"
        )
        figure.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")
        axes[-1].text(
            1, 0.02, "dotted: 1 node, solid: 2, dashed: 8", transform=axes[-1].transAxes, ha="right", fontsize=8, color=PALE
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=150)
    return file
