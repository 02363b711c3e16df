"""What a forked child renews: a lock that another thread held stays held in it, and that thread is not there."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  see below
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class AfterFork(Protocol):
    def after_fork(self) -> None:
        """Make new locks, and forget what other threads were about to do."""


#: Held while modules are imported at first use; a fork in another thread waits for it, since Python does not renew the lock of
#: a module that is being imported. It is taken before any other lock.
importing = threading.RLock()
_watched: weakref.WeakSet[AfterFork] = weakref.WeakSet()


T = TypeVar("T")


class cached_property(functools.cached_property[T]):
    """functools' without the lock that Python 3.11 has for all objects of a class: another thread may hold it at a fork, and
    the child would wait for ever. What is computed by two threads at once is equal."""

    def __init__(self, function: Callable[[Any], T]):
        super().__init__(function)
        self.lock = contextlib.nullcontext()


def watch(thing: AfterFork) -> None:
    """Call thing.after_fork() in every child that is forked from now on, before any of its own code. It may be collected."""
    _watched.add(thing)


def _renew() -> None:
    importing.release()  # by the thread that forked, which has it
    for thing in list(_watched):
        thing.after_fork()


# Now, before there is anything to lock, since another thread may fork at any time; but after concurrent.futures and logging,
# which hold locks of their own across a fork: the last that is registered is taken first.
os.register_at_fork(before=importing.acquire, after_in_parent=importing.release, after_in_child=_renew)
