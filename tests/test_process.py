"""What ktmoe does to the process it is in: forks, imports, and its idle threads."""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from importlib import metadata

import numpy as np
import pytest
from helpers import in_child, random_batch, random_experts, same_bits

from ktmoe import MoELayer, set_num_threads
from ktmoe.machine import numa


@pytest.fixture(scope="module")
def batch(backend):
    """A layer, a batch, and its output."""
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 4, 64, 96)
    with MoELayer(experts, backend) as layer:
        arguments = random_batch(rng, experts, 30, 2)
        yield layer, arguments, layer.forward(*arguments)


# fork


@pytest.mark.cover("any backend")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork(batch):
    """After use, with workers and a submit thread about; the child computes the same, its own child too, and so do we."""
    layer, arguments, y = batch
    set_num_threads(3)
    layer.forward(*arguments)
    layer.submit(*arguments).result()

    def compute():
        results = [layer.forward(*arguments), layer.submit(*arguments).result()]
        set_num_threads(2)
        results.append(layer.forward(*arguments))
        return [same_bits(result, y) for result in results] + [len(os.listdir("/proc/self/task")) > 1]

    assert in_child(compute) == [True] * 4
    assert in_child(lambda: in_child(compute)) == [True] * 4
    assert same_bits(layer.forward(*arguments), y)
    assert same_bits(layer.submit(*arguments).result(), y)


@pytest.mark.cover("any backend")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_while_another_thread_computes(batch):
    """The child must not wait for a lock whose holder it does not have."""
    layer, arguments, y = batch
    set_num_threads(2)
    stop = threading.Event()

    def call():
        while not stop.is_set():
            layer.forward(*arguments)

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        for _ in range(8):
            assert in_child(lambda: same_bits(layer.forward(*arguments), y))
    finally:
        stop.set()
        for caller in callers:
            caller.join()


# Where threads run

PINNED = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
from contextlib import ExitStack, suppress
from helpers import random_batch, random_experts
import ktmoe
from ktmoe.machine import numa, threads, topology
from ktmoe.background.tasks import BackgroundTasks

def masks():
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            (found[int(task.name)],) = [line for line in (task / "status").read_text().splitlines() if "Cpus_allowed:" in line]
    return found

def started(count):
    # the masks of the threads beyond those of before, once there are so many: ended ones linger a moment
    for _ in range(500):
        found = {number: mask for number, mask in masks().items() if number not in before}
        if len(found) == count:
            break
        time.sleep(0.01)
    assert len(found) == count, found
    before.update(found)
    return set(found.values())

def read(expert, projection):
    others.append(os.sched_getaffinity(0))
    return experts.matrix(expert, projection)

def make(key, progress):
    others.append(os.sched_getaffinity(0))
    return ktmoe.MoELayer(ktmoe.ExpertWeights(2, 64, 64, read), "fp32_lut")

def first_call():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    seen.append((numa.usable_cpus(), threads.default_num_threads(), numa.place()))
    layer = make("", None)
    layer.forward(*batch)
    layer.submit(*batch).result()
    layers.append(layer)
    loading = BackgroundTasks("", {"": 1}, make, 1, None, ExitStack())
    loading.get("")
    loading.stop()

rng, seen, layers, others, before = np.random.default_rng(1), [], [], [], set(masks())
experts = random_experts(rng, 2, 64, 64)
batch = random_batch(rng, experts, 3, 2)
topology.CPUS = Path("none")  # one L3 cache: threads that are on no nodes are kept to one where there are several
ktmoe.set_num_threads(4)
caller = threading.Thread(target=first_call)
caller.start()
caller.join()
usable = os.sched_getaffinity(0)
assert seen == [(usable, threads.default_num_threads(), numa.place())], seen
del others[0]  # the caller's own
assert len(others) == 13 and all(mask == usable for mask in others), others
assert started(3 + 1) == {masks()[os.getpid()]}  # submit()'s, too

os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the process is kept to one CPU
assert numa.usable_cpus() == os.sched_getaffinity(0)
ktmoe.set_num_threads(3)
layers[0].forward(*batch)
assert started(2) == {masks()[os.getpid()]}
"""


def test_our_threads_run_where_the_process_may_and_not_where_their_first_caller_was_kept():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    result = subprocess.run([sys.executable, "-c", PINNED, os.path.dirname(__file__)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_usable_cpus_are_not_those_that_a_running_call_keeps_the_first_thread_to(fake_nodes):
    """A bound layer keeps its caller, here the process's first thread, to one node's CPUs, and only while it computes."""
    cpus = sorted(os.sched_getaffinity(0))
    fake_nodes({0: {cpus[0]}, 1: {cpus[-1]}})
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 2, 512, 512)
    seen, stop = [], threading.Event()

    def look():
        while not stop.is_set():
            seen.append(numa.usable_cpus())

    arguments = random_batch(rng, experts, 200, 2)
    with MoELayer(experts, "fp32_lut", numa_nodes=[0, 1]) as layer:
        watcher = threading.Thread(target=look)
        watcher.start()
        for _ in range(10):
            layer.forward(*arguments)
        stop.set()
        watcher.join()
    assert seen
    assert all(found == set(cpus) for found in seen)


# Idling


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def idle_cpu_seconds():
    """CPU seconds of all threads, while this one sleeps for 0.2 seconds."""
    before = cpu_seconds()
    time.sleep(0.2)
    return cpu_seconds() - before


@pytest.mark.cover("any backend")
@pytest.mark.parametrize("spin_us", ["0", "100", "1000"])
def test_an_idle_pool_uses_no_cpu(batch, monkeypatch, spin_us):
    """A worker that went on spinning would use the whole time that we look; what is left is this test's own."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")  # more threads than CPUs never spin
    monkeypatch.setenv("KTMOE_SPIN_US", spin_us)
    layer, arguments, _ = batch
    set_num_threads(2)
    layer.forward(*arguments)
    time.sleep(0.05)  # more than the spin
    assert idle_cpu_seconds() < 0.1


@pytest.mark.cover("any backend")
def test_more_threads_than_cpus_never_spin(batch, monkeypatch):
    """A worker that spins would take the CPU from the one it waits for."""
    monkeypatch.setenv("KTMOE_SPIN_US", "1000000")
    layer, arguments, _ = batch
    set_num_threads(len(os.sched_getaffinity(0)) + 1)
    layer.forward(*arguments)
    assert idle_cpu_seconds() < 0.1


# Import

IMPORT = """
import atexit, concurrent.futures, json, os, signal, sys, threading
import ml_dtypes, numpy, safetensors.numpy, threadpoolctl

def state():
    return {
        "threads": sorted(os.listdir("/proc/self/task")),
        "python threads": [thread.name for thread in threading.enumerate()],
        "atexit": atexit._ncallbacks(),
        "environment": dict(os.environ),
        "signals": [str(signal.getsignal(s)) for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP)],
        "masks": [line for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn", "SigCgt", "Cpus"))],
        "directory": os.getcwd(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "numpy errors": numpy.geterr(),
        "float formatting": [hook.__name__ for hook in (sys.excepthook, sys.displayhook, threading.excepthook)],
        "threadpoolctl": len(threadpoolctl.threadpool_info()),
    }

before = state()
import ktmoe
after = state()
assert "torch" not in sys.modules
print(json.dumps([before, after]))
"""


def test_version():
    import ktmoe

    assert ktmoe.__version__ == metadata.version("ktmoe")
    assert "__version__" in ktmoe.__all__
    with pytest.raises(AttributeError, match="module 'ktmoe' has no attribute 'nothing'"):
        ktmoe.nothing  # noqa: B018


def test_importing_changes_nothing():
    result = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    before, after = json.loads(result.stdout)
    assert after == before
    assert len(before["threads"]) >= 1
