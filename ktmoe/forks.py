"""What a forked child renews: a lock that another thread held stays held in it, and that thread is not there."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class AfterFork(Protocol):
    def after_fork(self) -> None:
        """Make new locks, and forget what other threads were about to do."""


_watched: weakref.WeakSet[AfterFork] = weakref.WeakSet()


def watch(thing: AfterFork) -> None:
    """Call thing.after_fork() in every child that is forked from now on, before any of its own code. It may be collected."""
    _watched.add(thing)


def _renew() -> None:
    for thing in list(_watched):
        thing.after_fork()


os.register_at_fork(after_in_child=_renew)  # before there is anything to lock, since another thread may fork at any time
