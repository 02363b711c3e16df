"""Memory and threads that cgroups and cpusets leave to this process: by folders in the place of the system's own."""

import math
import os

import pytest

from ktmoe.machine import cgroup, memory, numa, threads
from ktmoe.machine.numa import UNBOUND, place

GIB = 2**30
EIGHT = set(range(8))


def meminfo(prefix="", /, **gib):
    """The machine's file, or with a prefix a node's, by GiB."""
    return "".join(f"{prefix}{name + ':':<16} {round(size * 2**20):>10} kB\n" for name, size in gib.items())


@pytest.fixture
def system(tmp_path, monkeypatch, fake_nodes):
    """A machine of one node with 100 GiB available and no cgroups; returns a function that makes this process's cgroups."""
    fake_nodes({0: {0}})
    root = tmp_path / "cgroup"
    root.mkdir()
    (tmp_path / "meminfo").write_text(meminfo(MemTotal=200, MemAvailable=100))
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(cgroup, "ROOT", root)
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")

    def groups(own, files):
        """own: lines of /proc/self/cgroup. files: text by path."""
        (tmp_path / "own").write_text("".join(line + "\n" for line in own))
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"{text}\n")

    return groups


def v2(folder, limit, used, file_pages=(0, 0)):
    """The files of a cgroup of version 2, in GiB; a limit may be "max"."""
    prefix = folder + "/" * bool(folder)
    return {
        f"{prefix}memory.max": limit if limit == "max" else limit * GIB,
        f"{prefix}memory.current": used * GIB,
        f"{prefix}memory.stat": f"file 5\ninactive_file {file_pages[0] * GIB}\nactive_file {file_pages[1] * GIB}",
    }


# Memory


def test_what_the_machine_has(system):
    assert memory.available_bytes() == 100 * GIB


def test_nothing_says(system):
    memory.MEMINFO.unlink()
    assert memory.available_bytes() is None
    memory.require(2**60, "anything")


def test_a_cgroup_leaves_less(system):
    system(["0::/a"], v2("a", 40, 30))
    assert memory.available_bytes() == 10 * GIB
    with pytest.raises(MemoryError, match=r"weights needs 11\.00 GiB of memory, 10\.00 GiB is available"):
        memory.require(11 * GIB, "weights")


def test_a_cgroup_that_is_over_its_limit_has_nothing_left(system):
    system(["0::/a"], v2("a", 10, 12))
    with pytest.raises(MemoryError, match=r"weights needs 1\.00 GiB of memory, 0\.00 GiB is available"):
        memory.require(GIB, "weights")


def test_a_cgroup_leaves_more_than_the_machine(system):
    system(["0::/a"], v2("a", 400, 30))
    assert memory.available_bytes() == 100 * GIB


def test_file_pages_that_are_charged_to_a_cgroup_can_be_dropped(system):
    """A checkpoint that was read has filled the cgroup up to its limit with them."""
    system(["0::/a"], v2("a", 40, 40, (20, 5)))
    assert memory.available_bytes() == 25 * GIB


@pytest.mark.parametrize(
    ("around", "own", "left"), [(50, 40, 10), (35, 40, 5), ("max", 40, 10), (35, "max", 5), ("max", "max", 100)]
)
def test_the_cgroups_around_ours_count(system, around, own, left):
    system(["0::/a/b/c"], v2("a/b/c", own, 30) | v2("a/b", "max", 30) | v2("a", around, 30))
    assert memory.available_bytes() == left * GIB


def test_a_container_sees_its_own_cgroup_as_the_root(system):
    system(["0::/"], v2("", 40, 30, (1, 0)))
    assert memory.available_bytes() == 11 * GIB
    system(["0::/system.slice/of-the-host"], {})  # and may yet be told the path that it has outside
    assert memory.available_bytes() == 11 * GIB


@pytest.mark.parametrize("controllers", ["memory", "memory,hugetlb"])
def test_version_1(system, controllers):
    files = {
        f"{controllers}/a/b/memory.limit_in_bytes": 9223372036854771712,
        f"{controllers}/a/b/memory.usage_in_bytes": 3 * GIB,
        f"{controllers}/a/memory.limit_in_bytes": 40 * GIB,
        f"{controllers}/a/memory.usage_in_bytes": 30 * GIB,
        f"{controllers}/a/memory.stat": f"active_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {2 * GIB}",
    }
    system(["7:cpu,cpuacct:/other", f"4:{controllers}:/a/b", "0::/"], files)
    assert memory.available_bytes() == 13 * GIB


def test_another_controllers_group_is_not_ours(system):
    system(["4:cpu:/a"], {"cpu/a/memory.limit_in_bytes": GIB, "cpu/a/memory.usage_in_bytes": 0})
    assert memory.available_bytes() == 100 * GIB


def test_a_cpuset_of_some_nodes_leaves_what_they_have(system, fake_nodes):
    """MemAvailable is all nodes' memory."""
    own = {"MemFree": 3, "Active(file)": 2, "Inactive(file)": 1, "SReclaimable": 0.5}
    texts = {
        n: meminfo(f"Node {n} ", MemTotal=64, Active=9, **free) for n, free in enumerate(({"MemFree": 50}, own, {"MemFree": 4}))
    }
    three = {n: {n} for n in texts}
    for allowed, left in (({1}, 6.5), ({1, 2}, 10.5), ({0, 1, 2}, 100)):
        fake_nodes(three, allowed=allowed, usable=EIGHT, meminfo=texts)
        assert memory.available_bytes() == left * GIB
    fake_nodes(three | {3: set()}, memory={0, 1}, allowed={0, 1}, usable=EIGHT, meminfo=texts)
    assert memory.available_bytes() == 100 * GIB  # the others have none
    assert memory.free_on([1, 0]) == 56.5 * GIB


@pytest.mark.parametrize("text", ["", "Node 1 MemFree: many kB\n", "Node 1 MemFree:\n"])
def test_a_node_that_does_not_say(system, fake_nodes, text):
    fake_nodes({0: {0}, 1: {1}}, allowed={1}, usable=EIGHT, meminfo={1: text})
    assert memory.free_on([1]) is None
    assert memory.available_bytes() == 100 * GIB


def test_this_machines_nodes():
    for number in numa.memory_nodes()[1]:
        free = memory.free_on([number])
        assert free is None or free > 0


# Threads


#: CPUs 0 to 7 are four cores of two each.
CORES = [{n, n + 4} for n in range(4)]


def test_threads_of_a_placement(system, fake_nodes):
    fake_nodes({0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}, usable=EIGHT, cores=CORES)
    assert threads.default_num_threads() == threads.threads_of(place()) == threads.threads_of(UNBOUND) == 4
    assert threads.threads_of(place([0])) == threads.threads_of(place([1])) == 2
    assert threads.threads_of(place([1, 0])) == 4
    fake_nodes({0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}, usable={0, 4, 5, 6}, cores=CORES)
    assert threads.threads_of(place([0])) == 2
    assert threads.threads_of(place([1])) == 1
    assert threads.default_num_threads() == threads.threads_of(UNBOUND) == 3


def test_threads_where_nodes_share_cpus(system, fake_nodes):
    fake_nodes({0: {0, 1}, 1: {0, 1}}, usable={0, 1}, cores=CORES)
    assert threads.threads_of(place()) == threads.threads_of(place([1])) == 2


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 4)]
)
def test_the_cgroups_quota_limits_threads(system, fake_nodes, quota, expected):
    fake_nodes({0: EIGHT}, usable=EIGHT, cores=CORES)
    system(["0::/a/b"], {"a/cpu.max": quota, "a/b/cpu.max": "max 100000"})
    assert threads.default_num_threads() == threads.threads_of(place([0])) == expected


def test_the_quota_of_version_1(system, fake_nodes):
    fake_nodes({0: EIGHT}, usable=EIGHT, cores=CORES)
    own = ["3:cpu,cpuacct:/a/b", "0::/"]
    system(own, {"cpu,cpuacct/a/b/cpu.cfs_quota_us": -1, "cpu,cpuacct/a/b/cpu.cfs_period_us": 100000})
    assert threads.cgroup_quota() == math.inf
    system(own, {"cpu,cpuacct/a/cpu.cfs_quota_us": 350000, "cpu,cpuacct/a/cpu.cfs_period_us": 100000})
    assert threads.cgroup_quota() == 3.5
    assert threads.default_num_threads() == 3
    assert threads.explain_default() == "4 physical cores within 8 usable CPUs, cgroup quota 3.5"


def test_without_cgroups(system):
    assert threads.cgroup_quota() == math.inf
    assert list(cgroup.folders("cpu")) == []


def test_which_folders_are_looked_into(system):
    system(["5:cpu,cpuacct:/a", "4:memory:/", "0::/b/c"], {})
    inside = [(version, os.path.relpath(folder, cgroup.ROOT)) for version, folder in cgroup.folders("cpu")]
    assert inside == [(1, "cpu/a"), (1, "cpu"), (1, "cpu,cpuacct/a"), (1, "cpu,cpuacct"), (2, "b/c"), (2, "b"), (2, ".")]
