"""What the driver and its workers say to each other, and what all workers share. Needs numpy alone.

A worker is a script that the driver starts in its peer's environment: `worker_x.py WAY FOLDER THREADS WEIGHTS`. It reads
one JSON object a line from stdin and answers each with one line on stdout, {"error": text} if it cannot. FOLDER holds a
checkpoint, whose format WEIGHTS names, a file that says where its tensors are, and the points' inputs. What libraries print
goes to stderr.

    {"do": "load"}                                     -> {"about": {...}}
    {"do": "point", "inputs": name}                    -> {"settings": {name: seconds}, "best": name}
    {"do": "call", "setting": name, "batch": 3}        -> {"seconds": 0.0123}
    {"do": "output", "into": name}                     -> {}    float32 [tokens, hidden] of the last call, as .npy
    {"do": "limits", "seconds": 0.05}                  -> {"read": bytes a second, "peaks": {kernels: FLOPs a second}}
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: How often a setting is tried, and how long a call is tried but once.
TRIES, LONG_SECONDS = 4, 0.5
FEW_TOKENS = 16
PR_SET_PDEATHSIG = 1
#: The file in the folder that has the layer's sizes, and of each tensor its file, where it begins, its bytes and its shape.
LISTING = "peers.json"
#: What the names of a matrix's tensors begin with, by its projection, and their endings, by the format's first word. Without an
#: expert's number, a tensor holds all experts.
PROJECTIONS = ("gate", "up", "down")
NAMES = {name: f"model.layers.0.mlp.experts.{{expert}}.{name}_proj." for name in PROJECTIONS}
NUMBERED = {name: f"layers.0.ffn.experts.{{expert}}.w{number}." for name, number in zip(PROJECTIONS, (1, 3, 2), strict=True)}
TENSORS = {
    "MXFP4": (NUMBERED, {"weight": np.uint8, "scale": np.uint8}),
    "BF16": (NAMES, {"weight": np.uint16}),
    "FP8": (NAMES, {"weight": np.uint8, "weight_scale_inv": np.float32}),
    "INT4": (NAMES, {"weight_packed": np.uint8, "weight_scale": np.uint16}),
    "GGUF": ({name: f"blk.0.ffn_{name}_exps." for name in PROJECTIONS}, {"weight": np.uint8}),
}


@dataclass(frozen=True)
class Batches:
    """Calls of one size. x: bfloat16 bits, uint16 [tokens, hidden]; ids int64 and weights float32: [batches, tokens, top_k]."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray

    @property
    def tokens(self) -> int:
        return len(self.x)

    def save(self, file: Path) -> None:
        np.savez(file, x=self.x, ids=self.ids, weights=self.weights)

    @classmethod
    def load(cls, file: Path) -> Batches:
        with np.load(file) as arrays:
            return cls(arrays["x"], arrays["ids"], arrays["weights"])


class Calls:
    """One size of calls, ready to run. A worker's own class; stage() is not timed, run() is."""

    def stage(self, batch: int) -> None:
        """Put a batch's inputs where run() takes them."""

    def run(self, setting: str) -> None:
        """One call."""
        raise NotImplementedError

    def output(self) -> np.ndarray:
        """The last call's, float32 [tokens, hidden]."""
        raise NotImplementedError


def thread_counts(threads: int, tokens: int) -> list[int]:
    """All threads, and one where calls are small enough that others may only be in its way."""
    return [threads, 1] if threads > 1 and tokens <= FEW_TOKENS else [threads]


def count(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


class Worker:
    """A peer's way to run the experts. about: what the result's file says of it."""

    about: dict

    def __init__(self, way: str, model: Model, threads: int):
        raise NotImplementedError

    def settings(self, tokens: int) -> list[str]:
        """Ways to run calls of this size, of which the fastest is used. All of them can run a call of one token."""
        raise NotImplementedError

    def prepare(self, batches: Batches) -> Calls:
        raise NotImplementedError

    def limits(self, seconds: float) -> dict:
        """The machine's read bandwidth and multiply peaks; only worker_limits.py measures them."""
        raise NotImplementedError


class Model:
    """The checkpoint in a folder: one layer of experts. weights: their format, whose first word TENSORS has."""

    def __init__(self, folder: Path, weights: str):
        self.folder, self.weights = folder, weights
        about = json.loads((folder / LISTING).read_text())
        self.experts, self.top_k = about["num_experts"], about["top_k"]
        self.hidden, self.intermediate = about["hidden"], about["intermediate"]
        self._tensors = about["tensors"]

    def matrix(self, expert: int, projection: str) -> tuple[np.ndarray, ...]:
        """What TENSORS has of a matrix [n, k]. Bytes of 4-bit codes have the even k in the low nibble.

        MXFP4: codes uint8 [n, k / 2], and UE8M0 scales uint8 [n, k / 32]. BF16: bits uint16 [n, k].
        FP8: E4M3 uint8 [n, k], and scales float32 of 128 x 128. INT4: codes plus 8, uint8 [n, k / 2], and scales, the bits
        of bfloat16, uint16 [n, k / 32]. GGUF: records, uint8 [n, bytes of a row].
        """
        names, tensors = TENSORS[self.weights.split()[0]]
        return tuple(self._read(names[projection], ending, dtype, expert) for ending, dtype in tensors.items())

    def _read(self, name: str, ending: str, dtype: type, expert: int) -> np.ndarray:
        file, offset, nbytes, shape = self._tensors[name.format(expert=expert) + ending]
        if "{expert}" not in name:
            num_experts, *shape = shape
            nbytes //= num_experts
            offset += expert * nbytes
        return np.fromfile(file, dtype, nbytes // np.dtype(dtype).itemsize, offset=offset).reshape(shape[0], -1)


def serve(worker: type[Worker]) -> None:
    """Answer the driver until it closes the pipe or ends."""
    way, folder, threads, weights = sys.argv[1:]
    answer_all(_Session(worker, way, Path(folder), int(threads), weights).answer)


def answer_all(answer: Callable[[dict], dict]) -> None:
    """Answer each message of the driver, until it closes the pipe or ends. An exception is an answer, too."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped worker would not notice
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


class _Session:
    def __init__(self, worker: type[Worker], way: str, folder: Path, threads: int, weights: str):
        self._start = lambda: worker(way, Model(folder, weights), threads)
        self._folder = folder
        self._warm: Calls | None = None
        self._calls: Calls | None = None

    def answer(self, message: dict) -> dict:
        match message["do"]:
            case "load":
                self._worker = self._start()
                return {"about": self._worker.about}
            case "point":
                return self._point(Batches.load(self._folder / message["inputs"]))
            case "call":
                return {"seconds": self._call(message["setting"], message["batch"])}
            case "output":
                np.save(self._folder / message["into"], self._calls.output())
                return {}
            case "limits":
                return self._worker.limits(message["seconds"])
        raise ValueError(f"unknown message {message}")

    def _point(self, batches: Batches) -> dict:
        self._calls = None  # frees the last point's first
        if self._warm is None:
            self._warm = self._worker.prepare(Batches.load(self._folder / "warm.npz"))
        self._calls = self._worker.prepare(batches)
        seconds = {}
        for name in self._worker.settings(batches.tokens):
            seconds[name] = self._call(name, 0)
            for batch in range(1, TRIES if seconds[name] < LONG_SECONDS else 1):
                seconds[name] = min(seconds[name], self._call(name, batch % len(batches.ids)))
        return {"settings": seconds, "best": min(seconds, key=seconds.get)}

    def _call(self, setting: str, batch: int) -> float:
        self._warm.stage(0)
        self._warm.run(setting)  # wakes the threads
        self._calls.stage(batch)
        start = time.perf_counter()
        self._calls.run(setting)
        return time.perf_counter() - start
