"""mutants.py [--only PATTERN] [--count N] [--seed S] [--save] [--resume]: plants mistakes in ktmoe, one in a copy of the tree,
each beside the tests of its own file only, and says which of them no test finds.

A mistake is a change of one operator, constant, condition, argument, statement or returned value (tools/mutations.py). It is
drawn by the seed from all files that tests/tests_of_files.toml names tests for. It is planted in a copy of the tree.
One that lives shows that a test is missing, or it changes nothing that a test should tell. Then tests/mutants.toml says why.
"""

from __future__ import annotations

import argparse
import fnmatch
import random
import shlex
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import mutations
import mutations_c
import tomli_w
from mutant_copy import ROOT, Copy, NotCompiled, files

MAP, RESULTS = "tests/tests_of_files.toml", "tests/mutants.toml"
#: The part of mistakes that are planted in Python; the others in C.
PYTHON = 0.55
#: How a mutant ends, in the words of the results.
FOUND, ALIVE, EXPLAINED = ("found", "crashed", "timeout"), "alive", "explained"


@dataclass
class Tests:
    """Which tests are a file's own. tests: pattern of files -> pytest's arguments. left_out: pattern -> why there are none."""

    tests: dict[str, str]
    left_out: dict[str, str]

    @classmethod
    def read(cls, file: Path) -> Tests:
        return cls(**tomllib.loads(file.read_text()))

    def of(self, name: str) -> list[str] | None:
        """The arguments for a file: those of the first pattern that it matches; None if it is left out."""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.left_out):
            return None
        for pattern, arguments in self.tests.items():
            if fnmatch.fnmatchcase(name, pattern):
                return [f"tests/{word}" if word.endswith(".py") else word for word in shlex.split(arguments)]
        return None


@dataclass
class Mutant:
    """A mistake that was planted. before, after: the lines that it touches, what it is known by. by: the test that found it."""

    file: str
    kind: str
    before: str
    after: str
    outcome: str
    by: str = ""
    reason: str = ""

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.file, self.before, self.after


@dataclass
class Run:
    """What a run is told, and what it has done so far."""

    root: Path
    tests: Tests
    seed: int
    reasons: dict[tuple, str]
    copies: list[Copy] = field(default_factory=list)
    mutants: list[Mutant] = field(default_factory=list)
    refused: int = 0
    saved: Path | None = None
    known: dict[tuple, Mutant] = field(default_factory=dict)
    stopped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def candidates(self, root: Path, name: str) -> list[mutations.Mutation]:
        """A file's mistakes, in the order in which they are drawn."""
        text = (root / name).read_text()
        found = (mutations.of_python if name.endswith(".py") else mutations_c.of_c)(name, text)
        return mutations.shuffled(found, f"{self.seed} {name}")

    def drawn(self, only: str, count: int) -> dict[str, int]:
        """How many mistakes are planted in which files: one in each, by chance, then one more, and so on."""
        names = [name for name in files(self.root) if self.tests.of(name) and fnmatch.fnmatchcase(name, only)]
        kinds = {python: [name for name in names if name.endswith(".py") == python] for python in (True, False)}
        if all(kinds.values()):
            counts = {True: round(count * PYTHON)}
            counts[False] = count - counts[True]
        else:
            counts = dict.fromkeys(kinds, count)
        chosen = {}
        for python, of_kind in kinds.items():
            left = {name: len(self.candidates(self.root, name)) for name in of_kind}
            order = sorted((name for name in left if left[name]), key=self.place)
            for place in range(min(counts[python], sum(left.values())) if order else 0):
                name = order[place % len(order)]
                chosen[name] = chosen.get(name, 0) + 1
        return {name: chosen[name] for name in sorted(chosen, key=self.place)}

    def place(self, name: str) -> float:
        """A file's place in the order in which files are drawn. Files that come or go later change no other's."""
        return random.Random(f"{self.seed} {name}").random()

    def plant(self, name: str, wanted: int) -> None:
        """Plant so many of a file's mistakes."""
        with self.lock:
            copy = self.copies.pop()
        try:
            text = (copy.folder / name).read_text()
            for mutation in self.candidates(copy.folder, name):
                if not wanted or self.stopped:
                    break
                begun = time.monotonic()
                known = self.known.get((name, *mutation.lines(text)))
                mutant = known if known and known.outcome != ALIVE else self.judged(copy, mutation, text)
                if mutant and not self.stopped:
                    wanted -= 1
                    self.say(mutant, time.monotonic() - begun)
        finally:
            with self.lock:
                self.copies.append(copy)

    def judged(self, copy: Copy, mutation: mutations.Mutation, text: str) -> Mutant | None:
        """What became of a mistake; None if it could not be planted."""
        planted = mutation.of(text)
        if mutation.file.endswith(".py") and not mutations.compiles(planted):
            with self.lock:
                self.refused += 1
            return None
        try:
            complete = copy.plant(mutation.file, planted)
            how, failed, _ = copy.test(self.tests.of(mutation.file), "-x")
            if how == "passed" and not complete:
                copy.restore()
                copy.plant(mutation.file, planted, everywhere=True)
                how, failed, _ = copy.test(self.tests.of(mutation.file), "-x")
        except NotCompiled:
            with self.lock:
                self.refused += 1
            return None
        finally:
            copy.restore()
        mutant = Mutant(mutation.file, mutation.kind, *mutation.lines(text), {"passed": ALIVE, "failed": "found"}.get(how, how))
        mutant.by = failed[0] if failed else ""
        if how == "passed" and mutant.identity in self.reasons:
            mutant.outcome, mutant.reason = EXPLAINED, self.reasons[mutant.identity]
        return mutant

    def say(self, mutant: Mutant, seconds: float) -> None:
        with self.lock:
            self.mutants.append(mutant)
            if self.saved:
                self.saved.write_text(tomli_w.dumps(results(self)))
            print(f"{len(self.mutants)}: {mutant.outcome} in {seconds:.0f} s: {mutant.file}, {mutant.by}", flush=True)
            if mutant.outcome in (ALIVE, EXPLAINED):
                print(f"  - {mutant.before}\n  + {mutant.after}\n  {mutant.reason}".rstrip(), flush=True)

    def false_alarms(self) -> list[str]:
        """Tests that found a mistake, but fail without it, too; files whose tests take too long without one."""
        tests = sorted({mutant.by for mutant in self.mutants if "::" in mutant.by})
        wrong = self.copies[0].test(tests)[1] if tests else []
        slow = {tuple(self.tests.of(mutant.file)) for mutant in self.mutants if mutant.outcome in ("timeout", "crashed")}
        return wrong + [" ".join(tests) for tests in sorted(slow) if self.copies[0].test(list(tests))[0] != "passed"]


def read_results(root: Path, tests: Tests) -> dict[tuple, Mutant]:
    """The mutants that are saved, by their identities: those whose line is still there, in a file that still has tests."""
    rows = tomllib.loads((root / RESULTS).read_text())["mutants"] if (root / RESULTS).exists() else []
    texts = {name: " ".join((root / name).read_text().split()) for name in {row["file"] for row in rows} & set(files(root))}
    there = [row for row in rows if tests.of(row["file"]) and row["before"] in texts.get(row["file"], "")]
    return {mutant.identity: mutant for mutant in (Mutant(**row) for row in there)}


def results(run: Run) -> dict:
    """What is saved: the run, how many ended how, and each mutant."""
    mutants = (run.known | {mutant.identity: mutant for mutant in run.mutants}).values()
    mutants = sorted(mutants, key=lambda mutant: mutant.identity)
    outcomes = Counter(mutant.outcome for mutant in mutants)
    rows = [{name: value for name, value in vars(mutant).items() if value} for mutant in mutants]
    counts = {outcome: outcomes[outcome] for outcome in (*FOUND, EXPLAINED, ALIVE)}
    return {"seed": run.seed, "drawn": len(mutants), "drawn_again": run.refused, **counts, "mutants": rows}


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description="Mistakes, each beside the tests of its own file.")
    parser.add_argument("--only", default="*", help="files, by their path or a pattern such as 'ktmoe/loaders/*'")
    parser.add_argument("--count", type=int, default=200, help="how many mistakes (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default 1)")
    parser.add_argument("--processes", type=int, default=2, help="how many at a time (default 2)")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS}")
    parser.add_argument("--resume", action="store_true", help=f"keep {RESULTS}; try again what was alive")
    options = parser.parse_args(arguments)
    tests = Tests.read(root / MAP)
    known = read_results(root, tests)
    reasons = {identity: mutant.reason for identity, mutant in known.items() if mutant.reason}
    run = Run(root, tests, options.seed, reasons)
    if options.resume:
        run.known = known
    run.saved = root / RESULTS if options.save else None
    drawn = run.drawn(options.only, options.count)
    if not drawn:
        parser.error(f"{MAP} names no tests for a file {options.only}")
    with tempfile.TemporaryDirectory(prefix="ktmoe-mutants-") as folder:
        native = any(not name.endswith(".py") for name in drawn) or "ktmoe/_native/isa.py" in files(root)
        run.copies = [Copy(root, Path(folder, str(number)), native) for number in range(options.processes)]
        copies = list(run.copies)
        pool = ThreadPoolExecutor(options.processes)
        try:
            for done in [pool.submit(run.plant, name, wanted) for name, wanted in drawn.items()]:
                done.result()
            wrong = run.false_alarms()
        finally:  # also where it was interrupted
            run.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.end()
            pool.shutdown()
    saved = results(run)
    print(", ".join(f"{saved[name]} {name.replace('_', ' ')}" for name in ("drawn", *FOUND, EXPLAINED, ALIVE, "drawn_again")))
    if wrong:
        print("these tests fail without a mistake, too:", *wrong, sep="\n  ")
    return 1 if wrong or saved[ALIVE] else 0


def interrupt(*_) -> None:
    """Raise KeyboardInterrupt, once: make passes on what all of a group get, and a second one would end the cleaning."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    sys.exit(main(sys.argv[1:]))
