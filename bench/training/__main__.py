"""`python -m bench.training`: a step of LoRA on one layer's experts, forward and backward, by ktmoe and its peers.

The model is V4-Flash, whose MXFP4 weights stay packed in ktmoe. torch has them in bfloat16, which is 13 GB for all 256 experts.
--experts makes it smaller. --only chooses participants besides ktmoe, such as 'torch *'.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.models import models
from bench.peers.__main__ import FOLDER, MODEL, progress_line
from bench.peers.processes import WorkerError
from bench.training import report, session

TOKENS = (512, 4096)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if there is nothing to measure or an output was wrong, or 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    model = models()[MODEL]
    model = replace(model, experts=options.experts or model.experts)
    try:
        with progress_line() as progress, tempfile.TemporaryDirectory(prefix="ktmoe-training-") as folder:
            result = session.measure_all(
                model,
                Path(folder),
                tokens=options.tokens,
                rank=options.rank,
                rounds=options.rounds,
                patterns=options.only or ["*"],
                progress=progress,
            )
    except WorkerError as error:
        print(f"training: nothing to measure: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("training: interrupted", file=sys.stderr)
        return 130
    options.into.mkdir(parents=True, exist_ok=True)
    file = options.into / "training.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    report.show(result)
    print(f"saved: {file}")
    return int(any((each["failure"] or "").startswith("WRONG") for each in result["participants"].values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a step (%(default)s)")
    parser.add_argument("--experts", metavar="N", type=int, help="of the layer (256)")
    parser.add_argument("--rank", metavar="R", type=int, default=16, help="of the adapters (%(default)s)")
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="of which the median counts (%(default)s)")
    parser.add_argument("--only", metavar="PATTERN", action="append", help="participants besides ktmoe")
    parser.add_argument("--into", metavar="FOLDER", type=Path, default=FOLDER, help="for the result (%(default)s)")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by exceptions, workers end and their weights are removed
    sys.exit(main())
