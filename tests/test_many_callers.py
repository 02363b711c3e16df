"""Many threads at once use what the package keeps for the process, and what they share. Without a GIL they truly do."""

import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from bare import Bare
from environments import ROOT
from helpers import random_batch, random_experts, same_bits

from ktmoe import Linear, Matrix, MoELayer, backends, get_num_threads, set_num_threads
from ktmoe._native import core
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


def linear(n, k):
    return Matrix("m", F32, (n, k), np.ones((n, k), np.float32))


def in_a_new_process(code):
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_use():
    in_a_new_process(FIRST_USE)


def test_importing_does_not_turn_the_gil_on(monkeypatch):
    """A module that does not say that it needs none would, and Python warns of it."""
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("this Python has a GIL")
    monkeypatch.delenv("PYTHON_GIL", raising=False)
    rooms = "ktmoe, ktmoe.cli, ktmoe.training, ktmoe.quantization, ktmoe.measuring, ktmoe.distributed"
    assert in_a_new_process(f"import sys, {rooms}; print(sys._is_gil_enabled())") == "False\n"


def test_the_pool_has_the_number_that_was_chosen_last(monkeypatch):
    """One thread chooses while another one is about to tell the pool what was chosen before."""
    tell, chosen = core.configure_pool, threading.Event()

    def tell_later(number, *how):
        if number == 1:
            assert chosen.wait(60)
        tell(number, *how)

    monkeypatch.setattr(core, "configure_pool", tell_later)
    first = threading.Thread(target=set_num_threads, args=(1,))
    first.start()
    while get_num_threads() != 1:
        time.sleep(0.001)
    set_num_threads(2)
    chosen.set()
    first.join()
    assert core.pool_threads() == get_num_threads() == 2


def test_no_setting_is_lost():
    """Each thread sets one of its own, again and again."""

    def set_many(name, values):
        for value in values:
            core.tune(**{name: value})
            assert core.tune()[name] == value

    names = ("scratch_bytes", "reduce_slots", "ranges", "uneven")
    for _ in range(3):
        at_once(*(lambda name=name: set_many(name, range(1, 300)) for name in names))


class Counting(Bare):
    """closed, replaced: an item for each call."""

    rounding = "exact"

    def __init__(self):
        self.closed, self.replaced = [], []

    def close(self):
        self.closed.append(None)

    def replace(self, expert, matrices):
        self.replaced.append(None)


def test_a_layer_is_closed_once(monkeypatch):
    """Both threads find what is packed before one of them takes it away."""
    both = threading.Barrier(2)

    class Layer(MoELayer):
        @property
        def packed(self):
            held = vars(self).get("held")
            if held is not None and threading.current_thread() is not threading.main_thread():
                both.wait(60)
            return held

        @packed.setter
        def packed(self, held):
            vars(self)["held"] = held

    experts = random_experts(np.random.default_rng(1), 1, 32, 32)
    packed = Counting()
    monkeypatch.setattr(type(backends.get("fp32_lut")), "pack", lambda *_: packed)
    layer = Layer(experts, "fp32_lut")
    at_once(layer.close, layer.close)
    assert len(packed.closed) == 1
    layer.close()
    assert len(packed.closed) == 1


def test_replacements_are_counted():
    with Linear(one := linear(32, 32)) as matrix:
        packed, matrix.packed = matrix.packed, Counting()  # which is so fast that threads meet
        at_once(*[lambda: [matrix.replace(one) for _ in range(2000)]] * 4)
        assert matrix.replaced == len(matrix.packed.replaced) == 8000
        matrix.packed = packed


def test_a_plug_in_is_taken_out_while_all_are_listed():
    class Changing(Registry):
        def names(self):
            found = super().names()
            if "other" in found:
                self.unregister("other")
            return found

    registry = Changing("backend", "ktmoe.backends", "ktmoe.no-such-group", "ktmoe.backends.base:Backend")
    plugin = backends.get("fp32_lut")
    for name in ("always", "other"):
        registry.register(name, plugin)
    assert plugin in registry.values()


def test_a_registry_is_read_while_it_changes():
    registry = Registry("backend", "ktmoe.backends", "ktmoe.no-such-group", "ktmoe.backends.base:Backend")
    plugin = backends.get("fp32_lut")
    registry.register("always", plugin)
    done = threading.Event()

    def change():
        try:
            for turn in range(300):
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
    registry = Registry("backend", "ktmoe.backends", "ktmoe.no-such-group", "ktmoe.backends.base:Backend")
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
