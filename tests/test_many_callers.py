"""Many threads at once use what the package keeps for the process, and what they share. Without a GIL they truly do."""

import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from bare import Bare
from environments import ROOT
from helpers import random_batch, random_experts, same_bits

from ktmoe import Linear, Matrix, MoELayer, backends, get_num_threads, set_num_threads
from ktmoe._native import core
from ktmoe.backends.base import Backend
from ktmoe.registry import Registry
from ktmoe.weights.formats import F32

THREADS = 8
#: What each thread of a new process does first: it finds plug-ins, chooses a backend, makes the pool ready, packs and computes.
FIRST_USE = """
import threading
import numpy as np
import ktmoe
from helpers import random_batch, random_experts

experts = random_experts(np.random.default_rng(1), 2, 64, 64)
x, ids, weights = random_batch(np.random.default_rng(2), experts, 1, 2)
barrier, found = threading.Barrier(8), []

def use():
    barrier.wait()
    with ktmoe.MoELayer(experts) as layer:
        y = layer.submit(x, ids, weights).result()
    found.append((tuple(ktmoe.backends.names()), tuple(ktmoe.loaders.names()), y.tobytes()))

threads = [threading.Thread(target=use) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 8 and len(set(found)) == 1, [row[:2] for row in found]
"""


def at_once(*tasks):
    """What several threads return that begin together."""
    barrier = threading.Barrier(len(tasks))

    def run(task):
        barrier.wait()
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks))


def linear(n, k, value=1.0):
    return Matrix("m", F32, (n, k), np.full((n, k), value, np.float32))


def in_a_new_process(code):
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_use():
    for _ in range(3):
        in_a_new_process(FIRST_USE)


def test_importing_does_not_turn_the_gil_on(monkeypatch):
    """A module that does not say that it needs none would, and Python warns of it."""
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("this Python has a GIL")
    monkeypatch.delenv("PYTHON_GIL", raising=False)
    rooms = "ktmoe, ktmoe.cli, ktmoe.training, ktmoe.quantization, ktmoe.measuring, ktmoe.distributed"
    assert in_a_new_process(f"import sys, {rooms}; print(sys._is_gil_enabled())") == "False\n"


def test_the_pool_has_the_number_that_was_chosen_last():
    for _ in range(20):
        at_once(*(lambda n=n: set_num_threads(n) for n in (1, 2) * (THREADS // 2)))
        assert core.pool_threads() == get_num_threads()


def test_no_setting_is_lost():
    """Each thread sets one of its own, again and again."""

    def set_many(name, values):
        for value in values:
            core.tune(**{name: value})
            assert core.tune()[name] == value

    names = ("scratch_bytes", "reduce_slots", "ranges", "uneven")
    for _ in range(3):
        at_once(*(lambda name=name: set_many(name, range(1, 300)) for name in names))


def test_a_layer_is_closed_once(monkeypatch):
    class Counting(Bare):
        def __init__(self):
            self.closed, self.rounding = [], "exact"

        def close(self):
            self.closed.append(threading.get_ident())

    experts = random_experts(np.random.default_rng(1), 1, 32, 32)
    for _ in range(50):
        packed = Counting()
        monkeypatch.setattr(type(backends.get("fp32_lut")), "pack", lambda *_, packed=packed: packed)
        layer = MoELayer(experts, "fp32_lut")
        at_once(*[layer.close] * THREADS)
        assert len(packed.closed) == 1


def test_replacements_are_counted():
    with Linear(linear(32, 32)) as matrix:
        at_once(*[lambda: [matrix.replace(linear(32, 32)) for _ in range(25)]] * THREADS)
        assert matrix.replaced == 25 * THREADS


def test_a_registry_is_read_while_it_changes():
    registry = Registry("backend", "ktmoe.backends", "ktmoe.no-such-group", Backend)
    plugin = backends.get("fp32_lut")
    registry.register("always", plugin)
    done = threading.Event()

    def change():
        try:
            for turn in range(2000):
                registry.register(f"name {turn % 7}", plugin)
                registry.unregister(f"name {turn % 7}")
        finally:
            done.set()

    def read():
        while not done.is_set():
            assert plugin in registry.values()
            assert registry.names()[0] == "always"

    at_once(change, read, read, read)


def test_registering_one_name_at_once():
    registry = Registry("backend", "ktmoe.backends", "ktmoe.no-such-group", Backend)
    plugin = backends.get("fp32_lut")

    def register(name):
        try:
            registry.register(name, plugin)
        except ValueError:
            return False
        return True

    for turn in range(50):
        assert sum(at_once(*[lambda turn=turn: register(f"name {turn}")] * 4)) == 1


def test_one_layer_by_many_threads():
    """Calls, jobs, a mask that changes in place, an expert that is replaced by itself: each y is one of a few."""
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 2, 64, 64)
    x, ids, weights = random_batch(rng, experts, 3, 2)
    ids[:] = [0, 1]
    with MoELayer(experts) as layer:
        whole = layer.forward(x, ids, weights)
        layer.expert_mask[1] = False
        half = layer.forward(x, ids, weights)
        layer.expert_mask[1] = True
        one = {projection: experts.matrix(1, projection) for projection in experts.projections}

        def call():
            return [layer.forward(x, ids, weights) for _ in range(50)]

        def submit():
            return [job.result() for job in [layer.submit(x, ids, weights) for _ in range(50)]]

        def mask():
            for turn in range(200):
                layer.expert_mask[1] = turn % 2 == 1
            return []

        def replace():
            for _ in range(50):
                layer.replace_expert(1, one)
            return []

        found = at_once(call, call, submit, submit, mask, replace)
        assert all(same_bits(y, whole) or same_bits(y, half) for ys in found for y in ys)
        assert same_bits(layer.forward(x, ids, weights), whole)
