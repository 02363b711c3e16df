"""What the workers that train share: the inputs of a step, and the messages. Needs numpy alone.

A step is a forward() that keeps what backward() needs, and backward(): the gradients of x, of the router's weights, and of
adapters of gate, up and down. The experts' weights are frozen. A worker is started as protocol.py says, and answers:

    {"do": "load", "rank": 16}                         -> {"about": {...}}
    {"do": "point", "inputs": name}                    -> {"settings": {name: seconds}, "best": name}
    {"do": "call", "setting": name, "batch": 3}        -> {"forward": seconds, "backward": seconds}
    {"do": "output", "into": name, "expert": 7}        -> {}    .npz of what Steps.outputs() gives of the last call
    {"do": "memory"}                                   -> {"now": bytes, "most": bytes}    resident; in this point
    {"do": "limits", "seconds": 0.05}                  -> {"peak": FLOPs a second}    of a worker that can measure it
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from protocol import Model, answer_all
from steps import Inputs

#: How often a setting is tried, and how long a step is tried but once.
TRIES, LONG_SECONDS = 2, 2.0


class Steps:
    """Steps of one size, ready to run. A worker's own class; stage() is not timed, forward() and backward() are."""

    def stage(self, batch: int) -> None:
        """Put a batch's inputs where forward() and backward() take them."""

    def forward(self, setting: str) -> None:
        """y, and what backward() needs."""
        raise NotImplementedError

    def backward(self, setting: str) -> None:
        """All gradients, in place of the last step's."""
        raise NotImplementedError

    def outputs(self, expert: int) -> dict[str, np.ndarray]:
        """What the last step gave, float32: y and grad_x [tokens, hidden], grad_weights [tokens, top_k], and of one expert
        {projection}_a and {projection}_b, its adapters' gradients."""
        raise NotImplementedError


class TrainingWorker:
    """A peer's way to train. about: what the result's file says of it."""

    about: dict

    def __init__(self, way: str, model: Model, threads: int, rank: int):
        raise NotImplementedError

    def settings(self, tokens: int) -> list[str]:
        """Ways to run steps of this size, of which the fastest is used."""
        raise NotImplementedError

    def prepare(self, inputs: Inputs) -> Steps:
        raise NotImplementedError

    def limits(self, seconds: float) -> dict:
        raise NotImplementedError


def serve(worker: type[TrainingWorker]) -> None:
    """Answer the driver until it closes the pipe or ends."""
    way, folder, threads, weights = sys.argv[1:]
    answer_all(_Session(worker, way, Path(folder), int(threads), weights).answer)


class _Session:
    def __init__(self, worker: type[TrainingWorker], way: str, folder: Path, threads: int, weights: str):
        self._start = lambda rank: worker(way, Model(folder, weights), threads, rank)
        self._folder = folder
        self._steps: Steps | None = None

    def answer(self, message: dict) -> dict:
        match message["do"]:
            case "load":
                self._worker = self._start(message["rank"])
                return {"about": self._worker.about}
            case "point":
                return self._point(Inputs.load(self._folder / message["inputs"]))
            case "call":
                forward, backward = self._call(message["setting"], message["batch"])
                return {"forward": forward, "backward": backward}
            case "output":
                np.savez(self._folder / message["into"], **self._steps.outputs(message["expert"]))
                return {}
            case "memory":
                return {"now": _resident("VmRSS"), "most": _resident("VmHWM")}
            case "limits":
                return self._worker.limits(message["seconds"])
        raise ValueError(f"unknown message {message}")

    def _point(self, inputs: Inputs) -> dict:
        self._steps = None  # frees the last point's first
        Path("/proc/self/clear_refs").write_text("5")  # the most resident from now on
        self._steps = self._worker.prepare(inputs)
        seconds = {}
        for name in self._worker.settings(inputs.tokens):
            seconds[name] = sum(self._call(name, 0))
            for batch in range(1, TRIES if seconds[name] < LONG_SECONDS else 1):
                seconds[name] = min(seconds[name], sum(self._call(name, batch % len(inputs.ids))))
        return {"settings": seconds, "best": min(seconds, key=seconds.get)}

    def _call(self, setting: str, batch: int) -> tuple[float, float]:
        self._steps.stage(batch)
        start = time.perf_counter()
        self._steps.forward(setting)
        between = time.perf_counter()
        self._steps.backward(setting)
        return between - start, time.perf_counter() - between


def _resident(name: str) -> int:
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(name))
