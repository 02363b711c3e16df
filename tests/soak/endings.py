"""endings.py FOLDER CASES: processes that end, each in its own way, while something goes on in them.

FOLDER: of a checkpoint. CASES: a JSON list of {"doing", "where", "how", "after"}, see below. Prints a line of JSON for each:
whether it hung, its exit status as subprocess has it, and what it wrote on stdout and stderr. A process is a fork of this one,
which has imported ktmoe and has no threads, and it ends as a Python program does: main() returns in it.

doing: one of DOING, which goes on for ever. where: in the "main" thread, a "thread" or a "daemon" thread; or "queued": it was
submitted and nobody waits. how: one of ENDS, or the name of a signal that it gets. after: seconds, from its first result on.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import itertools
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
from helpers import FORMATS, random_batch, random_experts
from linears import random_matrix, random_x

from ktmoe import Linear, LinearGroup, MoELayer, MoEModel, convert, quantize, set_num_threads
from ktmoe._native import core
from ktmoe.errors import ClosedError, UnavailableError
from ktmoe.training import Training

LONGEST = 60  # seconds that a process may take before it counts as hanging
RNG = np.random.default_rng(1)
EXPERTS = random_experts(RNG, 4, 128, 128)
PLAIN = random_experts(RNG, 2, 64, 64, formats=FORMATS["b16"])
BATCH = random_batch(RNG, EXPERTS, 20, 2)
MATRIX, X = random_matrix(RNG, 136, 128), random_x(RNG, 5, 128)
FOLDER = sys.argv[1]


def layer():
    return MoELayer(EXPERTS)


def doing_load():
    while True:
        with MoELayer.from_checkpoint(FOLDER, 0):
            yield


def doing_pack():
    while True:
        layer().close()
        yield


def doing_forward():
    made = layer()
    while True:
        made.forward(*BATCH)
        yield


def doing_submit():
    made, group = layer(), LinearGroup([Linear(MATRIX)])
    while True:
        made.submit(*BATCH).result()
        group.submit(X).result()
        yield


def doing_model():
    while True:
        model = MoEModel.from_checkpoint(FOLDER, wait=False)
        model[1].forward(*_batch(model[1]))
        yield
        model.close()
        yield


def doing_convert():
    for number in itertools.count():
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a thread of convert() may still write
            convert(FOLDER, Path(folder) / str(number), "mxfp4", requantize=True)
        yield


def doing_round():
    while True:
        MoELayer(quantize(PLAIN, "mxfp4")).close()
        yield


def doing_train():
    made = layer()
    training = Training(made)
    while True:
        y, saved = training.forward(*BATCH)
        training.backward(saved, y)
        yield


def doing_replace():
    made = layer()
    matrices = {p: EXPERTS.matrix(1, p) for p in ("gate", "up", "down")}
    while True:
        made.replace_expert(0, matrices)
        made.export_expert(0)
        yield


def doing_threads():
    made = layer()
    for number in itertools.cycle(range(1, 4)):
        set_num_threads(number)
        made.forward(*BATCH)
        yield


def doing_replay():
    record, _ = _record(layer())
    core.start_captured_calls()
    while True:
        core.submit_captured(record.address)
        core.await_captured(record.address)
        yield


DOING = {name.removeprefix("doing_"): function for name, function in list(globals().items()) if name.startswith("doing_")}


def _batch(made):
    return random_batch(np.random.default_rng(2), made, 3, 2)


def _record(made):
    x, ids, weights = BATCH
    masks = np.ones(4, np.uint8), np.zeros(4, np.uint8)
    y = np.zeros_like(x).view(np.uint16)
    scratch = np.zeros(core.CallRecord.scratch_bytes(*ids.shape, made.hidden, 4), np.uint8)
    return core.CallRecord(made.packed, x.view(np.uint16), ids, weights, y, *masks, None, None, None, scratch), made


def queue_submit():
    made = layer()
    return [made.submit(*BATCH) for _ in range(50)]


def queue_replay():
    core.start_captured_calls()
    records = [_record(layer()) for _ in range(5)]
    for _, (record, _) in itertools.product(range(10), records):
        core.submit_captured(record.address)
    return records


def queue_model():
    return MoEModel.from_checkpoint(FOLDER, wait=False, progress=lambda *_: time.sleep(0.002))


class Cycle:
    """Layers that a cycle with a generator in its middle keeps, and a finalizer that uses them."""

    def __init__(self, made):
        self.made, self.self = made, self
        self.generator = self.rows()
        next(self.generator)

    def rows(self):
        try:
            yield self.made.forward(*BATCH)
        finally:
            with suppress(ClosedError):  # the finalizer may have come first
                self.made.forward(*BATCH)

    def __del__(self):
        self.made.forward(*BATCH)
        self.made.close()


def queue_cycle():
    gc.disable()
    return [Cycle(layer()) for _ in range(3)]


QUEUED = {name.removeprefix("queue_"): function for name, function in list(globals().items()) if name.startswith("queue_")}


def end_return():
    """main() returns."""


def end_exit():
    sys.exit(3)


def end_at_once():
    os._exit(4)


def end_raise():
    raise ZeroDivisionError("on purpose")


def end_exit_in_a_thread():
    """Which ends the thread alone."""
    thread = threading.Thread(target=sys.exit, args=(5,))
    thread.start()
    thread.join()


def end_atexit():
    """What is registered runs when threads can be started no more."""
    made = layer()
    y = made.forward(*BATCH)

    def late():
        assert made.forward(*BATCH).tobytes() == y.tobytes()
        for start in (lambda: made.submit(*BATCH), lambda: MoEModel.from_checkpoint(FOLDER), lambda: MoELayer(PLAIN)):
            with suppress(UnavailableError, ClosedError):
                start()
        made.export_expert(0)
        made.close()
        print("late", flush=True)

    atexit.register(late)


ENDS = {name.removeprefix("end_"): function for name, function in list(globals().items()) if name.startswith("end_")}


def child(case, ready):
    """The process's own main(). What it does may be refused once the interpreter ends, and in no other way."""

    def report(so_far=[]):  # noqa: B006  what was reported
        if not so_far:
            so_far.append(os.write(ready, b"x"))

    def go_on():
        try:
            for _ in DOING[case["doing"]]():
                report()
                if over.is_set():
                    return
        except (UnavailableError, ClosedError):
            if not ending.is_set():
                raise

    over, ending = threading.Event(), threading.Event()
    warnings.simplefilter("ignore")  # of more threads than CPUs
    set_num_threads(2)
    try:
        if case["where"] == "queued":
            child.kept = QUEUED[case["doing"]]()  # for the interpreter to find when it ends
            report()
        elif case["where"] == "main":
            go_on()
        else:
            threading.Thread(target=go_on, daemon=case["where"] == "daemon").start()
            select.select([case["begun"]], [], [], LONGEST)
        time.sleep(case["after"])
        while case["how"] not in ENDS:
            time.sleep(0.01)  # a longer one may begin just behind a signal, which then waits for its end
    finally:
        ending.set()
        if case["where"] == "thread":
            over.set()  # Python waits for it
    ENDS[case["how"]]()


def outcome(pid, begun, case):
    """Wait for it, send it its signal, and say how it ended."""
    with open(os.pidfd_open(pid)) as end:
        begun_at = time.monotonic()
        select.select([begun, end], [], [], LONGEST)
        if case["how"] not in ENDS:
            time.sleep(case["after"])
            os.kill(pid, getattr(signal, case["how"]))
        hung = not select.select([end], [], [], max(0, begun_at + LONGEST - time.monotonic()))[0]
        if hung:
            os.kill(pid, signal.SIGABRT)  # faulthandler says where it is
    return "hung" if hung else None, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main():
    gc.freeze()  # else each process copies all pages that have objects when it looks for garbage
    for case in json.loads(sys.argv[2]):
        begun, ready = os.pipe()
        with tempfile.TemporaryFile() as said:
            pid = os.fork()
            if not pid:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                faulthandler.enable()
                return child(case | {"begun": begun}, ready)
            hung, status = outcome(pid, begun, case)
            said.seek(0)
            print(json.dumps([hung, status, said.read().decode()]), flush=True)
        os.close(begun)
        os.close(ready)
    return None


if __name__ == "__main__":
    main()
