"""Each shard's threads are kept to its node's CPUs, as many as its cores; the caller gets its own mask back."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import random_batch, random_experts

from ktmoe import MoELayer, set_num_threads
from ktmoe._native import core
from ktmoe.machine.number_lists import numbers

#: Threads of each node, by hand, for nodes of so many cores and so many threads: in proportion, one for each node at least
#: where there are so many.
DEALT = {
    (2, 2): {2: (1, 1), 3: (2, 1), 4: (2, 2), 8: (4, 4)},
    (1, 1, 1, 1): {2: (1, 1, 0, 0), 4: (1, 1, 1, 1), 6: (2, 2, 1, 1), 8: (2, 2, 2, 2)},
    (3, 1): {2: (1, 1), 3: (2, 1), 4: (3, 1), 8: (6, 2)},
    (1, 3): {2: (1, 1), 3: (1, 2), 4: (1, 3), 8: (2, 6)},
}


def spec(intermediate=256, num_experts=2):
    return random_experts(np.random.default_rng(1), num_experts, 128, intermediate)


def threads_of_nodes(layer, count, several_nodes):
    """How many of the workers are kept to each of the layer's nodes, the caller counted to the first."""
    core.release()
    before, own = running(), os.sched_getaffinity(0)
    old = core.tune(by_turns=True)  # a thread that came too late for a call might not be kept anywhere yet
    layer.forward(*random_batch(np.random.default_rng(2), layer.spec, 3, 2))
    core.tune(**old)
    assert os.sched_getaffinity(0) == own
    found = [0] * len(layer.placement.nodes)
    found[0] = 1
    started = running() - before  # by number: one that has ended may linger, and may have had the same mask
    for mask in map(mask_of, started):
        on = [i for i, node in enumerate(layer.placement.nodes) if mask <= several_nodes[node]]
        assert len(on) == 1, f"a thread may run on CPUs {mask}"
        found[on[0]] += 1
    assert sum(found) == count
    return tuple(found)


def running() -> set[int]:
    """The numbers of this process's threads."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def mask_of(thread: int) -> set[int]:
    lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    return numbers(next(line.partition(":\t")[2] for line in lines if line.startswith("Cpus_allowed_list")))


def test_threads_by_default(chosen, several_nodes):
    """As many as cores: in a guest these are its CPUs."""
    with MoELayer(spec(), numa_nodes=chosen) as layer:
        cores = tuple(sum(len(domain.one_a_core) for domain in own) for own in layer.placement.domains)
        assert threads_of_nodes(layer, sum(cores), several_nodes) == cores


@pytest.mark.parametrize("threads", [2, 3, 4, 8])
@pytest.mark.usefixtures("guest")
def test_threads_of_ones_choice(threads, several_nodes):
    dealt = DEALT[tuple(map(len, several_nodes.values()))]
    if threads not in dealt:
        dealt = {**dealt, 3: (1, 1, 1, 0)}
    set_num_threads(threads)
    with MoELayer(spec()) as layer:
        assert threads_of_nodes(layer, threads, several_nodes) == dealt[threads]


def test_threads_follow_the_layer_that_is_computed(several_nodes):
    """The same threads are not on the nodes of another layer."""
    first, *_, last = several_nodes
    with MoELayer(spec(), numa_nodes=[first]) as one, MoELayer(spec(), numa_nodes=[last]) as other:
        for layer, node in ((one, first), (other, last), (one, first)):
            cores = len(several_nodes[node])
            assert threads_of_nodes(layer, cores, several_nodes) == (cores,)


def test_the_caller_is_on_the_first_node_while_it_computes(several_nodes):
    """And then where it was: here, on a CPU of the first node, while the layer begins with the last one."""
    nodes = list(several_nodes)[::-1]
    own, seen, end = {min(several_nodes[nodes[-1]])}, set(), threading.Event()
    experts = spec(1024, 8)
    batch = random_batch(np.random.default_rng(3), experts, 200, 2)

    def call():
        os.sched_setaffinity(0, own)
        while not end.is_set():
            layer.forward(*batch)
            after.append(os.sched_getaffinity(0))

    after = []
    with MoELayer(experts, numa_nodes=nodes) as layer:
        thread = threading.Thread(target=call)
        thread.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (len(seen) < 2 or len(after) < 2):
            seen.add(frozenset(mask_of(thread.native_id)))
        end.set()
        thread.join()
    assert all(mask == own for mask in after)
    assert len(after) >= 2
    assert frozenset(several_nodes[nodes[0]]) in seen
    assert seen <= {frozenset(own), frozenset(several_nodes[nodes[0]]), frozenset.union(*several_nodes.values())}
