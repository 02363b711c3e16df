"""The time from the start of a process until its first token is there: of a GGUF file that the page cache has or has not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ktmoe
from bench import machine, reading
from bench.engines import first_token, published_gguf, session
from bench.engines.shapes import Engine
from bench.engines.ways import COLD, PASSIVE, layers_that_fit, must_take_part
from bench.peers.processes import WorkerError

#: The share of a file that may still be in the page cache when it counts as cold.
MOST_CACHED = 0.001


@dataclass(frozen=True)
class Start:
    """A way to start. how: see first_token.py; "cache" stands for the packed cache."""

    name: str
    owner: str
    how: str


MMAP = Start("llama.cpp, mmap", "llama.cpp", "mmap")
STARTS = (
    Start("ktmoe", "ktmoe", "none"),
    Start("ktmoe, packed cache", "ktmoe", "cache"),
    MMAP,
    Start("llama.cpp, no mmap", "llama.cpp", "no mmap"),
)


def compare(
    engine: Engine,
    options: Namespace,
    python: Callable[[str], Path],
    folder: Path,
    progress: Callable[[str], object],
) -> dict:
    """One model in all ways, one process after the other. options, python, folder, progress: as whole.compare() has them.

    Failures are part of the result. Raises ValueError if the layers do not fit into memory, OSError if nothing can be written.
    """
    most = layers_that_fit(engine, must_take_part(engine, COLD), machine.usable_bytes(session.SHARE_OF_MEMORY))
    layers = (engine.experts.layers if options.layers == "all" else options.layers) or most
    if not 1 <= layers <= most:
        raise ValueError(f"{engine.name}: expected memory for {max(layers, 1)} layers, found enough for {most}")
    files = _Files(engine, layers, python, folder, lambda text: progress(f"{engine.name}, {layers} layers: {text}"))
    failures: dict[str, str] = {}
    files.write(failures)
    readers = reading.fastest(folder)
    rounds = []
    for number in range(1, options.rounds + 1):
        reading.forget(folder)
        row = {"number": number, "disk": reading.total_bytes(folder) / reading.read(folder, readers), "ways": {}}
        for start in STARTS[:: -1 if number % 2 else 1]:
            if start.name not in failures:
                row["ways"][start.name] = files.measure(start, number, failures)
        rounds.append(row)
    return {
        "model": engine.name,
        "comparison": COLD,
        "file": published_gguf.TYPES[engine.kind],
        "layers": layers,
        "of_layers": engine.experts.layers,
        "vocabulary": engine.vocabulary_of(layers),
        "file_bytes": reading.total_bytes(folder),
        "cache_bytes": reading.total_bytes(files.cache),
        "prompt": first_token.PROMPT,
        "ways": {start.name: {"failure": failures.get(start.name), "owner": start.owner} for start in STARTS},
        "rounds": rounds,
    }


class _Files:
    """The file and its packed cache, and processes that start from them."""

    def __init__(
        self, engine: Engine, layers: int, python: Callable[[str], Path], folder: Path, progress: Callable[[str], object]
    ):
        self._engine, self._layers, self._python, self._folder, self._progress = engine, layers, python, folder, progress
        self._file = folder / "model.gguf"
        self._chosen: dict[str, int] = {}
        self.cache = folder.with_name("cache")

    def write(self, failures: dict[str, str]) -> None:
        self._progress("writing")
        self._folder.mkdir()
        published_gguf.write(self._engine, self._layers, self._file)
        self._progress("packing")
        command = [sys.executable, "-m", "ktmoe", "pack", self._file, self.cache]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=session.ROOT)
        if done.returncode:
            self.cache.mkdir(exist_ok=True)
            failures.update({start.name: _last(done.stderr) for start in STARTS if start.how == "cache"})

    def measure(self, start: Start, number: int, failures: dict[str, str]) -> dict[str, dict]:
        """{"cold": seconds of each part, "warm": ...}. What fails is the last of this way."""
        found = {}
        for state in ("cold", "warm"):
            self._progress(f"round {number}, {start.name}, {state}")
            try:
                found[state] = self._started(start, state)
            except WorkerError as error:
                failures[start.name] = str(error)
                return {}
        return found

    def _started(self, start: Start, state: str) -> dict:
        used = [self._folder, *([self.cache] if start.how == "cache" else [])]
        for folder in (self._folder, self.cache):
            reading.forget(folder)
        for folder in used if state == "warm" else ():
            reading.read(folder, 2)
        cached = [reading.cached_share(folder) for folder in used]
        if state == "cold" and max(cached) > MOST_CACHED:
            raise WorkerError(f"expected files that are not in the page cache, found {max(cached):.1%} of one there")
        threads = str(ktmoe.get_num_threads())
        how = str(self.cache) if start.how == "cache" else start.how
        command = [self._python(start.owner), "-m", "bench.engines.first_token", start.owner, self._file, threads, how]
        fixed = {"PYTHONPATH": str(session.ROOT), "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        environment = os.environ | fixed | (PASSIVE if start.owner == "ktmoe" else {})
        begun = time.monotonic()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment, timeout=session.PATIENCE
            )
        except subprocess.TimeoutExpired:
            raise WorkerError(f"no token within {session.PATIENCE} s") from None
        if done.returncode:
            raise WorkerError(_last(done.stderr) or f"it ended with status {done.returncode}")
        times = json.loads(done.stdout.splitlines()[-1])
        if self._chosen.setdefault(start.owner, times["chosen"]) != times["chosen"]:
            raise WorkerError(f"WRONG: it chose token {times['chosen']}, and before token {self._chosen[start.owner]}")
        return {
            "cached": min(cached),
            "start": times["began"] - begun,
            "imports": times["imported"] - times["began"],
            "load": times["loaded"] - times["imported"],
            "token": times["token"] - times["loaded"],
        }


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
