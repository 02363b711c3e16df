"""`python -m bench.peers.loading`: importing, and loading a layer, by ktmoe and by kt-kernel in turn, each in a new process."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.models import models
from bench.peers import environments
from bench.peers.peers import PEERS
from ktmoe import synthetic

#: Between two looks at the memory in use.
PERIOD_SECONDS = 0.003
WORKER = Path(__file__).with_name("workers") / "load.py"
FIGURES = {
    "import, s": lambda report, _: report["import"],
    "load, s": lambda report, _: report["load"],
    "most memory while loading, x the checkpoint": lambda report, size: (report["most"] - report["before"]) / size,
    "memory afterwards, x the checkpoint": lambda report, size: (report["after"] - report["before"]) / size,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.loading", description=__doc__)
    parser.add_argument("--experts", metavar="N", type=int, default=32, help="of V4-Flash's shape (%(default)s)")
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="the median counts (%(default)s)")
    options = parser.parse_args(arguments)
    peer = next(peer for peer in PEERS if peer.name == "kt-kernel")
    try:
        interpreters = {"ktmoe": sys.executable, "kt-kernel": environments.python(peer, print)}
    except environments.SetUpError as error:
        print(f"loading: {error}", file=sys.stderr)
        return 1
    model = models()["V4-Flash"]
    with tempfile.TemporaryDirectory(prefix="ktmoe-loading-") as temporary:
        folder = Path(temporary) / "model"
        sizes = {"hidden": model.hidden, "intermediate": model.intermediate, "top_k": model.top_k}
        synthetic.write_deepseek_v4(folder, num_experts=options.experts, swiglu_limit=None, **sizes)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        rounds = [
            {library: _run(python, library, folder) for library, python in interpreters.items()} for _ in range(options.rounds)
        ]
    _show(rounds, size, f"V4-Flash, {options.experts} experts, {size / 1e9:.2f} GB, in the page cache; {options.rounds} rounds")
    return 0


def _run(python: str | Path, library: str, folder: Path) -> dict:
    """A worker's report, and the most anonymous memory that it was seen with."""
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen([python, WORKER, library, folder], stdout=out) as worker:
        most = 0
        while worker.poll() is None:
            most = max(most, anonymous_bytes(worker.pid))
            time.sleep(PERIOD_SECONDS)
        out.seek(0)
        if worker.returncode:
            raise RuntimeError(f"{library}: ended with {worker.returncode}; it printed: {out.read()[-300:]}")
        return json.loads(out.read().splitlines()[-1]) | {"most": most}


def anonymous_bytes(process: int) -> int:
    """0 if it is gone."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)


def _show(rounds: list[dict[str, dict]], size: int, title: str) -> None:
    table = Table(title=title)
    for heading in ("", "ktmoe", "kt-kernel", "kt-kernel / ktmoe"):
        table.add_column(heading, justify="right" if heading else "left")
    for heading, figure in FIGURES.items():
        values = {library: [figure(round_[library], size) for round_ in rounds] for library in ("ktmoe", "kt-kernel")}
        ratios = [theirs / ours for ours, theirs in zip(*values.values(), strict=True)]
        table.add_row(heading, *(f"{statistics.median(v):.2f}" for v in values.values()), f"{statistics.median(ratios):.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
