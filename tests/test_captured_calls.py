"""Calls that CUDA graphs replay, without CUDA: these tests call the host functions themselves, as a replay does."""

import ctypes
import itertools
import os
import signal
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

    def __init__(self, layer, seed=0, tokens=TOKENS, urgent=None, earlier=None, x=None):
        self.layer = layer
        self.x, self.ids, self.weights = batch(seed, tokens)
        self.x = self.x if x is None else x
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
        slots = self.scratch[: 3 * tokens * TOP_K * 8].view(np.int64).reshape(3, tokens, TOP_K)
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
    calls = [Replayed(layers[seed % 2], seed, tokens=1 + seed % 3) for seed in range(8)]
    expected = [call.expected() for call in calls]

    def stream(call, y):
        for _ in range(40):
            call.y[...] = 0
            core.submit_captured(call.record.address)
            core.await_captured(call.record.address)
            assert same_bits(call.y, y)

    core.start_captured_calls()
    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(stream, calls, expected))


def test_calls_run_in_order(layers):
    """The last one's y is the first one's x, through all of them: nothing waits in between."""
    calls = [Replayed(layers[0])]
    expected = calls[0].expected()
    for turn in range(1, 12):
        calls.append(Replayed(layers[turn % 2], turn, x=calls[-1].y))
        expected = calls[-1].layer.forward(expected, calls[-1].ids, calls[-1].weights)
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
    calls = [Replayed(layers[0], urgent=1)]
    calls.append(Replayed(layers[1], earlier=calls[0]))
    core.start_captured_calls()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        for _ in range(20):
            for call in calls:
                call.y[...] = 0
                submit(call.record.address)
                wait(call.record.address)
    finally:
        sys.setswitchinterval(interval)
    assert all(call.y.any() for call in calls)


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


def test_weights_are_exchanged_between_calls():
    """A call has an expert's old weights or its new ones, whole."""
    experts = random_experts(np.random.default_rng(5), EXPERTS, HIDDEN, HIDDEN)
    given, seen, stop = [{p: experts.matrix(e, p) for p in ("gate", "up", "down")} for e in (0, TOP_K)], [], threading.Event()

    def exchange():
        for turn in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
            layer.replace_expert(0, given[turn % 2])

    with MoELayer(experts) as layer, ThreadPoolExecutor(1) as pool:
        call = Replayed(layer)
        call.ids[...] = np.arange(TOP_K)
        for matrices in given:
            layer.replace_expert(0, matrices)
            seen.append(call.expected().tobytes())
        assert seen[0] != seen[1]
        exchanged = pool.submit(exchange)
        try:
            assert all(call.run().tobytes() in seen for _ in range(100))
        finally:
            stop.set()
            exchanged.result()


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


def test_where_the_thread_runs(layers):
    """On all CPUs of the process, wherever the thread that captures first is kept. It leaves signals to other threads."""

    def child():
        def first():
            os.sched_setaffinity(0, {min(everywhere)})
            Replayed(layers[0]).run()
            tasks.update(os.listdir("/proc/self/task"))  # here: while a thread ends, the list may lack others

        everywhere, before, tasks = os.sched_getaffinity(0), set(os.listdir("/proc/self/task")), set()
        set_num_threads(1)  # so that it is the only one
        thread = threading.Thread(target=first)
        thread.start()
        thread.join()
        (own,) = tasks - before - {str(thread.native_id)}
        lines = Path(f"/proc/self/task/{own}/status").read_text().splitlines()
        blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
        signals = signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGSEGV  # the last is of its own instructions
        return os.sched_getaffinity(int(own)) == everywhere, [bool(blocked >> number - 1 & 1) for number in signals]

    assert in_child(child) == (True, [True, True, True, False])


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
