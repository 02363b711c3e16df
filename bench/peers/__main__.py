"""`python -m bench.peers`: measure, show or draw."""

from __future__ import annotations

import argparse
import fnmatch
import json
import platform
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

import ktmoe
from bench.peers import environments, report
from bench.peers.peers import PEERS, Way
from bench.peers.processes import Process, WorkerError
from bench.peers.rounds import Participant, Point, batches, run_point
from ktmoe import measure, memory, synthetic, threads
from ktmoe.backends.base import choose
from ktmoe.experts import ExpertWeights

HERE = Path(__file__).resolve().parent
MODEL = "V4-Flash"
DECODE_TOKENS = (1, 4, 16, 64)
TOKENS_PER_EXPERT = (6, 24, 96)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if an output was wrong or nothing could be measured, or 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except WorkerError as error:
        print(f"peers: nothing to measure: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("peers: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="The same expert work on ktmoe and its peers.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="install the peers, check them, measure them and print the table")
    run.add_argument("--only", metavar="PATTERN", action="append", help="participants such as 'ktmoe *' or 'ggml repack'")
    run.add_argument("--without", metavar="PATTERN", action="append", default=[], help="participants to leave out")
    run.add_argument("--points", metavar="PATTERN", action="append", help="points such as 'decode*' or 'prefill-24'")
    run.add_argument("--experts", metavar="N", type=int, default=64, help="of the layer (%(default)s)")
    run.add_argument("--seconds", metavar="S", type=float, default=40, help="to measure each point for, about (%(default)s)")
    run.add_argument("--rounds", metavar="N", type=int, default=40, help="at most, for each point (%(default)s)")
    run.add_argument("--save", metavar="FILE", type=Path, default=Path(".benchmarks/peers.json"), help="(%(default)s)")
    run.set_defaults(run=_run)
    show = commands.add_parser("show", help="print the table of a saved result")
    show.add_argument("result", type=Path)
    show.set_defaults(run=_show)
    plot = commands.add_parser("plot", help="draw the pictures of a saved result")
    plot.add_argument("result", type=Path)
    plot.add_argument("--into", metavar="FOLDER", type=Path, default=Path(".benchmarks"), help="(%(default)s)")
    plot.set_defaults(run=_plot)
    return parser


def _run(options: argparse.Namespace) -> int:
    shape = tomllib.loads((HERE.parent / "models.toml").read_text())[MODEL]
    shape = {name: shape[name] for name in ("hidden", "intermediate", "top_k")} | {"experts": options.experts}
    with _progress() as progress, tempfile.TemporaryDirectory(prefix="ktmoe-peers-") as folder:
        result = measure_all(shape, options, Path(folder), progress)
    options.save.parent.mkdir(parents=True, exist_ok=True)
    options.save.write_text(json.dumps(result, indent=1) + "\n")
    report.show(result)
    print(f"saved: {options.save}")
    return 1 if report.wrong(result) else 0


@contextmanager
def _progress() -> Iterator[Callable[[str], object]]:
    """Says on stderr what is being done: in one line that changes, or in one line each where stderr is no terminal."""
    console, start = Console(stderr=True), time.monotonic()
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        yield lambda text: console.print(f"{time.monotonic() - start:5.0f} s  {text}", highlight=False, markup=False)


def _show(options: argparse.Namespace) -> int:
    report.show(json.loads(options.result.read_text()))
    return 0


def _plot(options: argparse.Namespace) -> int:
    from bench.peers import plots  # matplotlib is there for this alone

    for picture in plots.draw(json.loads(options.result.read_text()), options.into):
        print(picture)
    return 0


def measure_all(shape: dict, options: argparse.Namespace, folder: Path, progress: Callable[[str], object]) -> dict:
    """The whole measurement; the result is JSON. Failures of participants are part of it."""
    progress("writing the weights")
    sizes = {"hidden": shape["hidden"], "intermediate": shape["intermediate"], "top_k": shape["top_k"]}
    synthetic.write_deepseek_v4(folder, num_experts=shape["experts"], swiglu_limit=None, **sizes)
    experts = ktmoe.load_experts(folder, 0)
    batches(experts, 1, shape["top_k"], 1).save(folder / "warm.npz")
    participants: list[Participant] = []
    limits = _start("worker_limits.py", "limits", folder, Path(sys.executable))
    try:
        about = limits.ask(do="load")["about"]
        for participant, worker, interpreter in _participants(experts, options, progress):
            participants.append(participant)
            progress(f"loading {participant.key}")
            _load(participant, worker, interpreter, experts, folder)
        base = _base(experts, participants)
        measured = []
        for point in points(shape, options.points):
            living = [participant for participant in participants if not participant.failure]
            measured.append(
                run_point(
                    point,
                    experts,
                    living,
                    base,
                    limits,
                    folder,
                    top_k=shape["top_k"],
                    seconds=options.seconds,
                    most=options.rounds,
                    progress=progress,
                )
            )
    finally:
        for process in [limits, *(participant.process for participant in participants)]:
            if process:
                process.close()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {
            "cpu": threads.cpu_name(),
            "threads": ktmoe.get_num_threads(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "ktmoe": version("ktmoe"),
        },
        "shape": shape | about,
        "base": base.key,
        "participants": {
            p.key: {"owner": p.owner, "numerics": p.way.numerics, "about": p.about, "failure": p.failure} for p in participants
        },
        "points": measured,
        "notes": [note for peer in PEERS for note in peer.notes if any(p.owner == peer.title for p in participants)],
    }


def points(shape: dict, patterns: list[str] | None) -> list[Point]:
    every = [Point(f"decode-{tokens}", tokens) for tokens in DECODE_TOKENS]
    every += [Point(f"prefill-{mean}", mean * shape["experts"] // shape["top_k"]) for mean in TOKENS_PER_EXPERT]
    different = {point.tokens: point for point in reversed(every)}  # with 64 experts, prefill-6 is decode-64
    return [point for point in every if point in different.values() and _matches(point.name, patterns)]


def _participants(
    experts: ExpertWeights, options: argparse.Namespace, progress: Callable[[str], object]
) -> Iterator[tuple[Participant, str, Path]]:
    """Those that are wanted, with their workers and interpreters. A peer that cannot be installed has failed."""

    def wanted(participant: Participant) -> bool:
        return _matches(participant.key, options.only) and not (options.without and _matches(participant.key, options.without))

    for peer in PEERS:
        chosen = [p for p in (Participant(peer.title, way) for way in peer.ways) if wanted(p)]
        interpreter = Path()
        try:
            if chosen:
                interpreter = environments.python(peer, progress)
        except (environments.SetUpError, OSError) as error:
            for participant in chosen:
                participant.fail(str(error))
        yield from ((participant, peer.worker, interpreter) for participant in chosen)
    seen = set()
    for name in measure.backends_for(experts):
        backend = ktmoe.backends.get(name)
        for mode in backend.modes(experts):
            kernels = backend.table(experts, mode).name, mode
            participant = Participant("ktmoe", Way(f"{name} {mode}", mode), bound=True)
            if wanted(participant) and kernels not in seen:  # some modes are served alike for several backends
                seen.add(kernels)
                yield participant, "worker_ktmoe.py", Path(sys.executable)


def _base(experts: ExpertWeights, participants: list[Participant]) -> Participant:
    """What ktmoe runs if nothing is asked for; or else ktmoe's first. Raises WorkerError if there is none."""
    name, _ = choose("auto", experts)
    auto = f"ktmoe {name} {ktmoe.backends.get(name).modes(experts)[0]}"
    living = [participant for participant in participants if participant.bound and not participant.failure]
    if not living:
        raise WorkerError("; ".join(f"{p.key}: {p.failure}" for p in participants) or "no participant is of these names")
    return next((participant for participant in living if participant.key == auto), living[0])


def _load(participant: Participant, worker: str, interpreter: Path, experts: ExpertWeights, folder: Path) -> None:
    if participant.failure:
        return
    weights = experts.num_experts * 3 * experts.hidden * experts.intermediate
    needed, available = round(1.5 * weights * participant.way.bits / 8), memory.available_bytes()
    if available is not None and available < needed:
        participant.fail(f"needs about {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB is available")
        return
    try:
        participant.process = _start(worker, participant.way.name, folder, interpreter)
        participant.about = participant.ask(do="load")["about"]
        participant.about["resident GB"] = round(participant.process.resident_bytes() / 1e9, 2)
    except WorkerError as error:
        participant.fail(str(error))


def _start(worker: str, way: str, folder: Path, interpreter: Path) -> Process:
    count = ktmoe.get_num_threads()
    command = [interpreter, HERE / "workers" / worker, way, folder, str(count)]
    log = folder / f"{worker}-{way}.log".replace(" ", "-")
    return Process(command, log, {"OMP_NUM_THREADS": str(count), "PYTHONUNBUFFERED": "1"})


def _matches(name: str, patterns: list[str] | None) -> bool:
    return patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


if __name__ == "__main__":
    sys.exit(main())
