"""`python -m bench.distributed`: a layer on 1, 2 and 4 ranks over several networks, beside the model of its time. Saves the
result, and prints tables."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from bench import runs
from bench.distributed import report, session
from bench.peers import environments
from bench.peers.__main__ import progress_line
from bench.peers.processes import WorkerError

RESULT = runs.STORAGE / "distributed.json"


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if something is missing or wrong, or 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    if options.show:
        report.show(json.loads(options.show.read_text()))
        return 0
    networks = [network for network in session.NETWORKS if network.name in options.networks]
    try:
        with progress_line() as progress, tempfile.TemporaryDirectory(prefix="ktmoe-distributed-") as folder:
            saved = session.measure(networks, options.ranks, options.rounds, Path(folder), progress)
    except (OSError, ValueError, WorkerError, environments.SetUpError) as error:
        print(f"distributed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("distributed: interrupted", file=sys.stderr)
        return 130
    options.save.parent.mkdir(parents=True, exist_ok=True)
    options.save.write_text(json.dumps(saved, indent=1) + "\n")
    report.show(saved)
    print(f"saved: {options.save}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.distributed", description="A layer on several ranks, and the model of its time."
    )
    names = [network.name for network in session.NETWORKS]
    parser.add_argument("--networks", nargs="+", choices=names, default=names, help="all by default")
    parser.add_argument("--ranks", metavar="N", type=int, default=4, help="at most (%(default)s)")
    parser.add_argument("--rounds", metavar="N", type=int, default=15, help="of which medians are taken (%(default)s)")
    parser.add_argument("--save", metavar="FILE", type=Path, default=RESULT, help="(%(default)s)")
    parser.add_argument("--show", metavar="FILE", type=Path, help="print a saved result's tables, and measure nothing")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by exceptions, ranks end and their files are removed
    sys.exit(main())
