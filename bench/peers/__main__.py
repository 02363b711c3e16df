"""`python -m bench.peers`: measure, show or draw."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.models import models
from bench.peers import report
from bench.peers.formats import FORMATS, file_stem
from bench.peers.processes import WorkerError
from bench.peers.session import measure_all

MODEL = "V4-Flash"
FOLDER = Path(".benchmarks")


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if an output was wrong or there is nothing to measure or to show, or 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except WorkerError as error:
        print(f"peers: nothing to measure: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("peers: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="The same expert work on ktmoe and its peers.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="install the peers, check and measure them, print tables and draw pictures")
    known = ", ".join(FORMATS)
    run.add_argument("--formats", metavar="LIST", default=",".join(FORMATS), help=f"of the weights: some of {known} (all)")
    run.add_argument("--only", metavar="PATTERN", action="append", help="participants such as 'ktmoe *' or 'ggml repack'")
    run.add_argument("--without", metavar="PATTERN", action="append", default=[], help="participants to leave out")
    run.add_argument("--points", metavar="PATTERN", action="append", help="points such as 'decode*' or 'prefill-24'")
    run.add_argument("--experts", metavar="N", type=int, help="of the layer (64, or 32 of BF16)")
    run.add_argument("--seconds", metavar="S", type=float, default=20, help="to measure each point for, about (%(default)s)")
    run.add_argument("--rounds", metavar="N", type=int, default=40, help="at most, for each point (%(default)s)")
    run.add_argument("--into", metavar="FOLDER", type=Path, default=FOLDER, help="for results and pictures (%(default)s)")
    run.set_defaults(run=_run)
    show = commands.add_parser("show", help="print the tables of saved results")
    show.add_argument("results", metavar="RESULT", nargs="+", type=Path)
    show.set_defaults(run=_show)
    plot = commands.add_parser("plot", help="draw a picture of each saved result")
    plot.add_argument("results", metavar="RESULT", nargs="+", type=Path)
    plot.add_argument("--into", metavar="FOLDER", type=Path, default=FOLDER, help="(%(default)s)")
    plot.set_defaults(run=_plot)
    return parser


def _run(options: argparse.Namespace) -> int:
    if not (options.rounds > 0 and options.seconds > 0):
        raise ValueError(f"expected --rounds and --seconds above 0, found {options.rounds} and {options.seconds}")
    formats = options.formats.split(",")
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ValueError(f"expected --formats of {', '.join(FORMATS)}, found {', '.join(map(repr, unknown))}")
    return max(_session(name, options) for name in formats)


def _session(name: str, options: argparse.Namespace) -> int:
    """One format, measured, saved, shown and drawn."""
    model = replace(models()[MODEL], weights=name, experts=options.experts or FORMATS[name].experts)
    with progress_line() as progress, tempfile.TemporaryDirectory(prefix="ktmoe-peers-") as folder:
        result = measure_all(model, options, Path(folder), lambda text: progress(f"{name}: {text}"))
    options.into.mkdir(parents=True, exist_ok=True)
    file = options.into / f"{file_stem('peers', name)}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    report.show(result)
    print(f"saved: {file}")
    _draw(result, options.into)
    return 1 if report.wrong(result) else 0


@contextmanager
def progress_line() -> Iterator[Callable[[str], object]]:
    """Says on stderr what is being done: in one line that changes, or in one line each where stderr is no terminal."""
    console, start = Console(stderr=True), time.monotonic()
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        yield lambda text: console.print(f"{time.monotonic() - start:5.0f} s  {text}", highlight=False, markup=False)


def _show(options: argparse.Namespace) -> int:
    for file in options.results:
        report.show(json.loads(file.read_text()))
    return 0


def _plot(options: argparse.Namespace) -> int:
    for file in options.results:
        _draw(json.loads(file.read_text()), options.into)
    return 0


def _draw(result: dict, folder: Path) -> None:
    from bench.peers import plots  # matplotlib is there for this alone

    try:
        print(f"drawn: {plots.draw(result, folder)}")
    except plots.NothingToDrawError as error:
        print(f"not drawn: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by exceptions, workers end and their weights are removed
    sys.exit(main())
