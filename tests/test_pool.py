"""The thread pool: callers side by side, close() while they run, thread counts, threadpoolctl, the GIL."""

import os
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import threadpoolctl
from helpers import MANY_THREADS, random_batch, random_experts, same_bits

from ktmoe import MoELayer, get_num_threads, set_num_threads
from ktmoe._native import core
from ktmoe.errors import ClosedError, InputError
from ktmoe.machine import threads

TOKENS = 30


@pytest.fixture(scope="module")
def batch(backend):
    """A layer, a batch, and its output."""
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 4, 64, 96)
    with MoELayer(experts, backend) as layer:
        arguments = random_batch(rng, experts, TOKENS, 2)
        yield layer, arguments, layer.forward(*arguments)


def own_threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


# Callers


@pytest.mark.cover("any backend")
def test_concurrent_callers_get_what_serial_ones_get(batch, backend, is_emulated):
    """Of two layers, with batches of their own, while another thread changes the number of threads."""
    layer, arguments, y = batch
    other_experts = random_experts(np.random.default_rng(2), 2, 100, 32)
    with MoELayer(other_experts, backend) as other:
        other_arguments = random_batch(np.random.default_rng(3), other_experts, 5, 1)
        other_y = other.forward(*other_arguments)
        stop = threading.Event()

        def change():
            while not stop.is_set():
                for n in (1, 2, 3):
                    set_num_threads(n)
                    time.sleep(0.001)

        def call(number):
            if number % 3 == 0:
                return same_bits(other.forward(*other_arguments), other_y)
            tokens = slice(number % TOKENS, None)
            return same_bits(layer.forward(*(a[tokens] for a in arguments)), y[tokens])

        changer = threading.Thread(target=change)
        changer.start()
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(call, range(30 if is_emulated else 120)))
        stop.set()
        changer.join()
    assert all(results)


@pytest.mark.cover("any backend")
def test_layers_are_made_side_by_side(batch, backend):
    """While another one computes."""
    layer, arguments, y = batch

    def make(seed):
        rng = np.random.default_rng(seed)
        experts = random_experts(rng, 3, 96, 64)
        with MoELayer(experts, backend) as mine:
            keys = [(expert, projection) for expert in range(3) for projection in ("gate", "up", "down")]
            return all(np.array_equal(core.unpack(mine.packed, *key)["codes"], experts.matrix(*key).codes) for key in keys)

    with ThreadPoolExecutor(4) as pool:
        made = pool.map(make, range(12))
        assert all(same_bits(layer.forward(*arguments), y) for _ in range(10))
        assert all(made)


def test_submit(batch):
    layer, arguments, y = batch
    out = np.empty_like(y)
    jobs = [layer.submit(*arguments) for _ in range(5)] + [layer.submit(*arguments, out=out)]
    assert all(isinstance(job, Future) for job in jobs)
    assert all(same_bits(job.result(), y) for job in jobs)
    assert jobs[-1].result() is out


def test_submitted_jobs_run_in_order(batch):
    """Each reads what the one before it wrote."""
    layer, (x, ids, weights), _ = batch
    expected, buffer = x.copy(), x.copy()
    for _ in range(4):
        expected = layer.forward(expected, ids, weights)
    jobs = [layer.submit(buffer, ids, weights, out=buffer) for _ in range(4)]
    assert jobs[-1].result() is buffer
    assert same_bits(buffer, expected)


def test_a_jobs_exception_comes_with_its_result(batch):
    layer, (x, ids, weights), y = batch
    bad, good = layer.submit(x[:, :-1], ids, weights), layer.submit(x, ids, weights)
    assert isinstance(bad.exception(), InputError)
    with pytest.raises(InputError, match="x must have shape"):
        bad.result()
    assert same_bits(good.result(), y)


@pytest.mark.cover("any backend")
def test_close_waits_for_running_calls_and_refuses_later_ones(backend):
    """Calls from several threads while the layer is closed: each is right or refused, and none reads freed memory."""
    rng = np.random.default_rng(4)
    experts = random_experts(rng, 2, 64, 64)
    arguments = random_batch(rng, experts, TOKENS, 2)
    outcomes = []
    for _ in range(10):
        layer = MoELayer(experts, backend)
        y = layer.forward(*arguments)
        started = threading.Barrier(4)

        def call(layer=layer, y=y, started=started):
            started.wait()
            while True:
                try:
                    outcomes.append(same_bits(layer.forward(*arguments), y))
                except ClosedError:
                    return
                except Exception as error:
                    outcomes.append(error)
                    return

        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        started.wait()
        time.sleep(0.002)
        layer.close()
        for caller in callers:
            caller.join()
    assert set(outcomes) == {True}


def test_close_between_a_calls_checks_and_its_work(backend):
    """The same race, at its narrowest."""

    class ClosedByItsMask(MoELayer):
        @property
        def expert_mask(self):
            self.close()
            return np.ones(self.num_experts, bool)

        @expert_mask.setter
        def expert_mask(self, value):
            pass

    rng = np.random.default_rng(5)
    experts = random_experts(rng, 2, 64, 64)
    layer = ClosedByItsMask(experts, backend)
    with pytest.raises(ClosedError):
        layer.forward(*random_batch(rng, experts, 2, 2))


# Threads


def test_the_number_of_threads_is_what_was_set(batch):
    layer, arguments, y = batch
    set_num_threads(1)
    layer.forward(*arguments)
    alone = own_threads()  # some of which may end meanwhile: those that earlier tests started
    for n in range(1, MANY_THREADS + 1):
        set_num_threads(n)
        assert get_num_threads() == core.pool_threads() == n
        assert same_bits(layer.forward(*arguments), y)
        assert len(own_threads() - alone) == n - 1  # the caller is one of them


def test_256_threads_of_several_l3_caches(fake_nodes):
    """With bits that do not depend on them, in groups of one and in full ones, on the CPUs that there are."""
    rng = np.random.default_rng(6)
    experts = random_experts(rng, 3, 96, 160)
    arguments = random_batch(rng, experts, TOKENS, 2)
    with MoELayer(experts, "fp32_lut") as layer:
        set_num_threads(1)
        y = layer.forward(*arguments)
        for caches in ([set(range(128))], [set(range(n, n + 16)) for n in range(0, 128, 16)]):
            fake_nodes({0: set(range(128))}, usable=set(range(128)), caches=caches)
            for n in (2, 7, 8, 9, 17, 100, 256):
                set_num_threads(n)
                assert same_bits(layer.forward(*arguments), y)
                assert core.pool_gate(3) > 0


def test_the_default_is_within_the_cpus_we_may_use():
    assert 1 <= get_num_threads() == threads.default_num_threads() <= len(os.sched_getaffinity(0))


def test_threadpoolctl_sees_and_limits_the_pool(batch):
    layer, arguments, y = batch
    set_num_threads(3)

    def seen():
        return [i for i in threadpoolctl.threadpool_info() if i["user_api"] == "ktmoe"]

    (info,) = seen()
    assert info["num_threads"] == 3
    assert info["internal_api"] == "ktmoe"
    for limits in (2, {"ktmoe": 2}):
        with threadpoolctl.threadpool_limits(limits):
            assert core.pool_threads() == get_num_threads() == seen()[0]["num_threads"] == 2
            assert same_bits(layer.forward(*arguments), y)
        assert core.pool_threads() == get_num_threads() == 3


@pytest.mark.cover("any backend")
def test_the_gil_is_free_while_a_call_computes(batch):
    """Another thread counts; it could not, between the two looks at its counter, if forward kept the GIL."""
    layer, arguments, _ = batch
    set_num_threads(1)
    arguments = [np.tile(a, (20, 1)) for a in arguments]
    counted, stop, progress = [0], threading.Event(), []

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    packed = layer.packed

    class Watched:
        def forward(self, *args):
            before = counted[0]
            packed.forward(*args)
            progress.append(counted[0] - before)

    interval = sys.getswitchinterval()
    layer.packed = Watched()
    sys.setswitchinterval(60)  # nobody must give the GIL up, but who sleeps or computes without it
    try:
        counter.start()
        while len(progress) < 100 and not any(progress):  # the other thread has to be given a CPU meanwhile
            layer.forward(*arguments)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        layer.packed = packed
        counter.join()
    assert any(progress)
