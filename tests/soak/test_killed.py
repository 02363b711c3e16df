"""Killed at every call on a file: what is there then is refused, or what was there before, or whole; the next run completes it.

tests/dying.py kills a conversion at its steps in Python. Here the system's calls are counted, and more is written than that.
"""

from __future__ import annotations

import pytest
from environments import NEEDS_COMPILER
from failing_calls import KINDS, Child, build, sites

pytestmark = NEEDS_COMPILER
EXHAUSTIVE = pytest.mark.exhaustive
WRITTEN = ("pack", "pack one more layer", "convert", "convert the rest", "merge", "export an adapter", "replace an adapter")
#: All calls that change what a later process sees, and those between which it may die.
CHANGES = tuple(kind for kind in KINDS if kind in ("open", "write", "sync", "name", "truncate", "lock", "close"))


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    library = build(tmp_path_factory.mktemp("failing"))
    variables = {"KTMOE_SPIN_US": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with Child("on_files.py", library, tmp_path_factory.mktemp("files"), **variables) as made:
        yield made


@pytest.mark.parametrize("operation", ["results of bench", *(pytest.param(name, marks=EXHAUSTIVE) for name in WRITTEN)])
def test_killed(repeat, child, operation):
    asked = {"operation": operation, "kinds": CHANGES}
    count = child.ask(**asked, at=10**9)["calls"]
    assert count
    for site in sites(repeat, f"killed: {operation}", count):
        found = child.ask(**asked, at=site, how="kill")
        assert (found["error"], found["faults"]) == ("killed", []), (operation, site, found)
        if operation == "results of bench":
            assert found["state"] in ("old", "new")
