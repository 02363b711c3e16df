"""Signals that end a command whose temporary folders must not stay behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """Left alone, these signals would end the process without removing what is temporary."""

    def leave(number, frame):
        sys.exit(128 + number)

    old = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
