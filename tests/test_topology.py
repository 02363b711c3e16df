"""Cores and L3 caches as the system names them, and where the pool's threads run for them."""

import os

import numpy as np
import pytest
from helpers import random_batch, random_experts, same_bits
from topology import CPUS, masks, workers

from ktmoe import MoELayer, config, set_num_threads, show_config
from ktmoe._native import core
from ktmoe.machine import numa, threads, topology
from ktmoe.machine.number_lists import listed, ranges
from ktmoe.machine.topology import Domain, cores, domains

EIGHT = set(range(8))
#: CPUs 0 to 7 are four cores of two each, and two L3 caches.
CORES = [{n, n + 4} for n in range(4)]
CACHES = [{0, 1, 4, 5}, {2, 3, 6, 7}]


def domain(cpus, one_a_core):
    return Domain(frozenset(cpus), frozenset(one_a_core))


# What the system says


def test_this_machine():
    """Whatever it is, each of our CPUs is in one domain and in one core of it."""
    usable = os.sched_getaffinity(0)
    found = domains(usable)
    assert sorted(cpu for own in found for cpu in own.cpus) == sorted(usable)
    assert sum(len(own.one_a_core) for own in found) == len(cores(usable))
    assert all(own.one_a_core <= own.cpus for own in found)


def test_caches_and_cores(fake_nodes):
    fake_nodes({0: EIGHT}, cores=CORES, caches=CACHES)
    assert cores(EIGHT) == CORES
    assert domains(EIGHT) == (domain(CACHES[0], {0, 1}), domain(CACHES[1], {2, 3}))


def test_only_the_cpus_that_are_asked_for_count(fake_nodes):
    fake_nodes({0: EIGHT}, cores=CORES, caches=CACHES)
    assert domains({0, 5, 6, 7}) == (domain({0, 5}, {0, 5}), domain({6, 7}, {6, 7}))
    assert domains({3, 6, 7}) == (domain({3, 6, 7}, {3, 6}),)


@pytest.mark.parametrize("text", ["", "\n", "many\n", None])
def test_where_the_system_does_not_say(fake_nodes, text):
    folder = fake_nodes({0: EIGHT}, cores=CORES, caches=CACHES)
    for name in ("topology/thread_siblings_list", "cache/index3/shared_cpu_list"):
        for cpu in EIGHT:
            (folder / f"cpu{cpu}" / name).unlink() if text is None else (folder / f"cpu{cpu}" / name).write_text(text)
    assert cores(EIGHT) == [{cpu} for cpu in range(8)]
    assert domains(EIGHT) == (domain(EIGHT, EIGHT),)


def test_caches_of_one_core_each_count_as_one(fake_nodes):
    """A virtual machine may say so of all its CPUs, and an affinity mask may leave no more."""
    fake_nodes({0: EIGHT}, cores=CORES, caches=CORES)
    assert domains(EIGHT) == (domain(EIGHT, range(4)),)
    fake_nodes({0: EIGHT}, cores=CORES, caches=CACHES)
    assert domains({0, 2, 6}) == (domain({0, 2, 6}, {0, 2}),)
    assert domains({0, 1, 2, 6}) == (domain({0, 1}, {0, 1}), domain({2, 6}, {2}))


def test_the_system_is_asked_once_for_a_set_of_cpus(fake_nodes, monkeypatch):
    """For each layer the same sets come; another set and another folder are asked for anew."""
    asked = []
    monkeypatch.setattr(topology, "listed", lambda file: asked.append(file) or listed(file))
    first, second = domain(CACHES[0], {0, 1}), domain(CACHES[1], {2, 3})
    fake_nodes({0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}, usable=EIGHT, cores=CORES, caches=CACHES)
    assert numa.place().domains == ((first,), (second,))
    assert asked
    asked.clear()
    assert numa.place().domains == ((first,), (second,))
    assert not asked
    assert domains({0, 1, 4, 6}) == (domain({0, 1, 4}, {0, 1}), domain({6}, {6}))
    assert asked
    fake_nodes({0: EIGHT}, usable=EIGHT, cores=CORES)
    assert numa.place([0]).domains == ((domain(EIGHT, range(4)),),)


def test_placements_have_domains(fake_nodes):
    """Of their nodes' CPUs; of all usable ones where layers are on no nodes."""
    first, second = domain({0, 1, 4, 5}, {0, 1}), domain({2, 3, 6, 7}, {2, 3})
    fake_nodes({0: EIGHT}, usable=EIGHT, cores=CORES, caches=CACHES)
    assert numa.place().domains == numa.place([0]).domains == ((first, second),)
    fake_nodes({0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}, usable=EIGHT, cores=CORES, caches=CACHES)
    assert numa.place().domains == ((first,), (second,))
    assert numa.place([1, 0]).domains == ((second,), (first,))
    assert numa.UNBOUND.domains == ((first, second),)
    fake_nodes({0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}, usable={0, 1, 6}, cores=CORES, caches=[EIGHT])
    assert numa.place().domains == ((domain({0, 1}, {0, 1}),), (domain({6}, {6}),))


def test_threads_by_default_are_cores(fake_nodes):
    fake_nodes({0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}, usable=EIGHT, cores=CORES, caches=CACHES)
    assert threads.threads_of(numa.place()) == 4
    assert threads.threads_of(numa.place([1])) == 2


def test_show_config_names_the_caches(fake_nodes, capsys):
    fake_nodes({0: EIGHT}, usable=EIGHT, cores=CORES, caches=[{0, 1, 2, 4, 5, 6}, {3, 7}])
    assert config.config()["l3_caches"] == [3, 1]
    show_config()
    assert "L3 caches: 2, of 3, 1 physical cores\n" in capsys.readouterr().out
    fake_nodes({0: EIGHT}, usable=EIGHT, cores=CORES, caches=[EIGHT])
    assert config.config()["l3_caches"] == [4]
    show_config()
    assert "L3" not in capsys.readouterr().out


# Where threads run


#: CPUs that are nowhere: no thread runs there, whatever it is kept to.
NOWHERE = [4000, 4001]
OURS = ranges({CPUS[0], CPUS[-1]})
#: All that a made-up machine has: two CPUs of this one, and those.
ALL = {CPUS[0], CPUS[-1], *NOWHERE}


@pytest.fixture
def where():
    """where(threads, **of the layer): the masks of a layer's threads but the caller's, whose own stays as it is."""
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 2, 64, 128)
    batch = random_batch(rng, experts, 3, 2)

    def found(count, **settings):
        core.release()
        before, own = masks(), os.sched_getaffinity(0)
        if count:
            set_num_threads(count)
        with MoELayer(experts, "fp32_lut", **settings) as layer:
            old = core.tune(by_turns=True)  # a thread that came too late for a call might not be kept anywhere yet
            y = layer.forward(*batch)
            core.tune(**old)
            threads = workers(count - 1, before)
            assert same_bits(layer.forward(*batch), y)
        assert os.sched_getaffinity(0) == own
        return threads

    yield found
    core.release()


def test_unbound_threads_are_kept_to_an_l3_cache_where_there_are_several(fake_nodes, where):
    caches = [{CPUS[0], NOWHERE[0]}, {CPUS[-1], NOWHERE[1]}]
    fake_nodes({0: {CPUS[0]}}, usable=ALL, caches=caches)
    assert where(4) == sorted([str(CPUS[0]), str(CPUS[-1]), str(CPUS[-1])])
    fake_nodes({0: {CPUS[0]}}, usable={*CPUS, *NOWHERE}, caches=[{*CPUS, *NOWHERE}])
    assert where(4) == [ranges(os.sched_getaffinity(0))] * 3


def test_an_affinity_mask_that_has_none_of_a_caches_cpus_any_more(fake_nodes, where):
    caches = [{CPUS[0], NOWHERE[0]}, {CPUS[-1], NOWHERE[1]}]
    fake_nodes({0: {CPUS[0]}}, usable=ALL, caches=caches)
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CPUS[-1]})
    try:
        assert where(4) == [str(CPUS[-1])] * 3
    finally:
        os.sched_setaffinity(0, own)


@pytest.mark.parametrize("nodes", [[0], [1, 0]])
def test_hyperthreads_are_idle_unless_there_are_more_threads_than_cores(fake_nodes, where, nodes):
    siblings = [{CPUS[0], CPUS[-1]}, set(NOWHERE)]
    fake_nodes(dict.fromkeys(nodes, ALL), usable=ALL, cores=siblings)
    threads = 2 * len(nodes)
    assert where(threads, numa_nodes=nodes) == [str(CPUS[0])] * (threads - 1)
    threads = 3 * len(nodes)
    assert where(threads, numa_nodes=nodes) == [OURS] * (threads - 1)


def test_bound_threads_are_kept_to_their_nodes_l3_caches(fake_nodes, where):
    caches = [{CPUS[0], NOWHERE[0]}, {CPUS[-1], NOWHERE[1]}]
    fake_nodes({0: ALL, 1: {CPUS[0], NOWHERE[0]}}, usable=ALL, caches=caches)
    first, last = str(CPUS[0]), str(CPUS[-1])
    assert where(8, numa_nodes=[0]) == sorted([first] * 3 + [last] * 4)
    assert where(6, numa_nodes=[0, 1]) == sorted([first] + [last] * 2 + [first] * 2)
