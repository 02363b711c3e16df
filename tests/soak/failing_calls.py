"""Processes in which a call of the C library can fail, by tests/soak/failing/: that library, and both ends of the talk.

A test starts a script of this folder and sends it a JSON object a line; it answers with one.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from environments import COMPILER

HERE = Path(__file__).parent
#: Bits of failing.h's kinds.
KINDS = ("allocate", "map", "map of file", "thread", "hint", "open", "read", "write", "sync", "name", "truncate", "lock")
KINDS = {name: 1 << i for i, name in enumerate((*KINDS, "status", "list", "close", "array"))}
HOWS = {"fail": 1, "fewer": 2, "kill": 3}
#: Modules whose own requests for memory may fail, by bits of failing_refuse().
MODULES = {"ktmoe": 1, "mmap": 2, "python": 4}


def build(folder: Path) -> Path:
    """The library, compiled."""
    library = folder / "failing.so"
    flags = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread"]
    done = subprocess.run([*COMPILER, *flags, *sorted((HERE / "failing").glob("*.c")), "-o", library, "-ldl"], text=True)
    assert done.returncode == 0
    return library


class Child:
    """A process that runs a script of this folder, with the library before all others."""

    def __init__(self, script: str, library: Path, *arguments: object, **variables: str):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("KTMOE_", "PYTHON"))}
        environment |= {"LD_PRELOAD": str(library), "PYTHONPATH": f"{HERE.parents[1]}:{HERE.parent}:{HERE}"} | variables
        command = [sys.executable, str(HERE / script), *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, text=True, bufsize=1, **pipes)

    def ask(self, **what: object) -> dict:
        """The answer. AssertionError says what the process was asked for when it died."""
        self._process.stdin.write(json.dumps(what) + "\n")
        line = self._process.stdout.readline()
        assert line, f"{what}: the process ended with {self._process.wait(60)}"
        return json.loads(line)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def serve(answer: Callable[..., dict]) -> None:
    """The other end: call `answer` with what was asked for, until there is no more."""
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


def sites(repeat, what: str, count: int, least: int = 1) -> Iterator[int]:
    """The numbers of calls that fail in this run, in an order that is always the same and begins anywhere."""
    order = random.Random(count).sample(range(count), count)
    return (order[number] for number in repeat(what, count, least))


class Library:
    """The library, in the process that it stands in."""

    def __init__(self):
        self._functions = functions = ctypes.PyDLL(None)  # without letting the GIL go: nothing else is to run meanwhile
        functions.failing_begin.argtypes = ctypes.c_uint, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_bool
        functions.failing_end.restype = ctypes.c_long
        functions.failing_hit.restype = ctypes.c_char_p
        functions.failing_module.argtypes = ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint, ctypes.c_bool
        functions.failing_allocations.restype = functions.failing_mapped.restype = ctypes.c_long

    def module(self, path: str, bit: int, counts: bool = False) -> None:
        """Let requests for memory from a module's code be refused; count what it holds."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith(os.path.realpath(path)) and " r-xp " in line:
                begin, end = (int(number, 16) for number in line.split()[0].split("-"))
                self._functions.failing_module(begin, end, bit, counts)

    def arrays(self) -> None:
        """Let the data of this thread's numpy arrays be refused, from now on."""
        address, set_handler = ctypes.c_char.in_dll(self._functions, "failing_arrays"), 304  # its place in numpy's C API
        api = self._functions.PyCapsule_GetPointer
        api.restype, api.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        new = self._functions.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        table = ctypes.cast(api(np._core.multiarray._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
        handler = new(ctypes.addressof(address), b"mem_handler", None)
        ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[set_handler])(handler)

    def folder(self, path: Path) -> None:
        """Files below it are meant."""
        self._functions.failing_folder(os.fsencode(path))

    def refuse(self, modules: list[str]) -> None:
        """Only these modules' requests for memory are counted and refused."""
        self._functions.failing_refuse(sum(MODULES[name] for name in modules))

    def begin(self, kinds: list[str], at: int, how: str = "fail", error: str = "ENOMEM", lasting: bool = False) -> None:
        """Let call number `at` of these kinds end this way, and if it lasts, those after it."""
        bits = sum(KINDS[kind] for kind in kinds)
        self._functions.failing_begin(bits, at, HOWS[how], getattr(errno, error), lasting)

    def end(self) -> int:
        """The number of calls that there were."""
        return self._functions.failing_end()

    @property
    def hit(self) -> str:
        """The function that failed first, or ""."""
        return (self._functions.failing_hit() or b"").decode()

    def held(self) -> dict[str, int]:
        """What this process holds. Threads end a little after they were joined."""
        for _ in itertools.takewhile(lambda _: len(os.listdir("/proc/self/task")) > 1, range(50)):
            time.sleep(1e-4)
        return {
            "allocations": self._functions.failing_allocations(),
            "mapped bytes": self._functions.failing_mapped(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }
