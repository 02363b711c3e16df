"""Runs of the command line in processes of their own, with a folder of their own for what is temporary."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Seconds that a process may take to end.
PATIENCE = 60


@dataclass(frozen=True)
class Server:
    """url: with /v1. line: what the command printed. temporary: where the view is. process: may be sent signals.

    output, errors: what it writes to stdout and stderr.
    """

    url: str
    line: str
    temporary: Path
    process: subprocess.Popen
    output: Path
    errors: Path


def start(arguments: list[str], temporary: Path, **options) -> subprocess.Popen:
    """`ktmoe` with these arguments. options: Popen's."""
    return subprocess.Popen(
        [sys.executable, "-m", "ktmoe", *arguments],
        env=os.environ | {"TMPDIR": str(temporary), "NO_COLOR": "1"},
        # a background shell hands SIGINT down ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


@contextmanager
def server(model: Path, temporary: Path, *arguments: str, files: int | None = None) -> Iterator[Server]:
    """`ktmoe serve` on a free port, once the model is loaded. It is killed if it still runs in the end.

    files: how many it may have open. It writes a line for each request, so that a pipe that nobody reads would stop it.
    """
    output, errors = temporary / "stdout", temporary / "stderr"
    with output.open("w") as stdout, errors.open("w") as stderr:
        process = start(["serve", str(model), "--port", "0", *arguments], temporary, stdout=stdout, stderr=stderr)
    if files is not None:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files, files))
    try:
        while not (found := re.search(r"^.*(http://\S+/v1).*\n", output.read_text())):
            assert process.poll() is None, errors.read_text()
            time.sleep(0.05)
        yield Server(found[1], found[0], temporary, process, output, errors)
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


def views(temporary: Path) -> list[Path]:
    """What is there of views."""
    return list(temporary.glob("ktmoe-view-*"))
