"""What several threads call while others change it, and which results a call may have.

A Turn is something that has two states and is changed by one thread. A call that overlaps no change has one state to go by, and
one that overlaps a change has two, so a call has the product of its turns' states: its result must be what one of them gives.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Hashable
from contextlib import contextmanager

#: What a call gives that has no result this time.
CANCELLED = object()


class Turn:
    """Two states, 0 and 1, of which the first is there. put(state) makes the change."""

    def __init__(self, put: Callable[[int], object]):
        self.put, self.begun, self.done = put, 0, 0

    def change(self) -> None:
        self.begun += 1
        self.put(self.begun % 2)
        self.done = self.begun


class Call:
    """Something to call. It gives a value that can be compared, or CANCELLED.

    turns: what its result depends on. known: by their states, what it gives.
    """

    def __init__(self, name: str, call: Callable[[], Hashable], *turns: Turn):
        self.name, self.call, self.turns, self.known = name, call, turns, {}
        for states in itertools.product(range(2), repeat=len(turns)):
            for turn, state in zip(turns, states, strict=True):
                turn.put(state)
            while (value := call()) is CANCELLED:
                pass
            self.known[states] = value
        for turn in turns:
            turn.put(0)

    def check(self) -> str | None:
        """Call it; returns what is wrong, or None."""
        before = [turn.done for turn in self.turns]
        found = self.call()
        after = [turn.begun for turn in self.turns]
        allowed = [{n % 2 for n in range(first, last + 1)} for first, last in zip(before, after, strict=True)]
        if found is CANCELLED or found in {self.known[states] for states in itertools.product(*allowed)}:
            return None
        states = [states for states, known in self.known.items() if known == found]
        return f"{self.name}: expected a state of {allowed}, found {states or 'none that there ever was'}"


class Crowd:
    """Threads that call and threads that change things, and what went wrong in them."""

    def __init__(self):
        self.wrong, self.calls, self.changes, self.over = [], 0, 0, threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def noting(self):
        """What is raised within it is wrong."""
        try:
            yield
        except BaseException as error:
            self.wrong.append(repr(error))

    def run(self, callers: list[Callable[[], object]], changers: list[Callable[[], object]]) -> None:
        """Callers run to their end, changers again and again until then."""
        changing = [threading.Thread(target=self._again, args=(each,)) for each in changers]
        calling = [threading.Thread(target=self._once, args=(each,)) for each in callers]
        for thread in changing + calling:
            thread.start()
        for thread in calling:
            thread.join()
        self.over.set()
        for thread in changing:
            thread.join()

    def caller(self, calls: list[Call], count: int, seed: int) -> Callable[[], None]:
        """So many of these calls, in a random order of the seed's own."""

        def run():
            chosen = random.Random(seed)
            for _ in range(count):
                said = chosen.choice(calls).check()
                if said:
                    self.wrong.append(said)
            with self._lock:
                self.calls += count

        return run

    def _once(self, function) -> None:
        with self.noting():
            function()

    def _again(self, function) -> None:
        with self.noting():
            function()
            count = 1
            while not self.over.wait(0.0002):  # so that callers come in between, too
                function()
                count += 1
            with self._lock:
                self.changes += count
