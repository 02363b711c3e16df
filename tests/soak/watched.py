"""Runs a function in a forked child that a watchdog ends: a hang is a failure that shows where every thread was."""

from __future__ import annotations

import faulthandler
import sys

from helpers import in_child

#: Seconds that a child may take before it counts as hanging, on a machine that does much else.
LONGEST = 240


def in_watched_child(function, seconds=LONGEST):
    """What function returns in a forked child. One that takes longer writes all threads' tracebacks on stderr and ends."""

    def watched():
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
        try:
            return function()
        finally:
            faulthandler.cancel_dump_traceback_later()

    return in_child(watched, seconds + 10)
