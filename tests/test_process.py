"""What ktmoe does to the process it is in: forks, imports, and its idle threads."""

import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers import random_batch, random_experts, same_bits

from ktmoe import MoELayer, set_num_threads


@pytest.fixture(scope="module")
def batch(backend):
    """A layer, a batch, and its output."""
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 4, 64, 96)
    with MoELayer(experts, backend) as layer:
        arguments = random_batch(rng, experts, 30, 2)
        yield layer, arguments, layer.forward(*arguments)


# fork


def in_child(function):
    """What function returns in a forked child; the child's exit is checked."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(function()))
    child.start()
    sender.close()
    try:
        assert receiver.poll(60), "the child hangs"
        return receiver.recv()
    finally:
        child.join(5)
        child.kill()


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


# Idling


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


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
    before = cpu_seconds()
    time.sleep(0.5)
    assert cpu_seconds() - before < 0.1


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


def test_importing_changes_nothing():
    result = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    before, after = json.loads(result.stdout)
    assert after == before
    assert len(before["threads"]) >= 1
