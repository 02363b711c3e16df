"""How cost grows, predicted and measured. `make scaling` measures this machine, finds three numbers of each backend, predicts
other calls and other CPUs with them, and prints tables; ARGS=--write puts them into docs/performance.md as well.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench import tables
from bench.cpus import cpus
from bench.scaling import document, fit, points, report
from bench.scaling.points import KERNELS, Measured
from ktmoe.machine import numa

ROOT = Path(__file__).resolve().parents[2]
POINTS = ROOT / ".benchmarks" / "scaling.json"
PERFORMANCE = ROOT / "docs" / "performance.md"
FIGURE = ROOT / "docs" / "img" / "scaling.png"


def show(measured: Measured, write: bool, console: Console) -> None:
    """Print the tables, and with `write` put them and the figure into docs."""
    kernels = fit.fits(measured)
    rows = fit.compare(measured, kernels)
    parts = {
        "numbers": report.kernel_table(measured, kernels),
        "checks": report.check_table(rows),
        "predictions": report.prediction_table(cpus(), kernels, measured.call),
    }
    for cells in parts.values():
        plain = ([cell.strip("`") for cell in row] for row in cells.rows)
        console.print(tables.table(cells.heads, plain, names=cells.names))
    summary = report.summary(rows)
    console.print(
        f"{measured.cpu}. A call costs {measured.call * 1e6:.1f} us at least. {summary}", highlight=False, soft_wrap=True
    )
    if write:
        text = PERFORMANCE.read_text()
        for name, cells in parts.items():
            part = document.markdown_table(cells) + (f"\n{summary}\n" if name == "checks" else "")
            text = document.replace_part(text, name, part)
        PERFORMANCE.write_text(text)
        from bench.scaling import figure  # matplotlib is there for this alone

        figure.draw(measured, kernels, FIGURE)


def measure(chosen: list[str], console: Console) -> Measured:
    """Of these backends; of the others what was measured last on the same CPU is kept."""
    if len(numa.usable_cpus()) < 2:
        raise SystemExit("scaling: calls are measured with 2 threads, each on a CPU of its own; there is 1 CPU")
    measured = points.run(chosen, lambda text: console.print(text, highlight=False, markup=False))
    if set(chosen) != set(KERNELS) and POINTS.exists():
        saved = points.load(POINTS)
        kept = tuple(p for p in saved.points if p.backend not in chosen and saved.cpu == measured.cpu)
        measured = replace(measured, points=kept + measured.points)
    points.save(measured, POINTS)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scaling", description="Predicts what layer calls cost, and checks it on this machine."
    )
    parser.add_argument("--backends", default=",".join(KERNELS), help="measure these, and keep what was measured of the others")
    parser.add_argument("--saved", action="store_true", help="measure nothing: tables of what was measured last")
    parser.add_argument("--write", action="store_true", help="put tables and figure into docs, too")
    arguments = parser.parse_args()
    chosen = arguments.backends.split(",")
    unknown = sorted(set(chosen) - set(KERNELS))
    if unknown:
        parser.error(f"--backends: expected some of {', '.join(KERNELS)}, found {', '.join(unknown)}")
    if arguments.saved and not POINTS.exists():
        raise SystemExit(f"scaling: {POINTS} does not exist: nothing has been measured yet; leave out --saved")
    console = tables.console(200)
    measured = points.load(POINTS) if arguments.saved else measure(chosen, console)
    if not measured.points:
        raise SystemExit(f"scaling: nothing was measured: none of {', '.join(chosen)} can run here")
    show(measured, arguments.write, console)


if __name__ == "__main__":
    main()
