"""The CPUs that vLLM has given to a process: it binds each of its OpenMP threads to one, the first one, too."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from ktmoe.machine import threads

#: Libraries with OpenMP's interface, of GNU, Intel and LLVM, as the process has mapped them.
_LIBRARY = re.compile(r"(/.*/lib(?:gomp|iomp5|omp)\b[^/]*\.so[^/\s]*)$", re.MULTILINE)


def share() -> None:
    """Let the process's first thread run on all CPUs that its OpenMP threads are bound to. ktmoe's threads run where it does.

    Nothing changes where OpenMP's threads are not bound.
    """
    bound = set().union(*(_places(library) for library in set(_LIBRARY.findall(Path("/proc/self/maps").read_text()))))
    first = os.getpid()  # the thread of that number
    now = os.sched_getaffinity(first)
    if bound > now:
        os.sched_setaffinity(first, bound)
        threads.configure()


def _places(library: str) -> set[int]:
    """The CPUs of OpenMP's places (OpenMP 5.2, section 18.3), which are empty for a library that binds no thread."""
    openmp = ctypes.CDLL(library)
    cpus: set[int] = set()
    for place in range(openmp.omp_get_num_places()):
        numbers = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
        openmp.omp_get_place_proc_ids(place, numbers)
        cpus.update(numbers)
    return cpus
