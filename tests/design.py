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

``--exhaustive`` runs everything, and ``--rest`` all cases that do not run by default: what `make test` has left. Tests that
repeat (tests/repeating.py) belong to both, since they run more of their cases then. ``--soak`` runs these alone.

``--smoke`` is for tests that need another project's engine or writer. It runs those with a marker:

- ``@pytest.mark.smoke``: enough cases that every value of each parameter occurs.
- ``@pytest.mark.smoke("one")``: one case, on a backend that this CPU runs. It may still be skipped for another reason.
- ``@pytest.mark.smoke("all")``: all.

The choice depends on nothing but the cases, so that two runs choose alike; of a test whose cases were picked by -k or by name,
it is made among these.
"""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Hashable, Mapping, Sequence

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


def case_of(item: pytest.Item, how: str) -> dict[str, Hashable]:
    """An item's case: its parameters' values by their identities, since they need not be hashable. Equal values that are
    different objects count as different: more cases run then, never fewer. how: one of STRENGTHS."""
    case = {name: id(value) for name, value in item.callspec.params.items()}
    subject = ways.SUBJECTS.get(item.callspec.params.get("backend"))
    if how == "backends":
        return {"backend": case["backend"]}
    if how == "any backend":
        del case["backend"]
    elif subject and how == "pairs":
        del case["backend"]
        case |= {"instruction set": subject.isa, "mode": subject.activations}
    return case


def way_of(item: pytest.Item) -> str:
    """How this CPU has the instruction set of an item's backend or table: "native", "emulated" or "skipped"."""
    subject = ways.SUBJECTS.get(item.callspec.params.get("backend"))
    row = subject.isa if subject else item.callspec.params.get("table")
    return ways.WAYS.get(row, "native").partition(":")[0]


@pytest.fixture
def is_emulated(request):
    """Whether the case's backend is. It takes a hundred times as long: what is not about its instructions may be shorter."""
    return way_of(request.node) == "emulated"


def chosen(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items of one test function that run by default."""
    items = [item for item in items if not item.get_closest_marker("exhaustive")]
    if not items or not hasattr(items[0], "callspec"):
        return items
    first = items[0]
    marker = first.get_closest_marker("cover")
    (how,) = marker.args if marker else ("pairs" if "backend" in first.callspec.params else "all",)
    if how == "all":
        return items
    kept = []
    for way in ("native", "emulated", "skipped"):
        some = [item for item in items if way_of(item) == way]
        by = "backends" if way == "emulated" and how != "any backend" and "backend" in first.callspec.params else how
        cases = [case_of(item, by) for item in some]
        kept += [some[number] for number in cover(cases, min(STRENGTHS[by], len(cases[0])))] if cases else []
    return kept


def smoke(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of one test function's items that --smoke runs."""
    marked = [item for item in items if item.get_closest_marker("smoke")]
    if not marked or not hasattr(marked[0], "callspec"):
        return marked
    how = marked[0].get_closest_marker("smoke").args
    if how == ("all",):
        return marked
    if how == ("one",):
        return [min(marked, key=lambda item: way_of(item) != "native")]
    return [marked[number] for number in cover([case_of(item, "values") for item in marked], 1)]


def left(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of one test function's items that do not run by default."""
    by_default = {id(item) for item in chosen(items) if not repeats(item)}
    return [item for item in items if id(item) not in by_default]


def repeats(item: pytest.Item) -> bool:
    """Whether an item runs more cases in longer runs."""
    return "repeat" in item.fixturenames


def soaked(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of one test function's items that --soak runs."""
    return [item for item in items if repeats(item)]


#: By the option that asks for it: which of a test function's items run.
CHOICES = {"exhaustive": list, "rest": left, "smoke": smoke, "soak": soaked}


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


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    choice = config.getoption("choice")
    tests = {}
    for item in items:
        tests.setdefault((item.path, getattr(item, "cls", None), getattr(item, "originalname", item.name)), []).append(item)
    kept = {id(item) for of_test in tests.values() for item in CHOICES.get(choice, chosen)(of_test)}
    if choice == "smoke" and not kept and not config.option.keyword:
        raise pytest.UsageError("none of these tests is marked as smoke")
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]
