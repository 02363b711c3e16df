"""BackgroundTasks makes things a few at a time on threads of its own. It can be waited for and stopped."""

from __future__ import annotations

import atexit
import functools
import threading
import traceback
import weakref
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from ktmoe import forks
from ktmoe.errors import ClosedError, thread_for
from ktmoe.machine import numa


class Closable(Protocol):
    def close(self) -> None: ...


#: Called with (done_bytes, total_bytes); an exception from it cancels.
Progress = Callable[[int, int], object]


class BackgroundTasks:
    """Makes one thing for each key of `sizes`, in that order, `at_once` at a time.

    what: for messages. sizes: bytes of work by key. make: (key, its progress) -> the thing; it has to let exceptions from that
    progress pass. progress: of all, called by one thread at a time. resources: closed when nothing is being made any more.
    The threads end by themselves, and on stop() and end(). They are daemons, so that an interpreter that exits does not wait
    for what nobody will use: it stops them.
    """

    def __init__(
        self,
        what: str,
        sizes: Mapping[Any, int],
        make: Callable[[Any, Progress], Any],
        at_once: int,
        progress: Progress | None,
        resources: ExitStack,
    ):
        self._what = what
        self._sizes = dict(sizes)
        self._make = make
        self._report = progress
        self._resources = resources
        self._changed = threading.Condition()  # guards what follows, but for _done
        self._waiting = list(reversed(self._sizes))
        self._made: dict[Hashable, Closable] = {}
        self._failed: dict[Hashable, BaseException] = {}
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._stopped: str | None = None  # why
        self._cause: BaseException | None = None  # the exception from progress that stopped it
        self._orphaned = False  # in a forked child, which has none of the threads
        self._reporting = threading.Lock()  # guards _done, and is held while progress is called
        self._done = dict.fromkeys(self._sizes, 0)
        forks.watch(self)
        _alive[id(self)] = self
        _stop_at_exit()
        try:
            for number in range(min(at_once, len(self._sizes))):
                self._start(f"ktmoe-load-{number}")
        except BaseException:
            self.stop()
            raise

    def get(self, key: Hashable) -> Any:
        """What was made for a key, as soon as it is. Raises the error of making it; ClosedError if it was not to be made."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._made or key in self._failed or self._ended())
            if key in self._made:
                return self._made[key]
            if key in self._failed:
                raise self._failed[key]
            raise self._closed(f" {key}") from self._cause

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all are made; False if that takes longer. Raises the first error as soon as there is one."""
        with self._changed:
            everything = self._changed.wait_for(lambda: self._complete() or self._failed or self._ended(), timeout)
            if self._cause is not None:
                raise self._cause
            for key in self._sizes:
                if key in self._failed:
                    raise self._failed[key]
            if everything and not self._complete():
                raise self._closed()
            return bool(everything)

    def cancel(self) -> None:
        """stop(), unless everything that could be made was."""
        with self._changed:
            unfinished = len(self._made) + len(self._failed) < len(self._sizes)
        if unfinished:
            self.stop("loading was cancelled")

    def stop(self, why: str = "it was closed") -> None:
        """Make nothing more, wait until what is being made was given up, and close what was made. May be called again.

        Called from progress, it does not wait: that has to return first.
        """
        self.end(why)
        if threading.current_thread() in self._threads:
            return
        with self._changed:
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        self._close_made()

    def end(self, why: str = "it was closed") -> None:
        """stop() that does not wait, for finalizers: they may run in a thread that what is being made waits for."""
        with self._changed:
            self._stopped = self._stopped or why
            self._waiting.clear()
            self._changed.notify_all()

    def done(self) -> tuple[int, int]:
        """(bytes done, bytes in all)."""
        return sum(self._done.values()), sum(self._sizes.values())

    def made(self) -> list[Any]:
        """What is made by now, in order."""
        with self._changed:
            return [self._made[key] for key in self._sizes if key in self._made]

    def after_fork(self) -> None:
        """The threads are the parent's: nothing more will be made."""
        self._changed, self._reporting = threading.Condition(), threading.Lock()
        self._orphaned = self._orphaned or self._running > 0
        self._threads, self._running = [], 0

    def _complete(self) -> bool:
        return self._stopped is None and len(self._made) == len(self._sizes)

    def _ended(self) -> bool:
        return self._stopped is not None or self._orphaned

    def _closed(self, key: str = "") -> ClosedError:
        forked = "it was not loaded yet when this process was forked, and the parent alone goes on loading"
        return ClosedError(f"{self._what}{key}: {self._stopped or forked}")

    def _start(self, name: str) -> None:
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            with self._changed, thread_for(f"{self._what}s: starting thread {name}"):
                self._threads.append(thread)
                self._running += 1
                thread.start()  # with the lock held: stop() may come from another thread, and joins what has begun
        except BaseException:
            if thread in self._threads:
                self._threads.remove(thread)
                self._leave()
            raise

    def _work(self) -> None:
        try:
            numa.unpin()
            while (key := self._next()) is not None:
                made = error = None
                try:
                    made = self._make(key, self._progress_of(key))
                    self._advance(key, self._sizes[key])
                except BaseException as caught:
                    traceback.clear_frames(caught.__traceback__)  # else they keep the memory that was being filled
                    error = caught
                self._keep(key, made, error)
        finally:
            self._leave()

    def _next(self) -> Hashable | None:
        with self._changed:
            return self._waiting.pop() if self._waiting else None

    def _keep(self, key: Hashable, made: Closable | None, error: BaseException | None) -> None:
        with self._changed:
            if self._stopped is None and error is not None:
                self._failed[key] = error
            elif self._stopped is None and made is not None:
                self._made[key] = made
            self._changed.notify_all()
            kept = key in self._made
        if made is not None and not kept:
            made.close()

    def _progress_of(self, key: Hashable) -> Callable[[int, int], object]:
        return lambda done, total: self._advance(key, done)

    def _advance(self, key: Hashable, done: int) -> None:
        with self._reporting:
            if self._stopped is not None:
                raise _Stopped
            before = self._done[key]
            self._done[key] = max(before, min(done, self._sizes[key]))
            if self._report is None or self._done[key] == before:
                return
            try:
                self._report(*self.done())
            except BaseException as error:
                with self._changed:
                    self._cause = self._cause or error
                self.end("loading was cancelled")
                raise

    def _leave(self) -> None:
        """The last thread tidies up."""
        with self._changed:
            self._running -= 1
            last = not self._running
        if last:
            if self._stopped is not None:
                self._close_made()
            self._resources.close()

    def _close_made(self) -> None:
        with self._changed:
            made, self._made = self._made, {}
        for thing in made.values():
            thing.close()


class _Stopped(Exception):
    """Ends what is being made; nobody outside sees it."""


_alive: weakref.WeakValueDictionary[int, BackgroundTasks] = weakref.WeakValueDictionary()


@functools.cache
def _stop_at_exit() -> None:
    atexit.register(_stop_all)


def _stop_all() -> None:
    for reference in _alive.valuerefs():  # a list at once: daemon threads may still make others
        if loading := reference():
            loading.stop("the interpreter exits")
