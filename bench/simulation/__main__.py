"""`python -m bench.simulation`: simulate calls on larger machines; measure a machine's costs; check the simulation there."""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

from bench import machine, results_file
from bench.peers.__main__ import progress_line
from bench.simulation import costs, files, grid


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if the simulation disagrees with measured calls or something is missing."""
    options = _parser().parse_args(arguments or sys.argv[1:] or ["run"])
    try:
        return options.run(options)
    except (OSError, ValueError) as error:
        print(f"simulation: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulation", description="Layer calls, simulated on larger machines."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    run = commands.add_parser(
        "run", help="simulate with each file of machines/, and renew docs/simulation.md; without a command, too"
    )
    run.add_argument("--out", metavar="FILE", type=Path, help="write the points of --costs there, and renew nothing")
    run.add_argument("--costs", metavar="FILE", type=Path, help="that measure wrote; only with --out, like what follows")
    gb_s = grid.BANDWIDTH / 1e9
    run.add_argument("--bandwidth", metavar="GB/S", type=float, help=f"of all nodes together ({gb_s:g})")
    run.add_argument("--jitter", metavar="SHARE", type=float, help=f"by which workers' speeds deviate ({grid.JITTER:g})")
    run.set_defaults(run=_run)
    measure = commands.add_parser("measure", help="measure this machine's costs")
    measure.add_argument("--out", metavar="FILE", type=Path, help="(in bench/simulation/machines, by the CPU's name)")
    measure.set_defaults(run=_measure)
    check = commands.add_parser("check", help="compare with calls measured here, on 1, 2, 4 ... threads")
    check.add_argument("--out", metavar="FILE", type=Path, help="write the comparison there")
    check.set_defaults(run=_check)
    document = commands.add_parser("document", help="renew docs/simulation.md from what was simulated")
    document.set_defaults(run=_document)
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.out:
        if not options.costs:
            raise ValueError("--out: expected --costs FILE beside it")
        _simulate(options.costs, options.out, options.bandwidth, options.jitter)
        return 0
    if options.costs or options.bandwidth is not None or options.jitter is not None:
        raise ValueError(
            "--costs, --bandwidth and --jitter: expected --out FILE beside them; the page is of all files and defaults"
        )
    for path in costs.paths():
        _simulate(path, files.simulated(path))
    return _document(options)


def _simulate(path: Path, out: Path, gb_s: float | None = None, jitter: float | None = None) -> None:
    """With the costs of that file."""
    found = costs.read(path)
    gb_s, jitter = grid.BANDWIDTH / 1e9 if gb_s is None else gb_s, grid.JITTER if jitter is None else jitter
    with progress_line() as progress:
        points = [*grid.simulated(found, gb_s * 1e9, jitter, progress)]
    about = {"machine": found.machine, "bandwidth_gb_s": gb_s, "jitter": jitter, "point": points}
    files.write({**_now(), **about}, out, files.SIMULATED)
    print(f"simulated: {out}")


def _measure(options: argparse.Namespace) -> int:
    from bench.simulation import measure  # pytest and more, which nothing else needs

    found = measure.measured()
    file = options.out or costs.FOLDER / f"{results_file.file_stem(found.machine)}.toml"
    costs.write(found, file)
    print(f"measured: {file}")
    return 0


def _check(options: argparse.Namespace) -> int:
    from bench.simulation import check

    calls, found = check.check()
    for c in calls:
        what = f"{c.threads} threads, {c.tokens} tokens among {c.experts} experts"
        print(f"{what}: measured {1e3 * c.measured:.3f} ms, simulated {1e3 * c.simulated:.3f} ms, {c.ratio:.2f}")
    if options.out:
        about = {"machine": found.machine, "rounds": check.ROUNDS, "call": [c.fields for c in calls]}
        files.write({**_now(), **about}, options.out, files.CHECKED)
    return 0 if all(abs(c.ratio - 1) <= check.WITHIN for c in calls) else 1


def _document(options: argparse.Namespace) -> int:
    from bench.simulation import document

    document.write()
    print(f"written: {document.PAGE}")
    return 0


def _now() -> dict:
    return {"date": datetime.date.today(), "commit": machine.commit()}


if __name__ == "__main__":
    sys.exit(main())
