"""The measurement: points, participants, and rounds in which each has its turn."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.peers import check
from bench.peers.peers import INT8, Way
from bench.peers.processes import Process, WorkerError
from bench.peers.workers.protocol import Batches
from ktmoe import measuring
from ktmoe.experts import ExpertWeights

LEAST_ROUNDS = 3
#: How many sets of experts rotate.
BATCHES = 8


@dataclass(frozen=True)
class Point:
    """One size of calls. name: as options and tables have it."""

    name: str
    tokens: int


@dataclass
class Participant:
    """One way of ktmoe's or a peer's. bound: whether ktmoe's derived bound holds for it. failure: why it is out for good."""

    owner: str
    way: Way
    process: Process | None = None
    bound: bool = False
    about: dict = field(default_factory=dict)
    failure: str | None = None

    @property
    def key(self) -> str:
        return f"{self.owner} {self.way.name}"

    def ask(self, **message) -> dict:
        return self.process.ask(**message)

    def fail(self, why: str) -> None:
        self.failure = why
        if self.process:
            self.process.close()


def batches(experts: ExpertWeights, tokens: int, top_k: int, count: int = BATCHES) -> Batches:
    """Random routing, see measuring.random_batches."""
    made = measuring.random_batches(tokens, top_k, experts.num_experts, experts.hidden)
    made = list(itertools.islice(made, count))
    return Batches(
        made[0].x.view(np.uint16), np.stack([batch.ids for batch in made]), np.stack([batch.weights for batch in made])
    )


def run_point(
    point: Point,
    experts: ExpertWeights,
    participants: list[Participant],
    bases: list[Participant],
    limits: Process,
    folder: Path,
    *,
    top_k: int,
    seconds: float,
    most: int,
    progress: Callable[[str], object],
) -> dict:
    """Check, then measure all that can run here: rounds for about so many seconds, at most so many. The record is JSON.

    bases: whose calls the others are compared with: they take part in each round. limits: the process that measures them, at
    the beginning of each, which also takes the last round's weights out of the caches. Whoever would take more than its share
    of the seconds takes part in fewer.
    """
    calls = batches(experts, point.tokens, top_k)
    inputs = f"{point.tokens}.npz"
    calls.save(folder / inputs)
    progress(f"{point.name}: reference")
    sample = check.sample(experts, calls, 0)
    record = {
        "name": point.name,
        "tokens": point.tokens,
        "flops": measuring.slot_flops(experts) * point.tokens * top_k,
        "experts": [len(np.unique(ids)) for ids in calls.ids],
        "participants": {},
        "rounds": [],
    }
    ready = []
    for participant in participants:
        progress(f"{point.name}: check {participant.key}")
        entry = record["participants"][participant.key] = _check(participant, inputs, sample, folder)
        if "failure" not in entry:
            ready.append(participant)
    if ready:
        record["rounds"] = list(_rounds(point, record["participants"], ready, bases, limits, seconds, most, progress))
    return record


def _check(participant: Participant, inputs: str, sample: check.Sample, folder: Path) -> dict:
    """What is known of a participant at a point before it is measured; "failure" if it is not to be."""
    try:
        entry = participant.ask(do="point", inputs=inputs)
        entry["seconds"] = participant.ask(do="call", setting=entry["best"], batch=sample.batch)["seconds"]
        participant.ask(do="output", into="y.npy")
    except WorkerError as error:
        if not participant.process.alive:
            participant.fail(str(error))
        return {"failure": str(error)}
    y = np.load(folder / "y.npy")
    entry["error"] = sample.error(y)
    if participant.bound:
        entry["of_bound"] = sample.of_bound(y, participant.way.numerics)
        if not entry["of_bound"] <= 1:
            entry["failure"] = f"WRONG: an output is off by {entry['of_bound']:.3g} times its bound"
    elif not entry["error"] <= check.MOST_ERROR[participant.way.numerics]:
        most = check.MOST_ERROR[participant.way.numerics]
        entry["failure"] = f"WRONG: error {entry['error']:.2%} of the output, more than {most:.0%}"
    return entry


def _rounds(
    point: Point,
    entries: dict[str, dict],
    ready: list[Participant],
    bases: list[Participant],
    limits: Process,
    seconds: float,
    most: int,
    progress: Callable[[str], object],
) -> Iterable[dict]:
    share = seconds / len(ready)
    turns = {p.key: min(most, max(LEAST_ROUNDS, int(share / entries[p.key]["seconds"]))) for p in ready}
    total = max(turns.values())
    turns |= {p.key: total for p in ready if p in bases}
    shortest = min(entries[p.key]["seconds"] for p in ready)
    for_limits = min(max(measuring.LEAST_SECONDS, measuring.SHARE_OF_CALL * shortest), measuring.MOST_SECONDS)
    for number in range(total):
        progress(f"{point.name}: round {number + 1} of {total}")
        record = {"batch": number % BATCHES, **limits.ask(do="limits", seconds=for_limits), "seconds": {}}
        for participant in ready[:: -1 if number % 2 else 1]:
            if participant.failure or not _has_turn(number, turns[participant.key], total):
                continue
            try:
                answer = participant.ask(do="call", setting=entries[participant.key]["best"], batch=record["batch"])
                record["seconds"][participant.key] = answer["seconds"]
            except WorkerError as error:
                participant.fail(str(error))
                entries[participant.key]["failure"] = str(error)
        yield record


def _has_turn(number: int, turns: int, total: int) -> bool:
    """Spreads turns evenly over the rounds, the first one included."""
    return number * turns // total != (number - 1) * turns // total


def figures(result: dict, point: dict, key: str) -> dict | None:
    """Medians over the rounds of one participant at one point; None if it has none.

    ratio: by how much the base's call is faster, the median of the rounds' own ratios; None for the base itself. int8_ratio: of
    one that rounds to int8, too, the same beside ktmoe's int8.
    """
    took = [row for row in point["rounds"] if key in row["seconds"]]
    if not took:
        return None
    expert = result["shape"]["bytes an expert"]
    rounds_to_int8 = result["participants"][key].get("numerics", "").startswith(INT8)
    seconds = [row["seconds"][key] for row in took]
    nbytes = [point["experts"][row["batch"]] * expert for row in took]
    kernels = result["participants"][key]["about"].get("kernels")
    peaks = [point["flops"] / row["seconds"][key] / row["peaks"][kernels] for row in took if kernels in row["peaks"]]
    return {
        "seconds": statistics.median(seconds),
        "bytes_rate": statistics.median(b / s for b, s in zip(nbytes, seconds, strict=True)),
        "flops_rate": point["flops"] / statistics.median(seconds),
        "tokens_rate": point["tokens"] / statistics.median(seconds),
        "ratio": _ratio(took, key, result["base"]),
        "int8_ratio": _ratio(took, key, result.get("int8_base")) if rounds_to_int8 else None,
        "read_share": statistics.median(b / s / row["read"] for b, s, row in zip(nbytes, seconds, took, strict=True)),
        "peak_share": statistics.median(peaks) if peaks else None,
        "rounds": len(took),
    }


def _ratio(took: list[dict], key: str, base: str | None) -> float | None:
    ratios = [row["seconds"][key] / row["seconds"][base] for row in took if base in row["seconds"]]
    return statistics.median(ratios) if ratios and key != base else None
