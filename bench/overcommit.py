"""One token after another from a packed cache, in a control group that has less memory than the cache has bytes.

python -m bench.overcommit CHECKPOINT CACHE EXPERTS CALLS prints the seconds of each call as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ktmoe import MoELayer
from ktmoe.machine import cgroup

#: Bytes for the interpreter, its libraries and scratch memory, beside the pages of a cache.
PROCESS_BYTES = 150 << 20
#: Enters a group, and becomes another command there.
_ENTER = 'echo $$ >"$0/cgroup.procs" && exec "$@"'


class NoGroupError(Exception):
    """Why no control group with a limit can be made here."""


@contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """A new group within this process's own, whose processes may have so much memory and no swap. Raises NoGroupError."""
    own, limit = _own()
    group = own / f"ktmoe-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise NoGroupError(f"no control group can be made in {own}: {error.strerror}") from None
    try:
        try:
            (group / limit).write_text(str(nbytes))
        except OSError as error:
            raise NoGroupError(f"{limit} of a control group cannot be set: {error.strerror}") from None
        yield group
    finally:
        group.rmdir()


def _own() -> tuple[Path, str]:
    """(folder of this process's memory group, the file that holds a group's limit)."""
    for version, folder in cgroup.folders("memory"):
        limit = {1: "memory.limit_in_bytes", 2: "memory.max"}[version]
        if folder.exists():
            return folder, limit
    raise NoGroupError("this system has no control groups for memory")


def seconds_of_calls(checkpoint: Path, cache: Path, experts: int, calls: int, group: Path | None) -> list[float]:
    """The seconds of each call, in a new process. Raises CalledProcessError if it fails, or is killed."""
    command = [sys.executable, "-m", "bench.overcommit", checkpoint, cache, experts, calls]
    if group:
        command = ["sh", "-c", _ENTER, group, *command]
    done = subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def main(checkpoint: str, cache: str, experts: str, calls: str) -> None:
    rng = np.random.default_rng(1)
    with MoELayer.from_checkpoint(checkpoint, 0, cache=cache) as layer:
        top_k, took = 6, []
        for _ in range(int(calls)):
            x = rng.standard_normal((1, layer.hidden)).astype(np.float32)
            ids = rng.permutation(int(experts))[None, :top_k]
            start = time.perf_counter()
            layer.forward(x, ids, np.full((1, top_k), 1 / top_k, np.float32))
            took.append(time.perf_counter() - start)
    print(json.dumps(took))


if __name__ == "__main__":
    main(*sys.argv[1:])
