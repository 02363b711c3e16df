"""A control group's cpuset leaves a process some CPUs and some nodes' memory: what nodes there are then, where weights lie.

Each case is a process of its own in a new group of version 2, as a container is.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import random_batch, random_experts
from nodes_of_pages import nodes_by_shard

from ktmoe import MoELayer
from ktmoe._native import core
from ktmoe.errors import InputError
from ktmoe.machine import memory, numa

GROUPS = Path("/sys/fs/cgroup")
#: Who joins a group before it becomes another program: Python's own threads would not follow.
JOIN = 'echo $$ >"$0/cgroup.procs" && exec "$@"'


def found(numa_nodes):
    """In a process of a group: what it may use, and where a layer's pages are that asks for these nodes."""
    experts = random_experts(np.random.default_rng(1), 2, 256, 1024)
    usable = {node: sorted(cpus) for node, cpus in numa.nodes().items()}
    free = {node: memory.free_on([node]) for node in usable}
    try:
        with MoELayer(experts, numa_nodes=numa_nodes) as layer:
            layer.forward(*random_batch(np.random.default_rng(2), experts, 3, 2))
            on = {shard: sorted(nodes) for shard, nodes in nodes_by_shard(core.packed_at(layer.packed)).items()}
            placed, refused = layer.placement.nodes, None
    except InputError as error:
        on, placed, refused = None, None, str(error)
    return {
        "usable": usable,
        "placed": placed,
        "pages": on,
        "refused": refused,
        "available": memory.available_bytes(),
        "free": free,
    }


@pytest.fixture
def in_group(guest):
    """in_group(cpus, mems, numa_nodes): what found() returns there."""
    group = GROUPS / f"ktmoe-{os.getpid()}"
    group.mkdir()

    def call(cpus, mems, numa_nodes=None):
        (group / "cpuset.cpus").write_text(cpus)
        (group / "cpuset.mems").write_text(mems)
        code = "import json, sys, test_cpusets; print(json.dumps(test_cpusets.found(json.loads(sys.argv[1]))))"
        here = Path(__file__).parent
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (here, here.parent, here.parents[1])))}
        command = ["sh", "-c", JOIN, group, sys.executable, "-c", code, json.dumps(numa_nodes)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    yield call
    group.rmdir()


@pytest.mark.parametrize("guest", ["two"], indirect=True)
def test_memory_of_one_node(in_group):
    """The other node's CPUs count to it. Layers are not bound, and what is free is what that node has."""
    was = in_group("0-3", "1")
    assert was["usable"] == {"1": [0, 1, 2, 3]}
    assert (was["placed"], was["pages"], was["refused"]) == ([], {"0": [1]}, None)
    assert was["available"] <= was["free"]["1"] + (64 << 20)


@pytest.mark.parametrize("guest", ["two"], indirect=True)
def test_a_node_whose_memory_is_forbidden(in_group):
    was = in_group("0-3", "0", [0, 1])
    assert was["refused"] == (
        "numa_nodes: node 1 cannot be used: the cpuset of this process allows memory of 0 only; usable nodes: 0 (CPUs 0-3)"
    )


@pytest.mark.parametrize("guest", ["two"], indirect=True)
def test_cpus_of_one_node(in_group):
    """The memory of both is allowed, and yet a node without CPUs is no place for a shard."""
    was = in_group("2-3", "0-1")
    assert was["usable"] == {"1": [2, 3]}
    assert (was["placed"], was["pages"]) == ([], {"0": [1]})


@pytest.mark.parametrize("guest", ["two"], indirect=True)
def test_one_cpu_of_each_node(in_group):
    was = in_group("1-2", "0-1", [1, 0])
    assert was["usable"] == {"0": [1], "1": [2]}
    assert (was["placed"], was["pages"]) == ([1, 0], {"0": [1], "1": [0]})


@pytest.mark.parametrize("guest", ["four"], indirect=True)
def test_three_nodes_of_four(in_group):
    """Node 1's CPU counts to the nearest node whose memory is allowed; of equal ones to the first."""
    was = in_group("0-3", "0,2-3")
    assert was["usable"] == {"0": [0, 1], "2": [2], "3": [3]}
    assert (was["placed"], was["pages"]) == ([0, 2, 3], {"0": [0], "1": [2], "2": [3]})
