"""The same calls by ktmoe, torch and ggml: participants, checked, and rounds in which each has its turn."""

from __future__ import annotations

import fnmatch
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np

import ktmoe
from bench import footprints, machine
from bench.linear.calls import Call
from bench.linear.sample import Sample, sample
from bench.peers import check, environments
from bench.peers.peers import BF16, INT8, PEERS, Way
from bench.peers.processes import Process, WorkerError
from bench.peers.rounds import Participant
from bench.peers.session import WORKERS
from ktmoe import measuring
from ktmoe.machine import memory
from ktmoe.matrix import Matrix

ROWS = (1, 4, 16, 128, 1024)
LEAST_ROUNDS = 3
#: A turn is as many calls in a row as fit into so long, at least one.
TURN_SECONDS, MOST_CALLS = 0.01, 64
#: All copies are used once before a turn's calls where that takes less, else one.
WARM_SECONDS = 0.2
#: Pages to measure the limits on, where caches are small.
LEAST_PAGES = 256 << 20
#: The script of each owner, and its ways: those for all weights and those for FP8. A bfloat16 number has 16 bits.
KTMOE = ("worker_linear_ktmoe.py", (Way("auto", BF16, 16),), ())
SCRIPTS = {
    "torch": ("worker_linear_torch.py", (Way("BF16", BF16, 16),), ()),
    "ggml": ("worker_linear_ggml.py", (Way("BF16", BF16, 16),), (Way("Q8_0", INT8, 8.5),)),
}


def measure_all(calls: list[Call], options: Namespace, folder: Path, progress: Callable[[str], object]) -> dict:
    """The whole measurement, which is JSON. A participant's failure is part of it; WorkerError is raised if ktmoe fails.

    options: of __main__.py.
    """
    count = ktmoe.get_num_threads()
    limits = _start("worker_linear_limits.py", str(max(footprints.wanted_bytes(), LEAST_PAGES)), Path(sys.executable), folder)
    participants: list[tuple[Participant, bool]] = []
    measured = []
    try:
        for participant, worker, interpreter, fp8_alone in _participants(options, progress):
            participants.append((participant, fp8_alone))
            if not participant.failure:
                participant.process = _start(worker, participant.way.name, interpreter, folder)
        base = participants[0][0]
        for call in calls:
            mine = [p for p, fp8_alone in participants if not p.failure and (call.weights != "BF16" or not fp8_alone)]
            measured.append(_call(call, mine, base, limits, options, folder, progress))
    finally:
        for process in [limits, *(participant.process for participant, _ in participants)]:
            if process:
                process.close()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": machine.commit(),
        "ktmoe": version("ktmoe"),
        "machine": {"cpu": machine.description()["cpu"], "threads": count},
        "cpu": machine.cpu_fields(),
        "base": base.key,
        "participants": {p.key: {"numerics": p.way.numerics, "failure": p.failure} for p, _ in participants},
        "calls": measured,
    }


def _participants(options: Namespace, progress: Callable[[str], object]) -> Iterator[tuple[Participant, str, Path, bool]]:
    """ktmoe first, with which the others are compared; script, interpreter, and whether it takes part for FP8 alone."""
    yield Participant("ktmoe", KTMOE[1][0], bound=True), KTMOE[0], Path(sys.executable), False
    for peer in PEERS:
        worker, every, of_fp8 = SCRIPTS.get(peer.title, ("", (), ()))
        for way in every + of_fp8:
            participant, interpreter = Participant(peer.title, way), Path()
            if not any(fnmatch.fnmatchcase(participant.key, pattern) for pattern in options.only or ["*"]):
                continue
            try:
                interpreter = environments.python(peer, progress)
            except (environments.SetUpError, OSError) as error:
                participant.fail(str(error))
            yield participant, worker, interpreter, way in of_fp8


def _start(worker: str, way: str, interpreter: Path, folder: Path) -> Process:
    count = str(ktmoe.get_num_threads())
    log = folder / f"{worker}-{way}.log".replace(" ", "-")
    command = [interpreter, WORKERS / worker, way, folder, count]
    return Process(command, log, {"OMP_NUM_THREADS": count, "PYTHONUNBUFFERED": "1"})


def _call(
    call: Call,
    participants: list[Participant],
    base: Participant,
    limits: Process,
    options: Namespace,
    folder: Path,
    progress: Callable[[str], object],
) -> dict:
    progress(f"{call.id}: writing the weights")
    dispatches = call.make()
    call.save(dispatches, folder / "call")
    copies = call.copies(footprints.MEMORY_SHARE / max(1, len(participants)))
    record = {
        "model": call.model,
        "call": call.call,
        "weights": call.weights,
        "shapes": [list(shape) for shape in call.shapes],
        "dispatches": len(call.dispatches),
        "row flops": call.row_flops,
        "copies": copies,
        "participants": {},
        "points": [],
    }
    ready = []
    for participant in participants:
        progress(f"{call.id}: loading {participant.key}")
        entry = record["participants"][participant.key] = _load(participant, call, copies)
        if entry["failure"] is None:
            ready.append(participant)
    if base not in ready:
        raise WorkerError(f"{base.key}: {record['participants'][base.key]['failure']}")
    for rows in options.rows:
        if not call.rows or rows in call.rows:
            mine = [participant for participant in ready if not participant.failure]
            record["points"].append(_point(call, dispatches, rows, copies, mine, limits, options, folder, progress))
    for file in (folder / "call").iterdir():
        file.unlink()
    return record


def _load(participant: Participant, call: Call, copies: int) -> dict:
    """copies: of the matrices as they are stored; wider weights have as many."""
    weights = sum(n * k for n, k in call.shapes)
    needed = round(weights * participant.way.bits / 8 * (copies + 2))  # two while they are made
    available = memory.available_bytes()
    if available is not None and available < needed:
        return {"about": {}, "failure": f"needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB is available"}
    try:
        return {"about": participant.ask(do="load", call="call", copies=copies)["about"], "failure": None}
    except WorkerError as error:
        if not participant.process.alive:
            participant.fail(str(error))
        return {"about": {}, "failure": str(error)}


def _point(
    call: Call,
    dispatches: list[list[Matrix]],
    rows: int,
    copies: int,
    participants: list[Participant],
    limits: Process,
    options: Namespace,
    folder: Path,
    progress: Callable[[str], object],
) -> dict:
    name = f"{call.id}, {rows} row{'s' * (rows > 1)}"
    xs = call.x(rows)
    np.savez(folder / "inputs.npz", *xs)
    progress(f"{name}: reference")
    wanted = sample(dispatches, xs, call.inputs)
    record, ready = {"rows": rows, "participants": {}, "rounds": []}, []
    for participant in participants:
        progress(f"{name}: check {participant.key}")
        entry = record["participants"][participant.key] = _check(participant, wanted, copies, folder)
        if "failure" not in entry:
            ready.append(participant)
    if ready:
        record["rounds"] = list(_rounds(name, record["participants"], ready, limits, options, progress))
    return record


def _check(participant: Participant, wanted: Sample, copies: int, folder: Path) -> dict:
    """What is known of a participant at a point before it is measured; "failure" if it is not to be."""
    try:
        entry = participant.ask(do="point", inputs="inputs.npz")
        seconds = participant.ask(do="call", setting=entry["best"], calls=1, warm=1)["seconds"]
        entry["calls"] = max(1, min(MOST_CALLS, int(TURN_SECONDS / seconds)))
        entry["warm"] = copies if copies * seconds < WARM_SECONDS else 1
        entry["seconds"] = seconds * (entry["calls"] + entry["warm"])  # of a turn
        participant.ask(do="output", into="outputs.npz", rows=wanted.rows, columns=wanted.columns)
    except WorkerError as error:
        if not participant.process.alive:
            participant.fail(str(error))
        return {"failure": str(error)}
    with np.load(folder / "outputs.npz") as arrays:
        found = [arrays[name] for name in arrays.files]
    entry["error"] = wanted.error(found)
    if participant.bound:
        entry["of_bound"] = wanted.of_bound(found, rounded=True)
        if not entry["of_bound"] <= 1:
            entry["failure"] = f"WRONG: an output is off by {entry['of_bound']:.3g} times its bound"
    elif not entry["error"] <= (most := check.MOST_ERROR[participant.way.numerics]):
        entry["failure"] = f"WRONG: error {entry['error']:.2%} of the output, more than {most:.0%}"
    return entry


def _rounds(
    name: str,
    entries: dict[str, dict],
    ready: list[Participant],
    limits: Process,
    options: Namespace,
    progress: Callable[[str], object],
) -> Iterable[dict]:
    turns = [entries[participant.key]["seconds"] for participant in ready]
    for_limits = min(max(measuring.LEAST_SECONDS, measuring.SHARE_OF_CALL * min(turns)), measuring.MOST_SECONDS)
    total = min(options.rounds, max(LEAST_ROUNDS, int(options.seconds / sum(turns))))
    for number in range(total):
        progress(f"{name}: round {number + 1} of {total}")
        record = {**limits.ask(do="limits", seconds=for_limits), "seconds": {}}
        for participant in ready[:: -1 if number % 2 else 1]:
            entry = entries[participant.key]
            if participant.failure:
                continue
            try:
                answer = participant.ask(do="call", setting=entry["best"], calls=entry["calls"], warm=entry["warm"])
                record["seconds"][participant.key] = answer["seconds"]
            except WorkerError as error:
                entry["failure"] = str(error)
                participant.fail(str(error))
        yield record


def figures(result: dict, call: dict, point: dict, key: str) -> dict | None:
    """Medians over the rounds of one participant at one point; None if it has none.

    read_share: of its own bytes, which differ where it has the weights in another format. peak_share: of the kernels that
    ktmoe multiplies by, for all. lead: by how much ktmoe's call is faster, the median of the rounds' own ratios; None for
    ktmoe itself.
    """
    took = [row for row in point["rounds"] if key in row["seconds"]]
    if not took:
        return None
    base = result["base"]
    nbytes = call["participants"][key]["about"]["bytes"]
    flops = call["row flops"] * point["rows"]
    kernels = call["participants"][base]["about"]["kernels"]
    seconds = [row["seconds"][key] for row in took]
    ratios = [row["seconds"][key] / row["seconds"][base] for row in took if base in row["seconds"]]
    return {
        "seconds": statistics.median(seconds),
        "bytes": nbytes,
        "bytes_rate": statistics.median(nbytes / each for each in seconds),
        "flops_rate": statistics.median(flops / each for each in seconds),
        "read_share": statistics.median(nbytes / row["seconds"][key] / row["read"] for row in took),
        "peak_share": statistics.median(flops / row["seconds"][key] / row["peaks"][kernels] for row in took),
        "lead": statistics.median(ratios) if ratios and key != base else None,
        "rounds": len(took),
    }
