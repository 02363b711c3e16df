"""Which cases of a test run by default: chosen by design, so that a full product of parameters is left to `make verify`.

A case is one choice of a value for each of its test's parameters. A test on backends has two parameters in place of one:
its backend's instruction set, and its activation mode. Of such a test's cases, enough run that every pair of values that
occurs together in some case does so in one that runs. Cases that this CPU runs are chosen among themselves. Of those that are
emulated, which takes a hundred times as long, one runs for each backend; a test that has every kind of weights on all of them
says so. Those that this CPU skips are chosen apart, so that they are counted. Tests without a backend run all of their cases.
A marker says otherwise:

- ``@pytest.mark.cover("values")``: enough cases that every backend, and every value of each other parameter, occurs; of
  emulated ones, every backend.
- ``@pytest.mark.cover("any backend")``: enough that every value of each other parameter occurs, on one backend that this CPU
  runs and on one that is emulated. It is for tests of what all backends share, such as locks.
- ``@pytest.mark.cover("pairs")``: enough that every pair of values does, for a test without a backend.
- ``@pytest.mark.cover("all")``: all.
- ``@pytest.mark.exhaustive``: none.

``--exhaustive`` runs everything, and ``--rest`` all cases that do not run by default: what `make test` has left.

``--smoke`` is for tests that need another project's engine or writer. It runs those with a marker:

- ``@pytest.mark.smoke``: enough cases that every value of each parameter occurs.
- ``@pytest.mark.smoke("one")``: one case, which this CPU runs if it can.

The choice depends on nothing but the cases, so that two runs choose alike; of a test whose cases were picked by -k or by name,
it is made among these. Where nothing was picked, it is made before pytest makes an item of each case: of 50,000, 37,000 are
left out, and each process of pytest-xdist collects all.
"""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import ways

STRENGTHS = {"any backend": 1, "backends": 1, "values": 1, "pairs": 2}


def cover(cases: Sequence[Mapping[str, Hashable]], strength: int) -> list[int]:
    """The numbers, ascending, of cases that together have every combination of so many values that occurs in any case.

    Greedy: the case that adds most comes next. Of several it is any one, but always the same: the first would always be one
    backend's. All cases have the same parameters.
    """
    combinations = [set(itertools.combinations(sorted(case.items(), key=lambda item: item[0]), strength)) for case in cases]
    missing = set().union(*combinations)
    queue = [(-len(of_case), zlib.crc32(b"%d" % number), number) for number, of_case in enumerate(combinations)]
    heapq.heapify(queue)
    chosen = []
    while missing:
        _, place, number = heapq.heappop(queue)
        added = len(combinations[number] & missing)
        if queue and (-added, place, number) > queue[0]:  # what a case adds never grows: only the first must be up to date
            heapq.heappush(queue, (-added, place, number))
            continue
        chosen.append(number)
        missing -= combinations[number]
    return sorted(chosen)


@dataclass(frozen=True)
class Case:
    """One case of a test. what: pytest's own object, an item or the parameters that it will make one of. params: none of a test
    without parameters. marks: as they apply, the nearest last."""

    what: object
    params: Mapping[str, object]
    marks: Sequence[pytest.Mark]

    @classmethod
    def of_item(cls, item: pytest.Item) -> Case:
        """The case that an item is."""
        return cls(item, item.callspec.params if hasattr(item, "callspec") else {}, list(item.iter_markers())[::-1])

    def arguments(self, name: str) -> tuple | None:
        """Those of the nearest marker of this name; None without one."""
        return next((mark.args for mark in reversed(self.marks) if mark.name == name), None)

    @property
    def way(self) -> str:
        """How this CPU has the instruction set of a case's backend or table: "native", "emulated" or "skipped"."""
        subject = ways.SUBJECTS.get(self.params.get("backend"))
        row = subject.isa if subject else self.params.get("table")
        return ways.WAYS.get(row, "native").partition(":")[0]

    def values(self, how: str) -> dict[str, Hashable]:
        """Its parameters' values by their identities, since they need not be hashable. Equal values that are different objects
        count as different: more cases run then, never fewer. how: one of STRENGTHS."""
        values = {name: id(value) for name, value in self.params.items()}
        subject = ways.SUBJECTS.get(self.params.get("backend"))
        if how == "backends":
            return {"backend": values["backend"]}
        if how == "any backend":
            del values["backend"]
        elif subject and how == "pairs":
            del values["backend"]
            values |= {"instruction set": subject.isa, "mode": subject.activations}
        return values


@pytest.fixture
def is_emulated(request):
    """Whether the case's backend is. It takes a hundred times as long: what is not about its instructions may be shorter."""
    return Case.of_item(request.node).way == "emulated"


def chosen(cases: Sequence[Case]) -> list[Case]:
    """The cases of one test function that run by default."""
    cases = [case for case in cases if case.arguments("exhaustive") is None]
    if not cases or not cases[0].params:
        return cases
    first = cases[0]
    (how,) = first.arguments("cover") or ("pairs" if "backend" in first.params else "all",)
    if how == "all":
        return cases
    kept = []
    for way in ("native", "emulated", "skipped"):
        some = [case for case in cases if case.way == way]
        by = "backends" if way == "emulated" and how != "any backend" and "backend" in first.params else how
        values = [case.values(by) for case in some]
        kept += [some[number] for number in cover(values, min(STRENGTHS[by], len(values[0])))] if values else []
    return kept


def smoke(cases: Sequence[Case]) -> list[Case]:
    """Those of one test function's cases that --smoke runs."""
    marked = [case for case in cases if case.arguments("smoke") is not None]
    if not marked or not marked[0].params:
        return marked
    if marked[0].arguments("smoke") == ("one",):
        return [min(marked, key=lambda case: case.way != "native")]
    return [marked[number] for number in cover([case.values("values") for case in marked], 1)]


def left(cases: Sequence[Case]) -> list[Case]:
    """Those of one test function's cases that do not run by default."""
    by_default = {id(case) for case in chosen(cases)}
    return [case for case in cases if id(case) not in by_default]


#: By the option that asks for it: which of a test function's cases run.
CHOICES = {None: chosen, "exhaustive": list, "rest": left, "smoke": smoke}
#: The test functions whose cases were chosen before these were items.
DECIDED = pytest.StashKey[set]()


def pytest_addoption(parser):
    for option, what in (
        ("exhaustive", "all cases of all tests, as make verify does"),
        ("rest", "all cases that do not run by default"),
        ("smoke", "of the tests marked as smoke, a few cases each"),
    ):
        parser.addoption(f"--{option}", action="store_const", dest="choice", const=option, help=f"run {what}")


def pytest_configure(config):
    config.addinivalue_line("markers", "cover(how): how a test's cases are chosen by default; see tests/design.py")
    config.addinivalue_line("markers", "exhaustive: not run by default; see tests/design.py")
    config.addinivalue_line("markers", "smoke(how): run by --smoke, too; see tests/design.py")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """The choice, before items are made. Of a test that has none to run it is made among items, as where some were picked."""
    yield
    config, definition = metafunc.config, metafunc.definition
    picked = config.option.keyword or config.option.markexpr or any("::" in argument for argument in config.args)
    if picked or not metafunc._calls:
        return
    marks = list(definition.iter_markers())[::-1]
    cases = [Case(call, call.params, [*marks, *call.marks]) for call in metafunc._calls]
    kept = {id(case.what) for case in CHOICES[config.getoption("choice")](cases)}
    if kept:
        metafunc._calls[:] = [call for call in metafunc._calls if id(call) in kept]
        config.stash.setdefault(DECIDED, set()).add((definition.path, metafunc.cls, definition.name))


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    choice, decided = config.getoption("choice"), config.stash.get(DECIDED, set())
    tests = {}
    for item in items:
        tests.setdefault((item.path, getattr(item, "cls", None), getattr(item, "originalname", item.name)), []).append(item)
    kept = set()
    for test, of_test in tests.items():
        if test in decided:
            kept |= {id(item) for item in of_test}
        else:
            kept |= {id(case.what) for case in CHOICES[choice]([Case.of_item(item) for item in of_test])}
    if choice == "smoke" and not kept:
        raise pytest.UsageError("none of these tests is marked as smoke")
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]
