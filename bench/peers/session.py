"""All participants at all points: who takes part, on which weights, and the result, which is JSON."""

from __future__ import annotations

import fnmatch
import json
import platform
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import ktmoe
from bench import machine
from bench.models import Model
from bench.peers import environments
from bench.peers.formats import FORMATS
from bench.peers.peers import INT8, PEERS, Way
from bench.peers.processes import Process, WorkerError
from bench.peers.rounds import Participant, Point, batches, run_point
from bench.peers.workers.protocol import LISTING
from ktmoe import measuring
from ktmoe.backends.base import Missing, mode_by
from ktmoe.backends.choice import choose_backend
from ktmoe.experts import ExpertWeights
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine import memory

WORKERS = Path(__file__).resolve().parent / "workers"
DECODE_TOKENS = (1, 4, 16)
TOKENS_PER_EXPERT = (6, 24, 96)


def measure_all(model: Model, options: Namespace, folder: Path, progress: Callable[[str], object]) -> dict:
    """The whole measurement. Failures of participants are part of the result; WorkerError is raised if there is nothing else.

    options: of `run`, see __main__.py.
    """
    wanted_points = points(model, options.points)
    progress("writing the weights")
    sizes = {"hidden": model.hidden, "intermediate": model.intermediate, "top_k": model.top_k}
    FORMATS[model.weights].write(folder, num_experts=model.experts, **sizes)
    list_tensors(folder, num_experts=model.experts, **sizes)
    experts = ktmoe.load_experts(folder, 0)
    batches(experts, 1, model.top_k, 1).save(folder / "warm.npz")
    participants: list[Participant] = []
    limits = _start("worker_limits.py", "limits", folder, Path(sys.executable), model.weights)
    try:
        about = limits.ask(do="load")["about"]
        for participant, worker, interpreter in _participants(experts, model.weights, options, progress):
            participants.append(participant)
            progress(f"loading {participant.key}")
            _load(participant, worker, interpreter, experts, folder, model.weights)
        base, int8 = _base(experts, participants), _int8(participants)
        bases = [base] if int8 in (None, base) else [base, int8]
        measured = []
        for point in wanted_points:
            living = [participant for participant in participants if not participant.failure]
            measured.append(
                run_point(
                    point,
                    experts,
                    living,
                    bases,
                    limits,
                    folder,
                    top_k=model.top_k,
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
        "commit": machine.commit(),
        "machine": {
            **machine.description(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "ktmoe": version("ktmoe"),
        },
        "shape": {**sizes, "weights": model.weights, "experts": model.experts, **about},
        "base": base.key,
        "int8_base": bases[1].key if bases[1:] else None,
        "participants": {
            p.key: {"owner": p.owner, "numerics": p.way.numerics, "about": p.about, "failure": p.failure} for p in participants
        },
        "points": measured,
        "notes": _notes(model.weights, participants),
    }


def list_tensors(folder: Path, **sizes: int) -> None:
    """The layer's sizes, and where its tensors are, for workers that read neither safetensors nor GGUF."""
    with Checkpoint(folder) as checkpoint:
        found = {name: checkpoint.info(name) for name in checkpoint.names()}
    tensors = {name: [str(info.file), info.offset, info.nbytes, info.shape] for name, info in found.items()}
    (folder / LISTING).write_text(json.dumps({**sizes, "tensors": tensors}))


def points(model: Model, patterns: list[str] | None) -> list[Point]:
    """The points whose names match. Raises WorkerError if there are none."""
    every = [Point(f"decode-{tokens}", tokens) for tokens in DECODE_TOKENS]
    every += [Point(f"prefill-{mean}", max(1, mean * model.experts // model.top_k)) for mean in TOKENS_PER_EXPERT]
    different = {point.tokens: point for point in reversed(every)}  # with 16 experts, prefill-6 is decode-16
    every = [point for point in every if point in different.values()]
    chosen = [point for point in every if _matches(point.name, patterns)]
    if not chosen:
        raise WorkerError(f"no point is of these names; there are {', '.join(point.name for point in every)}")
    return chosen


def _notes(weights: str, participants: list[Participant]) -> list[str]:
    """What the peers that took part cannot do, each note once."""
    took = {participant.owner for participant in participants}
    return list(dict.fromkeys(note for peer in PEERS if peer.title in took for note in peer.notes.get(weights, ())))


def _participants(
    experts: ExpertWeights, weights: str, options: Namespace, progress: Callable[[str], object]
) -> Iterator[tuple[Participant, str, Path]]:
    """The participants that are wanted, with their workers and interpreters. A peer that cannot be installed has failed."""

    def wanted(participant: Participant) -> bool:
        return _matches(participant.key, options.only) and not (options.without and _matches(participant.key, options.without))

    for peer in PEERS:
        chosen = [p for p in (Participant(peer.title, way) for way in peer.ways.get(weights, ())) if wanted(p)]
        interpreter = Path()
        try:
            if chosen:
                interpreter = environments.python(peer, progress)
        except (environments.SetUpError, OSError) as error:
            for participant in chosen:
                participant.fail(str(error))
        yield from ((participant, peer.worker, interpreter) for participant in chosen)
    seen, bits = set(), 8 * experts.nbytes / _weights(experts)
    for name in measuring.backends_for(experts):
        backend = ktmoe.backends.get(name)
        for mode in backend.modes:
            found = backend.lookup(experts, mode)
            if isinstance(found, Missing) or mode_by(mode)[0].x:  # bench/test_modes.py has MX modes
                continue
            kernels = found.table.name, mode
            participant = Participant("ktmoe", Way(f"{name} {mode}", mode, bits), bound=True)
            if wanted(participant) and kernels not in seen:  # some modes are served alike for several backends
                seen.add(kernels)
                yield participant, "worker_ktmoe.py", Path(sys.executable)


def _base(experts: ExpertWeights, participants: list[Participant]) -> Participant:
    """What ktmoe runs if nothing is asked for; or else ktmoe's first. Raises WorkerError if there is none."""
    choice = choose_backend("auto", experts)
    auto = f"ktmoe {choice.name} {choice.activations}"
    living = [participant for participant in participants if participant.bound and not participant.failure]
    if not living:
        raise WorkerError("; ".join(f"{p.key}: {p.failure}" for p in participants) or "no participant is of these names")
    return next((participant for participant in living if participant.key == auto), living[0])


def _int8(participants: list[Participant]) -> Participant | None:
    """What ktmoe runs if int8 is asked for: they come in the order in which "auto" chooses."""
    return next((p for p in participants if p.bound and p.way.numerics == INT8 and not p.failure), None)


def _weights(experts: ExpertWeights) -> int:
    """How many there are."""
    return experts.num_experts * 3 * experts.hidden * experts.intermediate


def _load(participant: Participant, worker: str, interpreter: Path, experts: ExpertWeights, folder: Path, weights: str) -> None:
    if participant.failure:
        return
    needed, available = round(1.5 * _weights(experts) * participant.way.bits / 8), memory.available_bytes()
    if available is not None and available < needed:
        participant.fail(f"needs about {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB is available")
        return
    try:
        participant.process = _start(worker, participant.way.name, folder, interpreter, weights)
        participant.about = participant.ask(do="load")["about"]
        participant.about["resident GB"] = round(participant.process.resident_bytes() / 1e9, 2)
    except WorkerError as error:
        participant.fail(str(error))


def _start(worker: str, way: str, folder: Path, interpreter: Path, weights: str) -> Process:
    count = ktmoe.get_num_threads()
    command = [interpreter, WORKERS / worker, way, folder, str(count), weights]
    log = folder / f"{worker}-{way}.log".replace(" ", "-")
    return Process(command, log, {"OMP_NUM_THREADS": str(count), "PYTHONUNBUFFERED": "1"})


def _matches(name: str, patterns: list[str] | None) -> bool:
    return patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
