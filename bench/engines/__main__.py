"""`python -m bench.engines`: measure generate() of transformers, or show a result."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from bench import runs
from bench.engines import report
from bench.engines.session import about, compare
from bench.engines.shapes import engines
from bench.engines.ways import COMPARISONS
from bench.peers import environments
from bench.peers.__main__ import progress_line
from bench.peers.processes import WorkerError

RESULT = runs.STORAGE / "engines.json"


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if logits were wrong or something is missing, or 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (OSError, ValueError, WorkerError, environments.SetUpError) as error:
        print(f"engines: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("engines: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description="generate() of transformers, by way of ktmoe.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="install transformers, measure, print the tables and save the result")
    run.add_argument("--models", nargs="+", choices=list(engines()), default=list(engines()), help="all by default")
    run.add_argument(
        "--comparisons",
        nargs="+",
        choices=list(COMPARISONS),
        default=list(COMPARISONS),
        help="beside: transformers' own experts take part; alone: ktmoe alone, with more layers; "
        "threads: ktmoe with and without OMP_WAIT_POLICY=passive",
    )
    run.add_argument("--layers", metavar="N", type=int, help="of each model; as many as fit into memory by default")
    run.add_argument("--rounds", metavar="N", type=int, default=5, help="(%(default)s)")
    run.add_argument("--folder", metavar="DIR", type=Path, help="for checkpoints of up to 20 GB, removed afterwards")
    run.add_argument("--save", metavar="FILE", type=Path, default=RESULT, help="(%(default)s)")
    run.set_defaults(run=_run)
    show = commands.add_parser("show", help="print the tables of a saved result")
    show.add_argument("result", type=Path)
    show.set_defaults(run=_show)
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.rounds < 1 or (options.layers is not None and options.layers < 1):
        raise ValueError(f"expected --rounds and --layers above 0, found {options.rounds} and {options.layers}")
    result = about() | {"comparisons": []}
    options.save.parent.mkdir(parents=True, exist_ok=True)
    with progress_line() as progress:
        python = environments.python(environments.ENGINES, progress)
        for comparison in options.comparisons:
            for name in options.models:
                with tempfile.TemporaryDirectory(prefix="ktmoe-engines-", dir=options.folder) as folder:
                    result["comparisons"].append(
                        compare(engines()[name], comparison, options, python, Path(folder) / "model", progress)
                    )
                # each is minutes of work
                options.save.write_text(json.dumps(result, indent=1) + "\n")
    report.show(result)
    print(f"saved: {options.save}")
    return 1 if report.wrong(result) else 0


def _show(options: argparse.Namespace) -> int:
    report.show(json.loads(options.result.read_text()))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by exceptions, workers end and their weights are removed
    sys.exit(main())
