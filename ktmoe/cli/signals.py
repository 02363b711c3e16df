"""Signals that end a command whose temporary folders must not stay behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """Let signals exit by an exception: else they end the process before what is temporary is removed. Ignored ones stay so."""

    def leave(number, frame):
        for each in left_alone:  # a second one must not break off what this one begins
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    # nohup starts a process with SIGHUP ignored
    left_alone = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in left_alone:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in left_alone:
            signal.signal(number, signal.SIG_DFL)
