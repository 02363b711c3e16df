"""Memory and threads that the system refuses, one request after the other: an error of ktmoe or MemoryError, and nothing else.

A process of its own (allocating.py) runs an operation, in which the Nth request of a kind is refused, or all from the Nth on.
Afterwards it holds what it held before: allocations, mapped bytes, descriptors, threads. The same layer gives the same bits.
"""

from __future__ import annotations

import pytest
from environments import NEEDS_COMPILER
from failing_calls import Child, build, sites

pytestmark = NEEDS_COMPILER
EXHAUSTIVE = pytest.mark.exhaustive
#: So many requests that none is refused.
NEVER = 10**9
LAYER = ("forward", "load", "load factors", "load on two nodes", "replace an expert", "replace an expert first", "export")
LAYER += ("submit", "train", "linear", "two stages", "captured")
FILES = ("checkpoint", "cached", "pack")
OF_NUMPY = ("quantize", "convert", "export adapter", "import adapter")
NATIVE = "memory of the native part"
#: By what is refused: the errno, kinds of calls, the modules whose calls they are, operations that make such calls.
REFUSED = {
    NATIVE: ("ENOMEM", ("allocate", "map", "map of file"), ("ktmoe",), (*LAYER, *FILES)),
    "threads": ("EAGAIN", ("thread",), (), (*LAYER, *FILES, "convert")),
    "numpy's arrays": ("ENOMEM", ("array",), (), tuple({*LAYER, *FILES, *OF_NUMPY} - {"submit"})),
    "memory to read into": ("ENOMEM", ("map",), ("mmap",), ("checkpoint", "pack", "convert")),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("failing"))


@pytest.fixture(scope="module")
def child(library, tmp_path_factory):
    with started(library, tmp_path_factory) as made:
        yield made


def started(library, tmp_path_factory, **variables):
    variables |= {"KTMOE_SPIN_US": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return Child("allocating.py", library, tmp_path_factory.mktemp("allocating"), **variables)


def refuse(repeat, child, what, operations, error, kinds, modules, ways=2) -> int:
    """Refuse each request of these operations, by itself and, by the second way, with all that follow; returns how many there
    were."""
    total = 0
    for operation in operations:
        asked = {"operation": operation, "modules": modules, "kinds": kinds, "error": error}
        count = child.ask(**asked, at=NEVER)["calls"]
        total += count
        for site in sites(repeat, f"{what}: {operation}", ways * count) if count else ():
            found = child.ask(**asked, at=site // ways, lasting=bool(site % ways))
            assert not found["faults"], (asked, site, found)
            if found["hit"] and modules == ("ktmoe",):
                assert found["error"] == "OutOfMemoryError", (asked, site, found)
                assert found["message"]
            if found["hit"] and kinds == ("thread",):
                assert found["error"] == "UnavailableError", (asked, site, found)
    return total


@pytest.mark.parametrize("what", [*(pytest.param(name, marks=EXHAUSTIVE) if name != NATIVE else name for name in REFUSED)])
def test_refused(repeat, child, what):
    error, kinds, modules, operations = REFUSED[what]
    assert refuse(repeat, child, what, operations, error, kinds, modules)


@EXHAUSTIVE
def test_hints_that_are_refused(repeat, child):
    """A system may refuse mbind() and madvise(): nobody notices."""
    for operation in (*LAYER, *FILES):
        asked = {"operation": operation, "modules": ("ktmoe",), "kinds": ("hint",)}
        count = child.ask(**asked, at=NEVER)["calls"]
        for site in sites(repeat, f"hints: {operation}", count) if count else ():
            found = child.ask(**asked, at=site, error="EINVAL")
            assert (found["faults"], found["error"]) == ([], ""), (asked, site, found)


@EXHAUSTIVE
def test_objects_of_python_that_are_refused(repeat, library, tmp_path_factory):
    """Whatever a call allocates, Python's own objects too.

    Only calls that need little else than Cython's code: CPython 3.11 and numpy 2.4 themselves do not survive it everywhere.
    CPython dies where dict.items() gets no memory for its iterator, as in export.
    """
    with started(library, tmp_path_factory, PYTHONMALLOC="malloc") as child:
        operations = ("forward", "captured")
        assert refuse(repeat, child, "Python's objects", operations, "ENOMEM", ("allocate",), ("python", "ktmoe"), ways=1)
