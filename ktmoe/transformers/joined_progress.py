"""One progress of several things that load at the same time."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from ktmoe.backends.base import Progress
from ktmoe.progress_bar import bytes_done


class JoinedProgress:
    """Adds up what several parts report. progress: as Options has it; True draws a bar until close()."""

    def __init__(self, progress: Progress | bool | None):
        self._resources = ExitStack()
        self._report = self._resources.enter_context(bytes_done("loading")) if progress is True else progress or None
        self._lock = threading.Lock()
        self._done: list[int] = []
        self._total = 0

    def part(self, total: int) -> Progress | None:
        """What a part of so many bytes reports to. None if nobody listens. Make all parts before one begins."""
        joined = self._report
        if joined is None:
            return None
        index = len(self._done)
        self._done.append(0)
        self._total += total

        def report(done: int, _total: int) -> None:
            with self._lock:
                self._done[index] = done
                joined(sum(self._done), self._total)

        return report

    def close(self) -> None:
        """Remove the bar."""
        self._resources.close()
