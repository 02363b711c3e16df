"""design.py: what runs by default has each pair of values, is few, and is the same each time; --exhaustive runs everything."""

import functools
import io
import itertools
import os
from contextlib import redirect_stdout

import design
import pytest
import ways
from hypothesis import given
from hypothesis import strategies as st

FACTORS = {"a": 7, "b": 3, "c": 8, "d": 2}
PRODUCT = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*map(range, FACTORS.values()))]


def combinations(cases, strength):
    return {pair for case in cases for pair in itertools.combinations(sorted(case.items()), strength)}


def test_pairs_of_a_product():
    chosen = design.cover(PRODUCT, 2)
    assert combinations([PRODUCT[number] for number in chosen], 2) == combinations(PRODUCT, 2)
    assert 7 * 8 <= len(chosen) <= 1.3 * 7 * 8  # of 336, and the two longest have 56 pairs
    assert len(design.cover(PRODUCT, 1)) == 8
    assert design.cover(PRODUCT, 4) == list(range(len(PRODUCT)))


@given(st.lists(st.fixed_dictionaries(dict.fromkeys("abcd", st.integers(0, 3))), min_size=1), st.integers(1, 3))
def test_any_cases(cases, strength):
    """Not all need be there: a combination that occurs in no case is not missed."""
    numbers = design.cover(cases, strength)
    assert numbers == sorted(set(numbers))
    assert combinations([cases[number] for number in numbers], strength) == combinations(cases, strength)
    assert numbers == design.cover([dict(reversed(case.items())) for case in cases], strength)  # it is the same each time


def test_nothing_and_one():
    assert design.cover([], 2) == []
    assert design.cover([{"a": 1}], 1) == [0]


TESTS = """
import pytest
each = pytest.mark.parametrize

@pytest.fixture(params=ways.SUBJECTS)
def backend(request): pass

@each("weights", [[], {}, [1], [2], [3], [4], [5], [6]], ids=str)
@each("tokens", range(10))
def test_pairs(backend, weights, tokens): pass

@pytest.mark.cover("values")
@each("byte", range(20))
def test_values(backend, byte): pass

@pytest.mark.cover("any backend")
def test_one(backend): pass

@pytest.mark.cover("any backend")
@each("byte", range(20))
@each("other", range(3))
def test_each(backend, byte, other): pass

@pytest.mark.cover("all")
@each("byte", range(20))
def test_all(backend, byte): pass

@each("one", range(6))
@each("other", range(6))
def test_errors(one, other): pass

@pytest.mark.cover("pairs")
@each("one", range(6))
@each("other", range(6))
@each("third", range(6))
def test_without_a_backend(one, other, third): pass

@each("case", ["quick", pytest.param("slow", marks=pytest.mark.exhaustive)])
def test_some(case): pass

@pytest.mark.exhaustive
def test_long(): pass

def test_plain(): pass

@pytest.mark.smoke
@each("one", range(4))
@each("other", range(2))
def test_few(one, other): pass

@pytest.mark.smoke("one")
@each("one", range(4))
def test_first(backend, one): pass

@pytest.mark.smoke("all")
@each("one", range(2))
@each("other", range(2))
def test_whole(one, other): pass

@pytest.mark.smoke
def test_of_an_engine(): pass
"""


class Collected:
    """A plugin that keeps the names of what pytest would run."""

    def pytest_collection_finish(self, session):
        self.names = [item.name for item in session.items]


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """The names of the cases that pytest would run with these arguments."""
    folder = tmp_path_factory.mktemp("design")
    (folder / "test_some.py").write_text("import ways" + TESTS)
    alone = ["-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "--rootdir", str(folder), "-p", "design"]

    @functools.cache
    def collect(*arguments, place="test_some.py"):
        found = Collected()
        with redirect_stdout(io.StringIO()) as output:
            command = ["-q", "--collect-only", *alone, "--strict-markers", *arguments, str(folder / place)]
            status = pytest.main(command, plugins=[found])
        assert status == pytest.ExitCode.OK, output.getvalue()
        return found.names

    return collect


def names(collected, test):
    return [name for name in collected if name.partition("[")[0] == test]


def test_what_pytest_runs(collected):
    chosen = collected()
    assert chosen == collected("--tb=no")  # chosen a second time
    subjects = ways.SUBJECTS.values()
    isas = {subject.isa for subject in subjects if not ways.WAYS[subject.isa].startswith("emulated")}
    emulated = [subject.id for subject in subjects if subject.isa not in isas]
    pairs = names(chosen, "test_pairs")
    assert len(pairs) < len(subjects) * 80 / 4
    for isa, tokens in itertools.product(isas, range(10)):
        ids = [subject.id for subject in subjects if subject.isa == isa]
        assert any(name.startswith(f"test_pairs[{i}-") and f"-{tokens}-" in name for i in ids for name in pairs)
    assert sum(name.startswith(tuple(f"test_pairs[{i}-" for i in emulated)) for name in pairs) == len(emulated)  # one of each
    assert {name.split("[")[1].rpartition("-")[2] for name in names(chosen, "test_values")} == {f"{b}]" for b in range(20)}
    assert all(any(f"[{i}-" in name for name in names(chosen, "test_values")) for i in ways.SUBJECTS)
    natives = len(subjects) - len(emulated)
    assert len(names(chosen, "test_values")) == max(20, natives) * bool(natives) + len(emulated)
    ways_there = bool(natives) + bool(emulated)
    assert len(names(chosen, "test_one")) == ways_there
    assert len(names(chosen, "test_each")) == 20 * ways_there
    for part in [*(f"-{other}-" for other in range(3)), *(f"-{byte}]" for byte in range(20))]:
        assert any(part in name for name in names(chosen, "test_each"))
    assert len(names(chosen, "test_all")) == 20 * len(subjects)
    assert len(names(chosen, "test_errors")) == 36
    assert 36 <= len(names(chosen, "test_without_a_backend")) < 54
    assert names(chosen, "test_some") == ["test_some[quick]"]
    assert names(chosen, "test_long") == []
    assert names(chosen, "test_plain") == ["test_plain"]


def test_everything(collected):
    everything = collected("--exhaustive")
    counts = {"pairs": 80 * len(ways.SUBJECTS), "values": 20 * len(ways.SUBJECTS), "errors": 36, "some": 2, "long": 1}
    for test, count in counts.items():
        assert len(names(everything, f"test_{test}")) == count
    assert set(collected()) < set(everything)
    rest = collected("--rest")
    assert sorted(collected() + rest) == sorted(everything)  # each once
    assert "test_long" in rest


def test_smoke(collected):
    few, (first,), last = (
        names(collected("--exhaustive", "--smoke"), f"test_{test}") for test in ("few", "first", "of_an_engine")
    )
    assert len(few) == 4
    assert all(any(part in name for name in few) for part in ("[0-", "[1-", "-0]", "-1]", "-2]", "-3]"))
    assert ways.WAYS[ways.SUBJECTS[first.partition("[")[2].rpartition("-")[0]].isa] == "native"
    assert last == ["test_of_an_engine"]
    assert len(names(collected("--smoke"), "test_whole")) == 4
    assert len(collected("--smoke")) == 10
    with pytest.raises(AssertionError, match="USAGE_ERROR"):  # so that a folder without any is noticed
        collected("--smoke", place="test_some.py::test_plain")
    with pytest.raises(AssertionError, match="NO_TESTS_COLLECTED"):
        collected("--smoke", "-k", "plain")


def test_a_case_that_is_asked_for_runs(collected):
    (name,) = collected(place="test_some.py::test_errors[5-5]")
    assert name == "test_errors[5-5]"
    asked = max(names(collected("--exhaustive"), "test_pairs"))
    assert collected(place=f"test_some.py::{asked}") == [asked]
