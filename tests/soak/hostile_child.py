"""hostile_child.py CASES FOLDER ANSWERS: runs cases of hostile input, which may end this process, and says what came of them.

CASES is a key of hostile_cases.CASES, or "faulty". FOLDER is for its files. "FIRST COUNT" on stdin asks for cases; the answer
is a line of JSON on the descriptor ANSWERS. FOLDER/now has the number of the case that runs, also where the process died.

What is promised: a case loads, or raises a KtmoeError that is short and names the thing. It takes less than SECONDS of CPU time
(time.process_time) and less than MEMORY (RLIMIT_AS, so that more is refused). It says nothing on stdout and stderr, raises no
warning and leaves no descriptor open. "MB" in an answer is by how much the peak of resident memory has grown since the start.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from hostile_cases import CASES, Cases

import ktmoe
from ktmoe.errors import KtmoeError, OutOfMemoryError
from ktmoe.messages import MESSAGE_LIMIT

#: What a case may take: CPU seconds, and bytes of address space beyond what the process had.
SECONDS, MEMORY = 1.0, 256 << 20
#: CPU seconds after which a case is ended, and the process with it.
_ENDED_AFTER = 10
_FAULTS = 5  # that are told of in one answer


def main(name: str, folder: Path, answers: int) -> None:
    """Answer until stdin ends."""
    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)  # says where, then SIGPROF ends the process
    ktmoe.set_num_threads(1)
    (folder / "now").write_bytes(bytes(8))
    with (folder / "now").open("r+b") as file:
        now = mmap.mmap(file.fileno(), 8)
    cases = _cases(name)(folder)
    for number in range(cases.warm_up):  # what is made once
        hostile_case(cases, number, Counter())
    gc.collect()
    gc.freeze()
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    before = _status("VmHWM")
    while line := sys.stdin.readline():
        first, count = map(int, line.split())
        counts: Counter = Counter()
        faults, slowest = [], 0
        for number in range(first, first + count):
            now[:] = struct.pack("<q", number)
            took, fault = hostile_case(cases, number, counts)
            slowest = max(slowest, took)
            if fault and len(faults) < _FAULTS:
                faults.append(f"case {number} ({cases.label(number)}): {fault}")
        answer = {"counts": counts, "faults": faults, "ms": slowest / 1e6, "MB": (_status("VmHWM") - before) / 1e6}
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _cases(name: str) -> type[Cases]:
    if name == "faulty":
        from faulty_cases import Faulty

        return Faulty
    return CASES[name]


def hostile_case(cases: Cases, number: int, counts: Counter) -> tuple[int, str]:
    """Run one case: nanoseconds of CPU time, and what was wrong, or ""."""
    descriptor, said = _next_descriptor(), _said()
    cases.prepare(number)
    good = cases.is_good(number)
    signal.setitimer(signal.ITIMER_PROF, _ENDED_AFTER)
    begun, wrong, refusal = time.process_time_ns(), "", None
    try:
        cases.run(number)
    except KtmoeError as error:
        refusal = error.with_traceback(None)
    except BaseException:
        wrong = traceback.format_exc(limit=-8)[-3000:]
    took = time.process_time_ns() - begun
    signal.setitimer(signal.ITIMER_PROF, 0)
    cases.restore(number)
    counts[f"{cases.kind(number)} {'refused' if refusal or wrong else 'loaded'}"] += 1
    if refusal is not None:
        wrong = _wrong_with(refusal, good, cases.names(number))
    if not wrong and took > SECONDS * 1e9:
        wrong = f"took {took / 1e9:.2f} s of CPU time"
    if not wrong and _next_descriptor() != descriptor:
        gc.collect()  # what garbage in a circle keeps open is no leak
        if _next_descriptor() != descriptor:
            wrong = "left a descriptor open"
    if _said() != said:
        wrong += f"said on stdout or stderr: {os.pread(1, 2000, said)!r}"
    return took, wrong


def _wrong_with(refusal: KtmoeError, good: bool, names: tuple[str, ...]) -> str:
    """What is wrong with a refusal, or "". names: of these, it must have one."""
    text = str(refusal)
    if isinstance(refusal, OutOfMemoryError):
        return f"asked for over {MEMORY >> 20} MiB: {text}"
    if good:
        return f"refused what is good: {text}"
    if not text or len(text) > MESSAGE_LIMIT or not text.isprintable():
        return f"a message of {len(text)} characters: {text!r}"
    if not any(name in text for name in names):
        return f"a message that does not name the thing: {type(refusal).__name__}: {text}"
    return ""


def _next_descriptor() -> int:
    """The number that a new descriptor would have."""
    found = os.dup(0)
    os.close(found)
    return found


def _said() -> int:
    """How many bytes were written to stdout and stderr, which are one file."""
    return os.fstat(1).st_size


def _status(key: str) -> int:
    """A number of bytes of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
