"""Calls that CUDA graphs replay, without CUDA: these tests call the host functions themselves, as a replay does."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from cached import arenas_of
from helpers import BF16, in_child, random_experts, same_bits
from kt_wrappers import EXPERTS, HIDDEN, TOP_K, batch, write

from ktmoe import MoELayer, set_num_threads
from ktmoe._native import core
from ktmoe.compat.deferral import split
from ktmoe.errors import CacheError, ClosedError, InputError, UnavailableError

TOKENS = 5
NAN = 0x7FC0


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    folder = write("MXFP4", tmp_path_factory.mktemp("mxfp4"), layers=2)
    made = [MoELayer.from_checkpoint(folder, layer) for layer in range(2)]
    yield made
    for layer in made:
        layer.close()


class Replayed:
    """A call's memory, what is in it, and its record. now() and later(): the ids that ran first and later."""

    def __init__(self, layer, seed=0, tokens=TOKENS, urgent=None, earlier=None):
        self.layer = layer
        self.x, self.ids, self.weights = batch(seed, tokens)
        self.y = np.zeros((tokens, HIDDEN), BF16)
        self.late = None if urgent is None else np.zeros_like(self.y)
        self.mask, self.on_gpu = np.ones(EXPERTS, bool), np.zeros(EXPERTS, bool)
        self.scratch = np.zeros(core.CallRecord.scratch_bytes(tokens, TOP_K, HIDDEN, EXPERTS), np.uint8)
        places = [array.view(np.uint16) for array in (self.x, self.y)]
        self.record = core.CallRecord(
            layer.packed,
            places[0],
            self.ids,
            self.weights,
            places[1],
            self.mask.view(np.uint8),
            self.on_gpu.view(np.uint8),
            urgent,
            None if urgent is None else self.late.view(np.uint16),
            None if earlier is None else earlier.record,
            self.scratch,
        )
        slots = self.scratch[2 * tokens * HIDDEN * 4 :][: 3 * tokens * TOP_K * 8].view(np.int64).reshape(3, tokens, TOP_K)
        self.now, self.later = slots[1:]

    def run(self):
        """Run both parts of the call; returns y."""
        core.start_captured_calls()
        core.submit_captured(self.record.address)
        core.await_captured(self.record.address)
        while not self.record.idle:
            pass
        return self.y.copy()

    def expected(self, ids=None):
        return self.layer.forward(self.x, self.ids if ids is None else ids, self.weights)


def only(ids, mask):
    return np.where(mask[np.clip(ids, 0, EXPERTS - 1)], ids, -1)


# What a call computes


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_a_call_has_the_bits_of_forward(layers, tokens):
    """Whatever was copied to its memory since."""
    call = Replayed(layers[0], tokens=tokens)
    for seed in range(5):
        for own, new in zip((call.x, call.ids, call.weights), batch(seed, tokens), strict=True):
            own[...] = new
        assert same_bits(call.run(), call.expected())


def test_masks_are_read_when_it_runs(layers):
    call = Replayed(layers[0])
    call.run()
    call.on_gpu[:3] = True
    assert same_bits(call.run(), call.expected(only(call.ids, ~call.on_gpu)))
    call.on_gpu[:] = False
    call.mask[3:5] = False
    assert same_bits(call.run(), call.expected(only(call.ids, call.mask)))
    call.mask[:] = False
    assert not call.run().any()


def test_what_is_deferred(layers):
    """The split is that of numpy, for any ids and weights; each part has the bits of a call with these ids."""
    rng = np.random.default_rng(1)
    calls = {urgent: Replayed(layers[0], urgent=urgent) for urgent in (0, 1, 2, TOP_K - 1, TOP_K, TOP_K + 3)}
    deferred = 0
    for turn in range(240):
        urgent = list(calls)[turn % len(calls)]
        call = calls[urgent]
        call.ids[...] = rng.integers(-2, EXPERTS + 2, call.ids.shape)
        call.weights[...] = rng.integers(-2, 3, call.weights.shape) * (0.25 if turn % 2 else -0.0)  # many are equal
        if turn % 4 == 3:
            call.weights[rng.random(call.weights.shape) < 0.3] = np.nan
        call.on_gpu[:] = rng.random(EXPERTS) < 0.2
        now, later = split(call.ids, call.weights, urgent, call.on_gpu)
        y = call.run()
        np.testing.assert_array_equal(call.now, now)
        np.testing.assert_array_equal(call.later, np.full_like(now, -1) if later is None else later)
        if not np.isnan(call.weights).any():
            assert same_bits(y, call.expected(now))
        if later is not None and not np.isnan(call.weights).any():
            assert same_bits(call.late, call.expected(later))
            deferred += 1
    assert deferred > 40


def test_what_is_deferred_is_added_once(layers):
    first = Replayed(layers[0], urgent=1)
    second = Replayed(layers[1], seed=1, earlier=first)
    plain = second.run()  # nothing was deferred yet
    assert same_bits(plain, second.expected())
    first.run()
    wide = second.layer.forward(second.x.astype(np.float32), second.ids, second.weights)
    summed = (wide + first.late.astype(np.float32)).astype(BF16)
    assert not same_bits(summed, plain)
    assert same_bits(second.run(), summed)
    assert same_bits(second.run(), plain)
    first.run()
    first.on_gpu[:] = True  # what the call before deferred is dropped, and this one defers nothing
    first.run()
    assert same_bits(second.run(), plain)


def test_wrong_memory(layers):
    good = Replayed(layers[0], urgent=1)
    packed, x, y = layers[0].packed, good.x.view(np.uint16), good.y.view(np.uint16)
    masks = good.mask.view(np.uint8), good.on_gpu.view(np.uint8)
    late = good.late.view(np.uint16)

    def record(x=x, y=y, masks=masks, late=late, earlier=None, scratch=good.scratch):
        core.CallRecord(packed, x, good.ids, good.weights, y, *masks, 1, late, earlier, scratch)

    record()
    for wrong, message in (
        ({"x": x[:-1]}, "x must be"),
        ({"y": y[:, :-1].copy()}, "out must be"),
        ({"x": x.astype(np.float32), "y": y.astype(np.float32)}, "bfloat16"),
        ({"masks": (masks[0][:-1], masks[1])}, "mask must be"),
        ({"masks": (masks[0], masks[1][:-1])}, "on_gpu must be"),
        ({"late": late[:-1]}, "late must be"),
        ({"scratch": good.scratch[:-1]}, "scratch is too small"),
        ({"earlier": Replayed(layers[1]).record}, "earlier must be"),
        ({"earlier": Replayed(layers[1], urgent=1, tokens=1).record}, "earlier must be"),
    ):
        with pytest.raises(InputError, match=message):
            record(**wrong)


# What it fails with


def test_a_closed_layer_gives_nan_and_one_error(layers):
    rng = np.random.default_rng(2)
    layer = MoELayer(random_experts(rng, EXPERTS, HIDDEN, HIDDEN))
    call = Replayed(layer, urgent=1)
    after = Replayed(layers[0], earlier=call)
    call.run()
    layer.close()
    assert core.captured_failures() == 0
    for _ in range(2):
        assert (call.run().view(np.uint16) == NAN).all()
        assert np.isnan(after.run().astype(np.float32)).all()
    assert core.captured_failures() == 1
    with pytest.raises(ClosedError, match="layer 7: the layer was closed, or its weights were loaded again"):
        call.record.check("layer 7")
    for record in (call.record, after.record):
        record.check("nothing is left")
    assert core.captured_failures() == 0


def test_a_mapped_file_that_changes(tmp_path):
    experts = random_experts(np.random.default_rng(3), EXPERTS, HIDDEN, HIDDEN)
    arenas = arenas_of(tmp_path, experts)
    (file,) = (path for path in tmp_path.iterdir() if path.is_file())
    with MoELayer(experts, arenas=arenas) as layer:
        call = Replayed(layer)
        assert same_bits(call.run(), call.expected())
        os.utime(file, ns=(1, 1))
        assert (call.run().view(np.uint16) == NAN).all()
        with pytest.raises(CacheError, match=f"layer 7: .*{file.name} was changed"):
            call.record.check("layer 7")


def test_a_failure_that_nobody_asks_for_goes_with_its_call():
    layer = MoELayer(random_experts(np.random.default_rng(4), EXPERTS, HIDDEN, HIDDEN))
    call = Replayed(layer)
    layer.close()
    call.run()
    assert core.captured_failures() == 1

    def child():
        nonlocal call
        del call
        return core.captured_failures()

    assert in_child(child) == 0
    del call
    assert core.captured_failures() == 0


# The queue


def test_many_streams(layers):
    """Each waits for its own calls, which other threads' do not disturb."""
    calls = [Replayed(layers[seed % 2], seed, tokens=1 + seed % 3, urgent=seed % 3 or None) for seed in range(8)]
    expected = [
        call.expected(call.ids if call.late is None else split(call.ids, call.weights, n % 3, call.on_gpu)[0])
        for n, call in enumerate(calls)
    ]

    def stream(turn):
        for _ in range(40):
            calls[turn].y[...] = 0
            core.submit_captured(calls[turn].record.address)
            core.await_captured(calls[turn].record.address)
            assert same_bits(calls[turn].y, expected[turn])

    core.start_captured_calls()
    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(stream, range(len(calls))))


def test_calls_run_in_order(layers):
    """The last one's y is the first one's x, through all of them: nothing waits in between."""
    calls = [Replayed(layers[turn % 2], turn) for turn in range(12)]
    expected = calls[0].x
    for turn, call in enumerate(calls):
        if turn:
            call.record = core.CallRecord(
                call.layer.packed,
                calls[turn - 1].y.view(np.uint16),
                call.ids,
                call.weights,
                call.y.view(np.uint16),
                call.mask.view(np.uint8),
                call.on_gpu.view(np.uint8),
                None,
                None,
                None,
                call.scratch,
            )
        expected = call.layer.forward(expected, call.ids, call.weights)
    core.start_captured_calls()
    for _ in range(5):
        for call in calls:
            call.y[...] = 0
        for call in calls:
            core.submit_captured(call.record.address)
        core.await_captured(calls[-1].record.address)
        assert same_bits(calls[-1].y, expected)


def test_a_call_that_is_overtaken(layers):
    """Submitted again before anybody waited."""
    call = Replayed(layers[0], urgent=1)
    core.start_captured_calls()
    for _ in range(50):
        for _ in range(3):
            core.submit_captured(call.record.address)
        core.await_captured(call.record.address)
    now, _ = split(call.ids, call.weights, 1, call.on_gpu)
    assert same_bits(call.run(), call.expected(now))


def test_no_part_needs_the_gil(layers):
    """Functions of PYFUNCTYPE are called with the GIL held, and here nobody ever lets it go."""
    submit, wait = (ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(at) for at in (core.submit_function, core.await_function))
    call = Replayed(layers[0])
    expected = call.expected()
    core.start_captured_calls()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        for _ in range(20):
            submit(call.record.address)
            wait(call.record.address)
    finally:
        sys.setswitchinterval(interval)
    assert same_bits(call.y, expected)


def test_a_call_that_is_dropped_is_waited_for(layers):
    core.start_captured_calls()
    for _ in range(20):
        call = Replayed(layers[0], urgent=0)
        core.submit_captured(call.record.address)
        del call  # its memory, too: what runs must have ended
    assert core.captured_failures() == 0


def test_a_graph_mark():
    """It knows whether its graph is gone; either of the two may go first."""
    drop = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(core.drop_function)
    mark = core.GraphMark()
    address = mark.hold()
    assert not mark.dropped
    drop(address)
    assert mark.dropped
    other = core.GraphMark()
    address = other.hold()
    del other
    drop(address)


def test_weights_are_exchanged_between_calls(layers):
    """A call has an expert's old weights or its new ones, whole."""
    rng = np.random.default_rng(5)
    experts = random_experts(rng, EXPERTS, HIDDEN, HIDDEN)
    with MoELayer(experts) as layer:
        call = Replayed(layer)
        call.ids[...] = np.arange(TOP_K)
        given = [{p: experts.matrix(e, p) for p in ("gate", "up", "down")} for e in (0, TOP_K)]
        seen = []
        for matrices in given:
            layer.replace_expert(0, matrices)
            seen.append(call.expected())
        assert not same_bits(*seen)
        stop = threading.Event()

        def exchange():
            turn = 0
            while not stop.is_set():
                layer.replace_expert(0, given[turn % 2])
                turn += 1

        thread = threading.Thread(target=exchange)
        thread.start()
        try:
            for _ in range(100):
                y = call.run()
                assert same_bits(y, seen[0]) or same_bits(y, seen[1])
        finally:
            stop.set()
            thread.join()


# Fork and exit


def test_a_forked_child_starts_its_own(layers):
    call = Replayed(layers[0], urgent=0)
    expected = call.run()
    stop = threading.Event()

    def replay():
        while not stop.is_set():
            core.submit_captured(call.record.address)
            core.await_captured(call.record.address)

    def child():
        own = Replayed(layers[0])
        right = same_bits(own.run(), own.expected())
        core.close_captured_calls()  # which waits for nobody of the parent's
        return right

    set_num_threads(2)
    thread = threading.Thread(target=replay)
    thread.start()
    try:
        assert all(in_child(child) for _ in range(5))
    finally:
        stop.set()
        thread.join()
    assert same_bits(call.run(), expected)


def test_signals_are_the_interpreters(layers):
    """Its thread leaves them to others, but for those of its own instructions."""

    def child():
        before = set(os.listdir("/proc/self/task"))
        set_num_threads(1)  # so that its thread is the only one
        Replayed(layers[0]).run()
        (own,) = set(os.listdir("/proc/self/task")) - before
        lines = Path(f"/proc/self/task/{own}/status").read_text().splitlines()
        blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
        return [bool(blocked >> number - 1 & 1) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGSEGV)]

    assert in_child(child) == [True, True, True, False]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_the_thread_runs_on_all_cpus(layers):
    """Of the process, wherever the thread that captures first is kept."""

    def child():
        def first():
            os.sched_setaffinity(0, {min(everywhere)})
            Replayed(layers[0]).run()

        everywhere, before = os.sched_getaffinity(0), set(os.listdir("/proc/self/task"))
        set_num_threads(1)
        thread = threading.Thread(target=first)
        thread.start()
        thread.join()
        own = set(os.listdir("/proc/self/task")) - before - {str(thread.native_id)}
        return [os.sched_getaffinity(int(task)) == everywhere for task in own]

    assert in_child(child) == [True]


EXIT = """
import atexit, threading
import numpy as np
from ktmoe._native import core
from test_captured_calls import Replayed
from helpers import random_experts
from ktmoe import MoELayer
from kt_wrappers import EXPERTS, HIDDEN

layer = MoELayer(random_experts(np.random.default_rng(0), EXPERTS, HIDDEN, HIDDEN))
calls = [Replayed(layer, urgent=0) for _ in range(4)]
atexit.register(core.close_captured_calls)
core.start_captured_calls()

def replay(call):
    while True:
        core.submit_captured(call.record.address)
        core.await_captured(call.record.address)

for call in calls:
    threading.Thread(target=replay, args=(call,), daemon=True).start()
calls[0].run()
print("end")
"""


def test_the_end_of_the_interpreter():
    """Calls are under way in four threads; then the process ends, and well."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT], cwd=os.path.dirname(__file__), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_nothing_runs_after_the_end(layers):
    def child():
        call = Replayed(layers[0])
        ran = call.run().any()
        for _ in range(2):
            core.close_captured_calls()
        call.y[...] = 0
        for address in (call.record.address, 0):  # no record is touched any more, not even one that is gone
            core.submit_captured(address)
            core.await_captured(address)
        try:
            core.start_captured_calls()
        except UnavailableError as error:
            return bool(ran), bool(call.y.any()), str(error)

    assert in_child(child) == (True, False, "the thread for CUDA graphs cannot be started: Operation canceled")
