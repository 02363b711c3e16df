"""NUMA nodes as the system names them, and what a placement may be: by folders in the place of the system's own."""

import os
import re

import numpy as np
import pytest

from ktmoe import config, show_config
from ktmoe.errors import InputError
from ktmoe.machine import numa
from ktmoe.machine.numa import UNBOUND, Placement, nodes, place, split

TWO = {0: set(range(4)), 1: set(range(4, 8))}
EIGHT = set(range(8))


# The nodes there are


def test_this_machine():
    """Whatever it is, its nodes' CPUs are ours, and none is in two nodes."""
    found = nodes()
    assert list(found) == sorted(found)
    assert set().union(*found.values()) <= os.sched_getaffinity(0)
    assert sum(map(len, found.values())) == len(set().union(*found.values()))
    assert place() == (UNBOUND if len(found) < 2 else Placement(tuple(found), tuple(found.values())))


def test_several_nodes(fake_nodes):
    fake_nodes({0: {0}, 1: {1}, 2: {2, 5}, 10: {3}}, usable=EIGHT)
    assert nodes() == {0: {0}, 1: {1}, 2: {2, 5}, 10: {3}}
    assert list(nodes()) == [0, 1, 2, 10]


def test_ranges_of_cpus(fake_nodes):
    folder = fake_nodes(TWO, usable=set(range(64)))
    (folder / "node0/cpulist").write_text("0-2,8,10-11\n")
    (folder / "node1/cpulist").write_text("12-63\n")
    assert nodes() == {0: {0, 1, 2, 8, 10, 11}, 1: set(range(12, 64))}


def test_only_cpus_of_the_affinity_mask_count(fake_nodes):
    fake_nodes(TWO, usable={1, 2, 7, 9})
    assert nodes() == {0: {1, 2}, 1: {7}}
    fake_nodes(TWO, usable={1, 2, 9})
    assert nodes() == {0: {1, 2}}
    assert place() == UNBOUND


def test_only_memory_of_the_cpuset_counts(fake_nodes):
    """The CPUs may still be used: they count to a node that has memory for us."""
    fake_nodes(TWO, allowed={1}, usable=EIGHT)
    assert nodes() == {1: EIGHT}
    assert place() == UNBOUND


def test_cpus_without_memory_count_to_the_nearest_node_that_has_some(fake_nodes):
    distances = {1: [21, 10, 12], 2: [21, 12, 10]}
    three = {0: {0, 1}, 1: {2, 3}, 2: {4, 5}}
    fake_nodes(three, memory={0, 2}, distances=distances, usable=EIGHT)
    assert nodes() == {0: {0, 1}, 2: {2, 3, 4, 5}}
    fake_nodes(three, memory={0, 1}, distances=distances, usable=EIGHT)
    assert nodes() == {0: {0, 1}, 1: {2, 3, 4, 5}}
    fake_nodes(three, memory={1, 2}, usable=EIGHT)  # both are as far
    assert nodes() == {1: {0, 1, 2, 3}, 2: {4, 5}}
    fake_nodes(three, memory={0, 1}, allowed={0}, distances=distances, usable=EIGHT)
    assert nodes() == {0: {0, 1, 2, 3, 4, 5}}


def test_memory_without_cpus_is_no_place_for_a_shard(fake_nodes):
    fake_nodes(TWO | {2: set()}, usable=EIGHT)
    assert nodes() == TWO
    assert place().nodes == (0, 1)


def test_node_numbers_need_not_be_consecutive(fake_nodes):
    """A distance belongs to the node of its place among those there are."""
    fake_nodes({0: {0}, 4: {1}, 16: {2}}, memory={0, 4}, distances={16: [30, 20, 10]}, usable=EIGHT)
    assert nodes() == {0: {0}, 4: {1, 2}}


@pytest.mark.parametrize("missing", ["has_memory", "status"])
def test_a_system_that_says_less(fake_nodes, missing):
    """has_normal_memory is older than has_memory, and not every system has cpusets."""
    folder = fake_nodes(TWO, usable=EIGHT)
    (folder / "has_normal_memory").write_text("0-1\n")
    (folder / missing).unlink()
    assert nodes() == TWO


def test_no_sysfs(fake_nodes, monkeypatch, tmp_path):
    monkeypatch.setattr(numa, "NODES", tmp_path / "none")
    assert nodes() == {}
    assert place() == UNBOUND
    with pytest.raises(InputError, match=r"node 0 cannot be used: this system names no NUMA nodes in .*; usable nodes: none"):
        place([0])


@pytest.mark.parametrize("text", ["nonsense", "0-", "-1-2", ""])
def test_a_file_that_is_not_understood_is_as_none(fake_nodes, text):
    folder = fake_nodes(TWO, usable=EIGHT)
    (folder / "has_memory").write_text(text)
    assert nodes() == {}
    assert place() == UNBOUND


def test_distances_that_are_not_understood(fake_nodes):
    """The least number is taken."""
    folder = fake_nodes({0: {0}, 1: {1}, 2: {2}}, memory={0, 1}, usable=EIGHT)
    (folder / "node2/distance").write_text("30 20\n")
    assert nodes() == {0: {0, 2}, 1: {1}}


# Placements


def test_the_default_is_all_nodes_if_there_are_several(fake_nodes):
    fake_nodes(TWO, usable=EIGHT)
    assert place() == place(None) == Placement((0, 1), (frozenset(TWO[0]), frozenset(TWO[1])))
    assert place().shards == 2
    fake_nodes({0: EIGHT}, usable=EIGHT)
    assert place() == UNBOUND
    assert UNBOUND.shards == 1


@pytest.mark.parametrize(
    "chosen", [[0], [1], [0, 1], [1, 0], (1, 0), np.array([1, 0]), np.array([1], np.uint8), range(2)], ids=str
)
def test_nodes_of_ones_choice(fake_nodes, chosen):
    fake_nodes(TWO, usable=EIGHT)
    placement = place(chosen)
    assert placement.nodes == tuple(chosen)
    assert all(type(node) is int for node in placement.nodes)
    assert placement.cpus == tuple(frozenset(TWO[node]) for node in chosen)
    assert placement.shards == len(chosen)


def test_one_node_may_be_bound(fake_nodes):
    fake_nodes({0: EIGHT}, usable=EIGHT)
    assert place([0]) == Placement((0,), (frozenset(EIGHT),))


@pytest.mark.parametrize("chosen", [[], (), 1, "01", [0.0], [None], [[0]], np.zeros((1, 1))], ids=repr)
def test_what_is_no_list_of_nodes_is_refused(fake_nodes, chosen):
    fake_nodes(TWO, usable=EIGHT)
    with pytest.raises(
        InputError,
        match="numa_nodes must be None or a sequence of at least one node's number, found " + re.escape(repr(chosen)),
    ):
        place(chosen)


def test_a_node_twice_is_refused(fake_nodes):
    fake_nodes(TWO, usable=EIGHT)
    with pytest.raises(InputError, match=r"numa_nodes must be different nodes, found 1 more than once in \[1, 0, 1\]"):
        place([1, 0, 1])


#: What is wrong with node 2: what fake_nodes is given, and what is said.
UNUSABLE = {
    "absent": ({"cpus": TWO}, "there is none of that number"),
    "no memory": ({"memory": {0, 1}}, "it has no memory"),
    "cpuset": ({"allowed": {0, 1}}, "the cpuset of this process allows memory of 0-1 only"),
    "no CPUs": ({"cpus": TWO | {2: set()}}, "it has no CPUs"),
    "affinity": ({"usable": {0, 1, 5}}, "this process may run on CPUs 0-1,5 only, the node's are 8-9"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_node_that_cannot_be_used_is_refused(fake_nodes, case):
    given, why = UNUSABLE[case]
    fake_nodes(**({"cpus": TWO | {2: {8, 9}}, "usable": {0, 1, 5, 8, 9}} | given))
    with pytest.raises(
        InputError, match=rf"node 2 cannot be used: {re.escape(why)}; usable nodes: 0 \(CPUs 0-1.*\), 1 \(CPUs 5.*\)"
    ):
        place([0, 2])


def test_the_default_is_explained(fake_nodes, monkeypatch, capsys):
    fake_nodes({0: set(range(16)), 1: {16}}, usable=set(range(32)))
    assert numa.explain_default() == "2: 0 (16 CPUs), 1 (1 CPU)"
    assert config.config()["numa_nodes"] == [0, 1]
    show_config()
    assert "NUMA nodes: 2: 0 (16 CPUs), 1 (1 CPU)\n" in capsys.readouterr().out
    fake_nodes({0: EIGHT}, usable=EIGHT)
    assert numa.explain_default() == "one, layers are not bound"
    assert config.config()["numa_nodes"] == []
    monkeypatch.setattr(numa, "NODES", numa.NODES / "none")
    assert numa.explain_default() == "unknown here, layers are not bound"


# Cutting the intermediate dimension


@pytest.mark.parametrize("unit", [32, 64, 128])
@pytest.mark.parametrize("shards", range(1, 9))
@pytest.mark.parametrize("intermediate", [64, 70, 512, 768, 1000, 1408, 2048, 2880])
def test_split(intermediate, unit, shards):
    units = -(-intermediate // unit)
    if shards > units:
        message = rf"size of {intermediate} can be cut at multiples of {unit} into 1 to {units} shards, found {shards}"
        with pytest.raises(InputError, match=message):
            split(intermediate, unit, shards)
        return
    cuts = split(intermediate, unit, shards)
    assert len(cuts) == shards
    assert np.array_equal(np.concatenate([np.arange(*cut) for cut in cuts]), np.arange(intermediate))
    assert all(first % unit == 0 and first < last for first, last in cuts)
    counts = [-(-(last - first) // unit) for first, last in cuts]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


def test_split_by_hand():
    assert split(2880, 32, 4) == [(0, 736), (736, 1472), (1472, 2176), (2176, 2880)]
    assert split(70, 32, 2) == [(0, 64), (64, 70)]
    assert split(70, 32, 3) == [(0, 32), (32, 64), (64, 70)]
    assert split(5, 128, 1) == [(0, 5)]


@pytest.mark.parametrize("shards", [0, -1])
def test_no_shards(shards):
    with pytest.raises(InputError, match="can be cut at multiples of 32 into 1 to 2 shards"):
        split(64, 32, shards)
