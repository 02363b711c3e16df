"""dying.py SOURCE FOLDER FIRST STEP: conversions of SOURCE into FOLDER/N, each killed at its Nth step of writing files.

N is FIRST, FIRST + STEP and so on, until one is not killed, since it has fewer steps: that N is printed. With STEP 0, all go
into FOLDER/FIRST, each killed at its step FIRST, until one is done.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from ktmoe.conversion import convert
from ktmoe.files import atomic

#: What each of these does is a step: before it a process may die, and in the middle of write().
_OF_OS = "fsync", "rename", "unlink"


def main(source: str, folder: str, first: int, step: int) -> int:
    number, killed = first, True
    while killed:
        child = os.fork()
        if not child:
            _die_at(number)
            convert(source, Path(folder) / str(number), "mxfp4", shard_bytes=12_000)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        assert killed or os.waitstatus_to_exitcode(status) == 0, status
        number += step if killed else 0
    return number


def _die_at(step: int) -> None:
    left = step

    def count() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def before(function):
        def counted(*arguments, **options):
            return die() if count() else function(*arguments, **options)

        return counted

    for name in _OF_OS:
        setattr(os, name, before(getattr(os, name)))
    write = atomic.AtomicFile.write

    def half(self, data, at=None):
        if count():
            data = data if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            write(self, data[: len(data) // 2], at)
            die()
        write(self, data, at)

    atomic.AtomicFile.write = half


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
