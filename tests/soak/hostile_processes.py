"""A process of its own for cases of hostile input: where it dies, the case is known."""

from __future__ import annotations

import itertools
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from environments import ROOT

HERE = Path(__file__).parent
#: Seconds until a child that does not answer is taken to hang, on a machine that does much else.
PATIENCE = 300
BLOCK = 256


def run_all(name: str, repeat, what: str, total: int) -> Counter:
    """Run cases in a child, and fail for what was wrong with any. How many of each kind were loaded and refused.

    name: of hostile_cases.CASES. repeat, what, total: tests/repeating.py's.
    """
    counts: Counter = Counter()
    shared = Path("/dev/shm")  # files there cost no disk
    place = shared if os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder, Child(name, folder) as child:
        numbers = repeat(what, total)
        while block := list(itertools.islice(numbers, BLOCK)):
            found = child.run(block[0], len(block))
            counts.update(found["counts"])
            for label in ("ms", "MB"):
                repeat.most(label, round(found[label], 1))
            for state in ("loaded", "refused"):
                repeat.most(state, sum(count for kind, count in counts.items() if kind.endswith(state)))
            assert not found["faults"], "\n\n".join(found["faults"])
    return counts


class Child:
    """A process of hostile_child.py."""

    def __init__(self, name: str, folder: str):
        self._folder = Path(folder)
        (self._folder / "files").mkdir()
        answers, writing = os.pipe()
        self._answers = os.fdopen(answers, "rb")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("KTMOE_", "PYTHON"))}
        environment |= {
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", HERE))),
            "PYTHONUNBUFFERED": "1",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "1",  # one for each thread would take address space, which is what is limited
        }
        with (self._folder / "said").open("w+b") as said:
            command = [sys.executable, "-W", "error", str(HERE / "hostile_child.py")]
            command += [name, str(self._folder / "files"), str(writing)]
            options = {"stdin": subprocess.PIPE, "stdout": said, "stderr": said, "pass_fds": [writing], "env": environment}
            self._process = subprocess.Popen(command, **options)
        os.close(writing)

    def run(self, first: int, count: int) -> dict:
        """Run these cases. Raises AssertionError, which names the case, where the process dies or hangs."""
        line = b""
        try:
            self._process.stdin.write(f"{first} {count}\n".encode())
            self._process.stdin.flush()
            if select.select([self._answers], [], [], PATIENCE)[0]:
                line = self._answers.readline()
        except BrokenPipeError:
            pass
        if line:
            return json.loads(line)
        hangs = self._process.poll() is None and not select.select([self._answers], [], [], 0)[0]
        self._process.kill()
        status, now = self._process.wait(), (self._folder / "files" / "now")
        number = struct.unpack("<q", now.read_bytes())[0] if now.exists() else None
        said = (self._folder / "said").read_text(errors="replace")[-4000:]
        raise AssertionError(f"case {number}: the process {'hangs' if hangs else f'ended with {status}'}: {said}")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
