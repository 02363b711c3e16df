"""`python -m bench.vllm`: vLLM with the plug-in and without it: dense layers, its engine's steps, and its server beside
llama.cpp's. Saves the result, and prints tables."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench import runs
from bench.engines.session import about
from bench.engines.shapes import engines
from bench.peers import environments
from bench.peers.__main__ import progress_line
from bench.peers.processes import WorkerError
from bench.vllm import client, dense, report, servers, steps
from bench.vllm.ways import MODEL

RESULT = runs.STORAGE / "vllm.json"


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if something is missing, or 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        with progress_line() as progress, tempfile.TemporaryDirectory(prefix="ktmoe-vllm-", dir=options.folder) as folder:
            saved = measure(options, Path(folder), progress)
    except (OSError, ValueError, WorkerError, environments.SetUpError) as error:
        print(f"vllm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vllm: interrupted", file=sys.stderr)
        return 130
    options.save.parent.mkdir(parents=True, exist_ok=True)
    options.save.write_text(json.dumps(saved, indent=1) + "\n")
    report.show(saved)
    print(f"saved: {options.save}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description="Text by vLLM, with the plug-in and without it.")
    parts = ("dense", "steps", "servers")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="of the measurement, all by default")
    parser.add_argument("--layers", metavar="N", type=_count, default=2, help="of the model, for steps (%(default)s)")
    parser.add_argument("--rounds", metavar="N", type=_count, default=5, help="of layers and steps (%(default)s)")
    parser.add_argument("--server-layers", metavar="N", type=_count, default=4, help="of the model, for servers (%(default)s)")
    parser.add_argument("--server-rounds", metavar="N", type=_count, default=2, help="of servers (%(default)s)")
    users = list(client.TEXTS)
    parser.add_argument("--users", nargs="+", type=int, choices=users, default=users, help="at a time, all by default")
    parser.add_argument("--folder", metavar="DIR", type=Path, help="for checkpoints of 11 GB, removed afterwards")
    parser.add_argument("--save", metavar="FILE", type=Path, default=RESULT, help="(%(default)s)")
    return parser


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return count


def measure(options: argparse.Namespace, folder: Path, progress: Callable[[str], object]) -> dict:
    """The result, which is JSON: of each part that was asked for. folder: for the checkpoints of one part after the other."""
    engine = engines()[MODEL]
    saved = about() | {"model": engine.name, "of_layers": engine.experts.layers}
    parts = {
        "dense": lambda part: dense.measure(options.rounds, part, progress),
        "steps": lambda part: steps.measure(engine, options.layers, options.rounds, part, progress),
        "servers": lambda part: servers.measure(
            engine, options.server_layers, options.server_rounds, options.users, part, progress
        ),
    }
    for name, measured in parts.items():
        if name in options.parts:
            part = folder / "part"
            part.mkdir()
            saved[name] = measured(part)
            shutil.rmtree(part)
    return saved


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by exceptions, processes end and their weights are removed
    sys.exit(main())
