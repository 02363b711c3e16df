"""What ktmoe makes of the guests' nodes as Linux's own files have them: defaults, refusals, what show_config() says."""

import os
import subprocess
import sys

import pytest

from ktmoe import config
from ktmoe.errors import InputError
from ktmoe.machine import memory, numa
from ktmoe.machine.numa import Placement, memory_nodes, nodes, place
from ktmoe.machine.number_lists import listed


def test_the_nodes(guest):
    assert nodes() == guest.usable
    usable = {node: frozenset(cpus) for node, cpus in guest.usable.items()}
    assert place() == Placement(tuple(usable), tuple(usable.values()))
    present = {node for node, (_, mib) in guest.nodes.items() if mib}
    assert memory_nodes() == (present, present)
    for node, (cpus, _) in guest.nodes.items():
        assert listed(numa.NODES / f"node{node}/cpulist") == set(cpus)
        distances = [guest.distance(node, other) for other in guest.nodes]
        assert (numa.NODES / f"node{node}/distance").read_text().split() == list(map(str, distances))


def test_each_node_says_what_it_has_free(guest):
    """No more than the guest gave it, and most of that where there is much: what is free on all is the sum."""
    free = {node: memory.free_on([node]) for node in guest.nodes}
    for node, (_, mib) in guest.nodes.items():
        assert free[node] <= mib << 20
        assert mib < 1000 or free[node] > mib << 19
        if not mib:
            assert free[node] == 0
    assert abs(memory.free_on(guest.nodes) - sum(free.values())) < 64 << 20  # it changes all the time


@pytest.mark.parametrize(
    ("guest", "explained"),
    [
        ("two", "2: 0 (2 CPUs), 1 (2 CPUs)"),
        ("four", "4: 0 (1 CPU), 1 (1 CPU), 2 (1 CPU), 3 (1 CPU)"),
        ("unequal", "2: 0 (3 CPUs), 1 (1 CPU)"),
        ("apart", "2: 0 (1 CPU), 2 (3 CPUs)"),
    ],
    indirect=["guest"],
)
def test_show_config(guest, explained):
    assert config.config()["numa_nodes"] == list(guest.usable)
    done = subprocess.run([sys.executable, "-m", "ktmoe", "config"], capture_output=True, text=True, check=True)
    assert f"NUMA nodes: {explained}\n" in done.stdout


@pytest.mark.parametrize(
    ("guest", "node", "why"),
    [
        ("apart", 1, "it has no memory; usable nodes: 0 (CPUs 0), 2 (CPUs 1-3)"),
        ("apart", 3, "it has no CPUs; usable nodes: 0 (CPUs 0), 2 (CPUs 1-3)"),
        ("apart", 4, "there is none of that number; usable nodes: 0 (CPUs 0), 2 (CPUs 1-3)"),
        ("two", 2, "there is none of that number; usable nodes: 0 (CPUs 0-1), 1 (CPUs 2-3)"),
    ],
    indirect=["guest"],
)
def test_a_node_that_cannot_be_used(guest, node, why):
    with pytest.raises(InputError) as raised:
        place([0, node])
    assert str(raised.value) == f"numa_nodes: node {node} cannot be used: {why}"


@pytest.mark.parametrize("guest", ["two", "unequal", "apart"], indirect=True)
def test_an_affinity_mask(guest):
    """Of the last CPU alone, which leaves one node; then of one CPU of each node."""
    own = os.sched_getaffinity(0)
    last = list(guest.usable)[-1]
    try:
        os.sched_setaffinity(0, {3})
        assert nodes() == {last: {3}}
        assert place() == numa.UNBOUND
        with pytest.raises(InputError, match=r"node 0 cannot be used: this process may run on CPUs 3 only, the node's are 0"):
            place([0])
        os.sched_setaffinity(0, {0, 3})
        assert nodes() == {0: {0}, last: {3}}
        assert place().nodes == (0, last)
    finally:
        os.sched_setaffinity(0, own)
