"""Cases that break each promise of hostile_child.py, to see that it notices."""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings

import numpy as np
from hostile_cases import Cases

from ktmoe.errors import CheckpointError, memory_for


def _says() -> None:
    ctypes.CDLL(None).puts(b"from C")
    ctypes.CDLL(None).fflush(None)


def _waits() -> None:
    begun = time.process_time()
    while time.process_time() < begun + 1.1:
        pass


def _fails(message: str) -> None:
    raise CheckpointError(message)


def _takes() -> None:
    with memory_for("a file"):
        np.empty(300 << 20, np.uint8)


#: What each does, and what is said of it; None: nothing is wrong. The last one ends the process.
FAULTS = {
    "loads": (lambda: None, None),
    "refuses": (lambda: _fails("the file: wrong"), None),
    "another exception": (lambda: {}["a"], "KeyError"),
    "a warning": (lambda: warnings.warn("careful", stacklevel=1), "UserWarning: careful"),
    "names nothing": (lambda: _fails("wrong"), "does not name the thing"),
    "says something": (lambda: sys.stderr.write("well"), "said on stdout or stderr: b'well'"),
    "says something in C": (_says, "said on stdout or stderr: b'from C"),
    "keeps a descriptor": (lambda: os.open("/dev/null", os.O_RDONLY), "left a descriptor open"),
    "takes memory": (_takes, "asked for over 256 MiB"),
    "takes time": (_waits, "s of CPU time"),
    "crashes": (lambda: ctypes.string_at(0), "Segmentation fault"),
}


class Faulty(Cases):
    """A case for each of FAULTS."""

    warm_up = 0

    def __init__(self, folder: object):
        self._faults = list(FAULTS)

    def kind(self, number: int) -> str:
        return self._faults[number]

    def prepare(self, number: int) -> None:
        pass

    def run(self, number: int) -> None:
        FAULTS[self.kind(number)][0]()

    def restore(self, number: int) -> None:
        pass

    def is_good(self, number: int) -> bool:
        return False

    def names(self, number: int) -> tuple[str, ...]:
        return ("file",)
