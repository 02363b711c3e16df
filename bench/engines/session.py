"""The measurement: who takes part, rounds in which each has its turn, and the result, which is JSON."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import ktmoe
from bench import machine
from bench.engines.shapes import Engine
from bench.engines.ways import OURS, THEIRS, Process, who_fits
from bench.peers import processes
from bench.peers.processes import WorkerError
from ktmoe import measuring

ROOT = Path(__file__).resolve().parents[2]
#: The share of the memory that can be had for the processes that are measured; the rest is for this one and the system.
SHARE_OF_MEMORY = 0.93
#: Seconds for writing a checkpoint or loading a model: of 20 GB, by a slow disk.
PATIENCE = 1800
#: Seconds for which each round measures the read bandwidth.
LIMIT_SECONDS = 0.2
#: Tokens of the text whose logits are compared.
CHECKED_TOKENS = 64
#: The largest error of logits, the median token's, over their norm. Two ways in bfloat16 differ by 0.3 % with one layer and
#: 1.7 % with eight, by their roundings; one wrong expert for each token of one layer makes 19 % or more.
MOST_ERROR = 0.06


@dataclass(frozen=True)
class Call:
    """One call of generate(): so many texts of prompt tokens, and new tokens for each."""

    batch: int
    prompt: int
    new: int


CALLS = (Call(1, 128, 33), Call(4, 128, 17), Call(1, 512, 1), Call(1, 1024, 1))
WARM = Call(1, 16, 3)


@dataclass
class Participant:
    """A process that runs. failures: {way: why it is out}, for "" the whole process."""

    process: Process
    worker: processes.Process | None = None
    loaded: dict = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def ways(self) -> dict[str, str]:
        """The ways that can be measured."""
        return {} if "" in self.failures else {n: i for n, i in self.process.ways.items() if n not in self.failures}

    def ask(self, way: str, **message) -> dict | None:
        """The worker's answer; None if it cannot, and why is a failure of that way."""
        try:
            return self.worker.ask(**message)
        except WorkerError as error:
            self.failures[way if self.worker.alive else ""] = str(error)
            return None

    def generate(self, way: str, call: Call, seed: int) -> dict | None:
        fields = {"batch": call.batch, "prompt": call.prompt, "new": call.new}
        found = self.ask(way, do="generate", implementation=self.process.ways[way], seed=seed, patience=PATIENCE, **fields)
        return found and {**fields, **found}

    def close(self) -> None:
        if self.worker:
            self.worker.close()


def about() -> dict:
    """What a result says of itself, besides its comparisons."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": machine.commit(),
        "ktmoe": ktmoe.__version__,
        "cpu": machine.cpu_fields(),
    }


def compare(
    engine: Engine, comparison: str, options: Namespace, python: Path, folder: Path, progress: Callable[[str], object]
) -> dict:
    """One model in all ways that take part. options: of `run`, see __main__.py. folder: a new one, for the checkpoint.

    Failures of participants are part of the result. Raises ValueError if those who must take part do not fit into memory,
    WorkerError if the checkpoint could not be written.
    """
    taking_part, layers = who_fits(engine, comparison, machine.usable_bytes(SHARE_OF_MEMORY), options.layers)
    config = engine.config(layers)
    title = f"{engine.name}, {layers} layers"
    progress(f"{title}: writing")
    write(python, folder, config)
    participants = [Participant(process) for process in taking_part]
    try:
        for participant in participants:
            progress(f"{title}: loading {participant.process.name}")
            load(participant, python, folder, config)
        progress(f"{title}: checking")
        _check(participants, folder)
        rounds = list(_rounds(engine, participants, options.rounds, lambda text: progress(f"{title}: {text}")))
    finally:
        for participant in participants:
            participant.close()
    return {
        "model": engine.name,
        "comparison": comparison,
        "layers": layers,
        "of_layers": engine.experts.layers,
        "vocabulary": config["vocab_size"],
        "base": OURS.name,
        "ways": {
            name: described(participant, name) | {"expert_bytes": engine.expert_bytes(participant.process.weights)}
            for participant in participants
            for name in participant.process.ways
        },
        "rounds": rounds,
    }


def described(participant: Participant, way: str) -> dict:
    process, failures = participant.process, participant.failures
    return {
        "weights": process.weights,
        "environment": process.environment,
        "failure": failures.get(way, failures.get("")),
        "error": participant.errors.get(way),
        "load": participant.loaded,
    }


def start(python: Path, folder: Path, log: str, environment: dict[str, str], worker: str = "worker") -> processes.Process:
    threads = str(ktmoe.get_num_threads())
    command = [python, "-m", f"bench.engines.{worker}", folder, threads]
    fixed = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return processes.Process(command, folder.parent / f"{log}.log".replace(" ", "-"), fixed | environment)


def write(python: Path, folder: Path, config: dict, dense: str = "BF16") -> None:
    worker = start(python, folder, "write", {})
    try:
        worker.ask(do="write", config=config, dense=dense, patience=PATIENCE)
    finally:
        worker.close()


def load(participant: Participant, python: Path, folder: Path, config: dict) -> None:
    process = participant.process
    participant.worker = start(python, folder, process.name, process.environment)
    fields = {"owner": process.owner, "weights": process.weights} | ({"dense": process.dense} if process.dense else {})
    participant.loaded = participant.ask("", do="load", config=config, **fields, patience=PATIENCE) or {}


def _check(participants: list[Participant], folder: Path) -> None:
    """Whoever's logits differ from those of transformers' own loop over experts is out. Alone, nobody is."""
    found = {}
    for participant in participants:
        for way, implementation in participant.ways.items():
            file = folder / "logits.npy"
            if (
                participant.ask(way, do="logits", implementation=implementation, tokens=CHECKED_TOKENS, into=file.name)
                is not None
            ):
                found[way] = participant, np.load(file)
    judge = next(iter(THEIRS.ways))
    if judge not in found:
        return
    _, expected = found[judge]
    for way, (participant, logits) in found.items():
        error = participant.errors[way] = median_error(logits, expected)
        if not error <= MOST_ERROR:
            participant.failures[way] = wrong(error)


def wrong(error: float) -> str:
    """Why a way is out whose logits are."""
    return f"WRONG: the median token's logits differ by {error:.2%}, more than {MOST_ERROR:.0%}"


def median_error(logits: np.ndarray, expected: np.ndarray) -> float:
    """|difference| / |expected| of the median token. A router may choose otherwise at a near tie: of few tokens."""
    return float(np.median(np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)))


def _rounds(engine: Engine, participants: list[Participant], count: int, progress: Callable[[str], object]):
    """Each round's own read bandwidth and calls. A round before them is for warming up."""
    with reading(engine) as limits:
        for number in range(count + 1):
            record = {"read": limits.read(LIMIT_SECONDS), "read_streams": limits.streams, "ways": {}}
            for participant in participants[:: -1 if number % 2 else 1]:
                for way in participant.ways:
                    progress(f"round {number} of {count}, {way}")
                    if found := turn(participant, way, number, CALLS):
                        record["ways"][way] = found
            if number:
                yield record


@contextmanager
def reading(engine: Engine) -> Iterator[measuring.LimitMeter]:
    """What measures the read bandwidth, on experts that no participant reads."""
    experts = engine.experts.make(min(16, engine.experts.experts))
    backend, table = next(iter(measuring.backends_for(experts).items()))
    with ktmoe.MoELayer(experts, backend) as layer:
        yield measuring.settled(layer, table)


def turn(participant: Participant, way: str, number: int, calls: Sequence[Call]) -> list[dict] | None:
    """All calls of one way; None if one failed."""
    if participant.generate(way, WARM, number) is None:  # wakes its threads
        return None
    found = []
    for call in calls:
        answer = participant.generate(way, call, number)
        if answer is None:
            return None
        found.append(answer)
    return found
