"""`python -m bench.simulation`: measure costs, check the simulation against measured calls, simulate."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.simulation import costs


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return options.run(options)


def _parser():
    parser = argparse.ArgumentParser(prog="python -m bench.simulation", description="A layer call simulated on larger machines.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    measure = commands.add_parser("measure", help="measure this machine's costs")
    measure.add_argument("--out", type=Path, required=True, metavar="FILE")
    measure.set_defaults(run=_measure)
    check = commands.add_parser("check")
    check.add_argument("--rounds", type=int, default=12)
    check.set_defaults(run=_check)
    return parser


def _measure(options) -> int:
    from bench.simulation import measure

    costs.write(measure.measured(), options.out)
    return 0


def _check(options) -> int:
    from bench.simulation import check

    agreed, found = check.check(options.rounds)
    print(found)
    for a in agreed:
        print(a.threads, a.tokens, a.experts, f"{a.measured*1e3:.3f} {a.simulated*1e3:.3f} {a.ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
