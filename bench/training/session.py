"""The measurement: participants that train the same layer, checked, and rounds in which each has its turn."""

from __future__ import annotations

import fnmatch
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import ktmoe
from bench import machine
from bench.models import Model
from bench.peers import environments
from bench.peers.formats import FORMATS
from bench.peers.peers import PEERS
from bench.peers.processes import Process, WorkerError
from bench.peers.session import WORKERS, list_tensors
from bench.peers.workers.steps import Inputs
from bench.training import check
from ktmoe import measuring
from ktmoe.backends.choice import choose_backend

#: The script of each owner, and the ways to start it, by the owner's name.
PEER_WAYS = {"kt-kernel": ("worker_kt_training.py", ("MXFP4_SFT",)), "torch": ("worker_torch_training.py", ("BF16",))}
#: Steps with different experts, by turns.
BATCHES = 3
#: The peak is the best of so many looks: one look gave a fifth of it now and then, for reasons that were not found.
LIMIT_SECONDS, LOOKS = 0.05, 4


@dataclass
class Participant:
    """failure: why it is out for good."""

    key: str
    worker: str
    way: str
    interpreter: Path
    process: Process | None = None
    about: dict = field(default_factory=dict)
    failure: str | None = None

    def fail(self, error: Exception) -> None:
        self.failure = str(error)
        if self.process:
            self.process.close()


def measure_all(
    model: Model,
    folder: Path,
    *,
    tokens: list[int],
    rank: int,
    rounds: int,
    patterns: list[str],
    progress: Callable[[str], object],
) -> dict:
    """The whole measurement, which is JSON. A participant's failure is part of it; WorkerError is raised if ktmoe fails."""
    progress("writing the weights")
    sizes = {"num_experts": model.experts, "hidden": model.hidden, "intermediate": model.intermediate, "top_k": model.top_k}
    FORMATS[model.weights].write(folder, **sizes)
    list_tensors(folder, **sizes)
    experts = ktmoe.load_experts(folder, 0)
    participants = []
    try:
        for participant in _participants(experts, patterns, progress):
            participants.append(participant)
            progress(f"loading {participant.key}")
            _load(participant, folder, model.weights, rank)
        base = participants[0]
        if base.failure:
            raise WorkerError(f"{base.key}: {base.failure}")
        points = [_point(experts, count, model.top_k, rank, participants, base, folder, rounds, progress) for count in tokens]
    finally:
        for participant in participants:
            if participant.process:
                participant.process.close()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": machine.commit(),
        "machine": machine.description(),
        "shape": {**sizes, "weights": model.weights, "rank": rank},
        "participants": {p.key: {"about": p.about, "failure": p.failure} for p in participants},
        "points": points,
    }


def _participants(experts, patterns: list[str], progress: Callable[[str], object]) -> Iterator[Participant]:
    """ktmoe as it chooses first: the others are compared with it."""
    best = choose_backend("auto", experts, activations="bf16").name
    ways = list(dict.fromkeys([best, f"{best} recompute"]))
    first = Participant(f"ktmoe {best}", "worker_ktmoe_training.py", best, Path(sys.executable))
    yield first
    for way in ways[1:]:
        other = replace(first, key=f"ktmoe {way}", way=way)
        if _wanted(other.key, patterns):
            yield other
    for peer in PEERS:
        worker, ways = PEER_WAYS.get(peer.title, ("", ()))
        for way in ways:
            participant = Participant(f"{peer.title} {way}", worker, way, Path())
            if _wanted(participant.key, patterns):
                try:
                    participant.interpreter = environments.python(peer, progress)
                except (environments.SetUpError, OSError) as error:
                    participant.fail(error)
                yield participant


def _wanted(key: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _load(participant: Participant, folder: Path, weights: str, rank: int) -> None:
    if participant.failure:
        return
    count = ktmoe.get_num_threads()
    command = [participant.interpreter, WORKERS / participant.worker, participant.way, folder, str(count), weights]
    try:
        log = folder / f"{participant.key}.log".replace(" ", "-")
        participant.process = Process(command, log, {"OMP_NUM_THREADS": str(count), "PYTHONUNBUFFERED": "1"})
        participant.about = participant.process.ask(do="load", rank=rank)["about"]
        participant.about["resident bytes"] = participant.process.ask(do="memory")["now"]
    except WorkerError as error:
        participant.fail(error)


def _point(experts, tokens, top_k, rank, participants, base, folder, rounds, progress) -> dict:
    inputs = _inputs(experts, tokens, top_k)
    inputs.save(folder / f"{tokens}.npz")
    progress(f"{tokens} tokens: reference")
    sample = check.sample(experts, inputs, rank)
    entries, ready = {}, []
    for participant in participants:
        if not participant.failure:
            progress(f"{tokens} tokens: check {participant.key}")
            try:
                entries[participant.key] = _checked(participant, f"{tokens}.npz", sample, folder)
                ready.append(participant)
            except WorkerError as error:
                participant.fail(error)
    record = {
        "tokens": tokens,
        "flops": measuring.slot_flops(experts) * tokens * top_k,
        "participants": entries,
        "rounds": [],
    }
    for number in range(rounds):
        progress(f"{tokens} tokens: round {number + 1} of {rounds}")
        row = {}
        for participant in ready[:: -1 if number % 2 else 1]:
            peak = max(base.process.ask(do="limits", seconds=LIMIT_SECONDS)["peak"] for _ in range(LOOKS))
            setting = entries[participant.key]["best"]
            row[participant.key] = {**participant.process.ask(do="call", setting=setting, batch=number % BATCHES), "peak": peak}
        record["rounds"].append(row)
    for participant in ready:
        entries[participant.key]["most resident bytes"] = participant.process.ask(do="memory")["most"]
    return record


def _checked(participant: Participant, inputs: str, sample: check.Sample, folder: Path) -> dict:
    """What is known of a participant before it is measured. Raises WorkerError if it is wrong."""
    entry = participant.process.ask(do="point", inputs=inputs)
    participant.process.ask(do="call", setting=entry["best"], batch=0)
    participant.process.ask(do="output", into="outputs.npz", expert=sample.expert)
    with np.load(folder / "outputs.npz") as found:
        entry["errors"] = sample.errors(found)
    if wrong := sample.wrong(entry["errors"]):
        raise WorkerError(f"WRONG: {', '.join(wrong)}")
    return entry


def _inputs(experts, tokens: int, top_k: int) -> Inputs:
    made = measuring.random_batches(tokens, top_k, experts.num_experts, experts.hidden)
    made = [next(made) for _ in range(BATCHES)]
    grad_y = next(measuring.random_batches(tokens, top_k, experts.num_experts, experts.hidden, seed=1)).x
    ids, weights = np.stack([batch.ids for batch in made]), np.stack([batch.weights for batch in made])
    return Inputs(made[0].x.view(np.uint16), grad_y.view(np.uint16), ids, weights)


def figures(result: dict, point: dict, key: str) -> dict | None:
    """Medians over the rounds of one participant at one point. Shares are of the peak measured just before its turn.

    ratio: its step's time over that of the first participant, the median of the rounds' own.
    """
    rows = [row for row in point["rounds"] if key in row]
    if not rows:
        return None
    base = next(iter(result["participants"]))
    found = {}
    for name in ("forward", "backward"):
        found[name] = statistics.median(row[key][name] for row in rows)
        found[f"{name} share"] = statistics.median(point["flops"] / row[key][name] / row[key]["peak"] for row in rows)
    total = {k: [row[k]["forward"] + row[k]["backward"] for row in rows if k in row] for k in (key, base)}
    found["ratio"] = statistics.median(a / b for a, b in zip(total[key], total[base], strict=True))
    return found
