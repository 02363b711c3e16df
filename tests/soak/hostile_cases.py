"""What hostile_child.py runs: the cases of headers and of whole files, by number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from random import Random

import hostile_mutations
from hostile_files import samples
from hostile_parsers import PARSERS
from hostile_seeds import seeds

#: How many of so many headers are of each kind.
HEADERS = {"safetensors": 7, "gguf": 5, "index": 3, "adapter": 2, "cache": 1, "journal": 1, "config": 1}


class Cases(ABC):
    """Cases by their numbers. warm_up: how many to run before anything is measured."""

    warm_up: int

    @abstractmethod
    def kind(self, number: int) -> str:
        """What a case is counted as."""

    def label(self, number: int) -> str:
        """What a case is called in messages."""
        return self.kind(number)

    @abstractmethod
    def prepare(self, number: int) -> None:
        """Make the case's bytes, which run() reads."""

    @abstractmethod
    def run(self, number: int) -> None:
        """Read them, as a user would. Raises KtmoeError."""

    @abstractmethod
    def restore(self, number: int) -> None:
        """Put back what prepare() changed."""

    @abstractmethod
    def is_good(self, number: int) -> bool:
        """Whether nothing is wrong with the bytes that were prepared, so that they must be read."""

    @abstractmethod
    def names(self, number: int) -> tuple[str, ...]:
        """Of these, a refusal must have one."""


class Headers(Cases):
    """Headers of each kind, by hostile_parsers.py."""

    def __init__(self, folder: Path):
        self._order = [name for name, share in HEADERS.items() for _ in range(share)]
        Random(0).shuffle(self._order)
        self._parsers, self._good, self._seeds = {}, {}, {}
        for name in HEADERS:
            for part in ("seeds", "parser"):
                (folder / name / part).mkdir(parents=True)
            good, found = seeds(name, folder / name / "seeds")
            often = good * (1 + 2 * len(found) // len(good))  # hostile ones of hostile ones are hardly ever read
            self._good[name], self._seeds[name] = frozenset(good), often + found
            self._parsers[name] = PARSERS[name](folder / name / "parser")
        self._names = ("/proc/self/fd/", "model.layers.0.", str(folder), "model: ", "modules: ")  # the last two: arguments
        self._data = b""
        self.warm_up = 20 * len(self._order)

    def kind(self, number: int) -> str:
        return self._order[number % len(self._order)]

    def prepare(self, number: int) -> None:
        name = self.kind(number)
        self._data = hostile_mutations.of_header(name, Random(number), self._seeds[name])

    def run(self, number: int) -> None:
        self._parsers[self.kind(number)](self._data)

    def restore(self, number: int) -> None:
        self._data = b""

    def is_good(self, number: int) -> bool:
        return self._data in self._good[self.kind(number)]

    def names(self, number: int) -> tuple[str, ...]:
        return self._names


class Files(Cases):
    """Whole checkpoints, caches, adapters and unfinished conversions, by hostile_files.py."""

    def __init__(self, folder: Path):
        self._samples = samples(folder)
        self.warm_up = len(self._samples)

    def _sample(self, number: int):
        return self._samples[number % len(self._samples)]

    def kind(self, number: int) -> str:
        return self._sample(number).kind

    def label(self, number: int) -> str:
        return self._sample(number).label

    def prepare(self, number: int) -> None:
        self._sample(number).change(Random(number))

    def run(self, number: int) -> None:
        self._sample(number).use()

    def restore(self, number: int) -> None:
        self._sample(number).restore()

    def is_good(self, number: int) -> bool:
        return not self._sample(number).changed

    def names(self, number: int) -> tuple[str, ...]:
        return self._sample(number).names


CASES: dict[str, type[Cases]] = {"headers": Headers, "files": Files}
