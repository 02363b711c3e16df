"""Disks that fail, one call on a file after the other: an error of ktmoe that names a file, and nothing half-written loads.

A process of its own (on_files.py) runs an operation, in which the Nth call of a kind fails, or all from the Nth on. What was
there before is still there, or what is new is whole, or what is there is refused. No descriptor and no unfinished file is left.
The next run ends with the same files as if nothing had happened.
"""

from __future__ import annotations

import pytest
from environments import NEEDS_COMPILER
from failing_calls import Child, build, sites

pytestmark = NEEDS_COMPILER
EXHAUSTIVE = pytest.mark.exhaustive
#: So many calls that none fails.
NEVER = 10**9
READ = ("load", "load gguf", "load a packed cache", "import an adapter")
WRITTEN = ("pack", "pack one more layer", "convert", "convert the rest", "merge", "export an adapter", "replace an adapter")
WRITTEN += ("results of bench",)
ALL = (*READ, *WRITTEN)
#: By what fails: how, the errno, kinds of calls, whether those behind the Nth fail, too, and operations.
FAILING = {
    "a disk that cannot be read": ("fail", "EIO", ("read", "status", "list"), (False,), ALL),
    "a full disk": ("fail", "ENOSPC", ("write", "sync", "name", "truncate"), (False, True), WRITTEN),
    "a disk that cannot be written": ("fail", "EIO", ("write", "sync", "truncate", "close"), (False, True), WRITTEN),
    "too many open files": ("fail", "EMFILE", ("open",), (False, True), ALL),
    "a disk without locks": ("fail", "ENOLCK", ("lock",), (False, True), WRITTEN),
}
#: What nobody is to notice, likewise.
UNNOTICED = {
    "short reads and writes": ("fewer", "EIO", ("read", "write"), (False, True), ALL),
    "signals": ("fail", "EINTR", ("open", "read", "write", "sync", "truncate", "lock"), (False,), ALL),
}


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    library = build(tmp_path_factory.mktemp("failing"))
    variables = {"KTMOE_SPIN_US": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with Child("on_files.py", library, tmp_path_factory.mktemp("files"), **variables) as made:
        yield made


def fail(repeat, child, what, how, error, kinds, lasting, operations):
    """Yields (what was asked for, the answer) of each call."""
    for operation in operations:
        asked = {"operation": operation, "kinds": kinds}
        count = child.ask(**asked, at=NEVER)["calls"]
        for site in sites(repeat, f"{what}: {operation}", len(lasting) * count) if count else ():
            at, way = divmod(site, len(lasting))
            asked_now = asked | {"at": at, "how": how, "error": error, "lasting": lasting[way]}
            found = child.ask(**asked_now)
            assert not found["faults"], (asked_now, found)
            yield asked_now, found


@pytest.mark.parametrize("what", [name if name == "a full disk" else pytest.param(name, marks=EXHAUSTIVE) for name in FAILING])
def test_failing(repeat, child, what):
    for asked, found in fail(repeat, child, what, *FAILING[what]):
        assert found["error"] or found["state"] == "new", (asked, found)
        if asked["operation"] in READ:
            assert found["state"] == "new", (asked, found)


@EXHAUSTIVE
@pytest.mark.parametrize("what", UNNOTICED)
def test_unnoticed(repeat, child, what):
    for asked, found in fail(repeat, child, what, *UNNOTICED[what]):
        assert (found["error"], found["state"]) == ("", "new"), (asked, found)


def test_a_failing_disk_leaves_the_old_adapter(repeat, child):
    """A new one takes its place when all of it is on the disk, and not before."""
    asked = {"operation": "replace an adapter", "kinds": ("write", "truncate"), "error": "ENOSPC"}
    for site in sites(repeat, "an old adapter", child.ask(**asked, at=NEVER)["calls"], 2):
        found = child.ask(**asked, at=site)
        assert (found["error"], found["state"], found["faults"]) == ("OutputError", "old", [])
