"""`python -m bench.linear`: dense matrices, and groups of them, by ktmoe, torch and ggml: installed, checked, and measured.

--calls and --models choose among matrices.toml. --only chooses participants besides ktmoe, such as 'torch *'.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import signal
import sys
import tempfile
from pathlib import Path

from bench.linear import report, session
from bench.linear.calls import Call, calls
from bench.peers.__main__ import FOLDER, progress_line
from bench.peers.processes import WorkerError


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if there is nothing to measure or an output was wrong, or 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        if options.show:
            report.show(json.loads(options.show.read_text()))
            return 0
        with progress_line() as progress, tempfile.TemporaryDirectory(prefix="ktmoe-linear-") as folder:
            result = session.measure_all(chosen(options), options, Path(folder), progress)
    except WorkerError as error:
        print(f"linear: nothing to measure: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"linear: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("linear: interrupted", file=sys.stderr)
        return 130
    options.into.mkdir(parents=True, exist_ok=True)
    file = options.into / "linear.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    report.show(result)
    print(f"saved: {file}")
    return 1 if report.wrong(result) else 0


def chosen(options: argparse.Namespace) -> list[Call]:
    """The calls that are asked for. Raises ValueError if there are none."""
    found = [
        call
        for call in calls()
        if any(fnmatch.fnmatchcase(call.model, pattern) for pattern in options.models or ["*"])
        and any(fnmatch.fnmatchcase(call.call, pattern) for pattern in options.calls or ["*"])
    ]
    if not found:
        raise ValueError(f"no call is of these names; there are {', '.join(f'{c.model}: {c.call}' for c in calls())}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.linear", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", metavar="PATTERN", nargs="+", help="such as 'gpt-oss*' (all)")
    parser.add_argument("--calls", metavar="PATTERN", nargs="+", help="such as 'attention layer' 'wo_*' (all)")
    parser.add_argument("--rows", metavar="N", type=_at_least_one, nargs="+", default=session.ROWS, help="(%(default)s)")
    parser.add_argument("--only", metavar="PATTERN", action="append", help="participants besides ktmoe")
    parser.add_argument("--seconds", metavar="S", type=float, default=6, help="to measure each point for, about (%(default)s)")
    parser.add_argument("--rounds", metavar="N", type=_at_least_one, default=30, help="at most, for each point (%(default)s)")
    parser.add_argument("--into", metavar="FOLDER", type=Path, default=FOLDER, help="for the result (%(default)s)")
    parser.add_argument("--show", metavar="RESULT", type=Path, help="print a saved result's table, and measure nothing")
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by exceptions, workers end and their weights are removed
    sys.exit(main())
