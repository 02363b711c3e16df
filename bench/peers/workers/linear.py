"""What the workers that multiply by dense matrices share: a call's matrices and inputs, and the messages. Needs numpy alone.

A worker is a script: `worker_x.py WAY FOLDER THREADS`. It answers, as protocol.py says:

    {"do": "load", "call": name, "copies": 4}          -> {"about": {...}}    of the folder's matrices of that name
    {"do": "point", "inputs": name}                    -> {"settings": {name: seconds}, "best": name}
    {"do": "call", "setting": name, "calls": 8, "warm": 1} -> {"seconds": 0.0123}    of one of these calls
    {"do": "output", "into": name, "rows": [0], "columns": [[3, 9], ...]} -> {}    .npz of the last call, float32, by matrix
    {"do": "limits", "seconds": 0.05}                  -> {"read": bytes a second, "peaks": {kernels: FLOPs a second}}

Calls that follow each other use other copies. So many as "warm" says come before them and are not timed, the last of them with
the copy of the call before: one wakes the threads; as many as there are copies also use all pages, since a virtual machine may
read slowly those that nobody has used for seconds.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from protocol import answer_all
from weights import bfloat16_weights

#: How often a setting is tried, and how long a call is tried but once.
TRIES, LONG_SECONDS = 4, 0.5


@dataclass(frozen=True)
class Stored:
    """A matrix [n, k] in its format's arrays, numbers of 2 bytes as uint16. weights: BF16, or an FP8 of 128 x 128."""

    name: str
    shape: tuple[int, int]
    weights: str
    arrays: dict[str, np.ndarray]

    @property
    def bias(self) -> np.ndarray | None:
        """float32 [n]."""
        found = self.arrays.get("bias")
        return None if found is None else found.view(np.float32)

    def bfloat16(self) -> np.ndarray:
        """Bits, uint16 [n, k]. Weights of FP8 are rounded, unless their scales are powers of two."""
        codes, scales = self.arrays["codes"], self.arrays.get("scales")
        if scales is None:
            return codes
        numbers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127) if scales.itemsize == 1 else _float32(scales)
        return bfloat16_weights("FP8", codes, numbers)


def _float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Dense:
    """A call: the matrices of each dispatch, and "same" or "own" inputs."""

    weights: str
    inputs: str
    dispatches: list[list[Stored]]

    @classmethod
    def read(cls, folder: Path) -> Dense:
        about = json.loads((folder / "matrices.json").read_text())
        return cls(
            about["weights"],
            about["inputs"],
            [[_stored(folder, about, each) for each in matrices] for matrices in about["dispatches"]],
        )


def _stored(folder: Path, about: dict, matrix: dict) -> Stored:
    arrays = {label: np.load(folder / file, mmap_mode="r") for label, file in matrix["files"].items()}
    return Stored(matrix["name"], tuple(matrix["shape"]), about["weights"], arrays)


class LinearWorker:
    """A peer's way to multiply. about: what the result's file says of the call that was loaded last; "bytes" is of a copy."""

    about: dict

    def __init__(self, way: str, threads: int):
        raise NotImplementedError

    def load(self, call: Dense, copies: int) -> None:
        """Take these matrices in the place of the last ones, which were unloaded."""
        raise NotImplementedError

    def unload(self) -> None:
        """Give the memory of the matrices back."""
        raise NotImplementedError

    def settings(self, rows: int) -> list[str]:
        """Ways to run calls of this size, of which the fastest is used."""
        raise NotImplementedError

    def prepare(self, xs: list[np.ndarray]) -> None:
        """Take bits of bfloat16, uint16 [rows, k] or [rows, matrices, k], for each dispatch."""
        raise NotImplementedError

    def run(self, setting: str, copy: int) -> None:
        raise NotImplementedError

    def output(self) -> list[np.ndarray]:
        """What the last run gave, [rows, n] by matrix, or an object that takes [rows, columns] as such an array does."""
        raise NotImplementedError

    def limits(self, seconds: float) -> dict:
        raise NotImplementedError


def serve(worker: type[LinearWorker]) -> None:
    """Answer the driver until it closes the pipe or ends."""
    way, folder, threads = sys.argv[1:]
    answer_all(_Session(worker, way, Path(folder), int(threads)).answer)


class _Session:
    def __init__(self, worker: type[LinearWorker], way: str, folder: Path, threads: int):
        self._start = lambda: worker(way, threads)
        self._worker: LinearWorker | None = None
        self._folder = folder
        self._copies, self._last = 1, 0

    def answer(self, message: dict) -> dict:
        match message["do"]:
            case "load":
                self._worker = self._worker or self._start()
                self._worker.unload()
                self._copies, self._last = message["copies"], 0
                self._worker.load(Dense.read(self._folder / message["call"]), self._copies)
                return {"about": self._worker.about}
            case "point":
                return self._point(self._folder / message["inputs"])
            case "call":
                return {"seconds": self._call(message["setting"], message["calls"], message["warm"])}
            case "output":
                found = zip(self._worker.output(), message["columns"], strict=True)
                np.savez(self._folder / message["into"], *(y[np.ix_(message["rows"], columns)] for y, columns in found))
                return {}
            case "limits":
                self._worker = self._worker or self._start()
                return self._worker.limits(message["seconds"])
        raise ValueError(f"unknown message {message}")

    def _point(self, file: Path) -> dict:
        with np.load(file) as arrays:
            xs = [arrays[name] for name in arrays.files]
        self._worker.prepare(xs)
        seconds = {}
        for name in self._worker.settings(len(xs[0])):
            seconds[name] = self._call(name, 1)
            for _ in range(1, TRIES if seconds[name] < LONG_SECONDS else 1):
                seconds[name] = min(seconds[name], self._call(name, 1))
        return {"settings": seconds, "best": min(seconds, key=seconds.get)}

    def _call(self, setting: str, calls: int, warm: int = 1) -> float:
        for before in range(warm - 1, -1, -1):
            self._worker.run(setting, (self._last - before) % self._copies)
        start = time.perf_counter()
        for _ in range(calls):
            self._last = (self._last + 1) % self._copies
            self._worker.run(setting, self._last)
        return (time.perf_counter() - start) / calls
