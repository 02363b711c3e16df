"""The engine alone: steps of vLLM's engine in a process that the driver asks, by the ways in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bench.engines.session import PATIENCE, Call
from bench.engines.shapes import Engine
from bench.peers import environments, processes
from bench.peers.processes import WorkerError
from bench.vllm import ways
from bench.vllm.ways import WAYS, Way

CALLS = (Call(1, 512, 1), Call(1, 128, 33), Call(4, 128, 17))
WARM = Call(1, 16, 3)


def measure(engine: Engine, layers: int, rounds: int, folder: Path, progress: Callable[[str], object]) -> dict:
    """The result, which is JSON. A way that cannot be measured is out, and the result says why. Raises WorkerError without the
    first way."""
    python = environments.python(environments.VLLM, progress)
    ways.write(engine.config(layers), folder, progress)
    workers, found = {}, {}
    try:
        for way in WAYS:
            progress(f"loading {way.name}")
            workers[way.name] = worker = _start(python, folder, way)
            found[way.name] = {"weights": way.weights, "environment": way.environment, "load": {}, "failure": None}
            try:
                load = worker.ask(do="load", folder=str(folder / way.weights), patience=PATIENCE)
                expected = layers if way.plugged_in else 0
                if load["packed"] != expected:
                    raise WorkerError(f"expected ktmoe in {expected} layers, found {load['packed']}")
                found[way.name]["load"] = load
            except WorkerError as error:
                if way is WAYS[0]:
                    raise
                found[way.name]["failure"] = str(error)
        names = [name for name in found if not found[name]["failure"]]
        measured = []
        for number in range(rounds + 1):
            turns = {}
            for name in names[:: -1 if number % 2 else 1]:
                progress(f"round {number} of {rounds}, {name}")
                calls = [workers[name].ask(do="generate", **asdict(call), seed=10 * number + i) for i, call in _numbered()]
                turns[name] = calls[1:]
            measured.append(turns)
    finally:
        for worker in workers.values():
            worker.close()
    return {
        "layers": layers,
        "base": WAYS[0].name,
        "calls": [asdict(call) for call in CALLS],
        "ways": found,
        "rounds": measured[1:],  # the first is for warming up
    }


def _numbered() -> list[tuple[int, Call]]:
    """A short call wakes the threads."""
    return list(enumerate((WARM, *CALLS)))


def _start(python: Path, folder: Path, way: Way) -> processes.Process:
    variables = ways.variables(folder, way) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # then vLLM keeps no CPU for itself
    log = folder / f"{way.name}.log".replace(" ", "-")
    return processes.Process([python, "-m", "bench.vllm.worker"], log, variables)
