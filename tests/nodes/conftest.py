"""Tests on real NUMA nodes: on a machine that has several, or in the guests of tools/numa_guest.py, of which one runs them."""

from __future__ import annotations

import os

import pytest

from ktmoe._native import core
from ktmoe.machine import numa
from tools.numa_guest import GUESTS

GUEST = os.environ.get("KTMOE_TEST_GUEST")


@pytest.fixture(autouse=True)
def several_nodes():
    """What ktmoe finds, {node: its CPUs}, ascending."""
    found = numa.nodes()
    assert GUEST is None or found.keys() == GUESTS[GUEST].usable.keys()  # or all would be skipped, and nobody would see why
    if len(found) < 2:
        pytest.skip("needs several NUMA nodes")
    yield found
    core.release()  # threads and scratch memory that are on them


@pytest.fixture
def guest(request):
    """The Guest that this is. A test that is about some of them alone names them: @pytest.mark.parametrize("guest", [...])."""
    wanted = getattr(request, "param", None)
    if GUEST is None or wanted not in (None, GUEST):
        pytest.skip(f"needs the guest {wanted or ''} of make test-numa".replace("  ", " "))
    return GUESTS[GUEST]


def choices(nodes: list[int]) -> dict[str, list[int] | None]:
    """numa_nodes, by name."""
    return {"default": None, "first": nodes[:1], "last": nodes[-1:], "turned": nodes[::-1]}


@pytest.fixture(params=["default", "first", "last", "turned"])
def chosen(request, several_nodes):
    """numa_nodes of a layer."""
    return choices(list(several_nodes))[request.param]
