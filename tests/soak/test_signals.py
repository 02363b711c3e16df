"""Signals while everything goes on: no call is broken off by one, and each result is what it is without."""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import pytest
from changing import Crowd
from crowded_layers import KINDS, Dense, Experts, Files, others
from helpers import random_batch
from watched import in_watched_child

from ktmoe import set_num_threads

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def world_of(number, folder):
    chosen = random.Random(number)
    set_num_threads(chosen.randint(1, 3))
    worlds = [Experts(number, chosen.choice(KINDS)), Dense(number, chosen.choice(KINDS))]
    calls = [call for world in worlds for call in world.calls()] + [worlds[0].captured()] + others(number)
    return worlds, calls + Files(folder, chosen.choice(Files.SCHEMES)).calls()


def with_a_timer(number, folder, passes):
    """All calls in turn in the first thread, a signal each millisecond, whose handler calls a layer, too. What was wrong."""
    worlds, calls = world_of(number, folder)
    layer = worlds[0].layer
    batch = random_batch(worlds[0].rng, layer, 2, 2)
    y, seen, wrong = layer.forward(*batch).tobytes(), [], []

    def handle(number, frame):
        seen.append(number)
        if len(seen) % 8 == 0 and layer.forward(*batch).tobytes() != y:
            wrong.append("forward in a handler")

    for each in (signal.SIGALRM, signal.SIGVTALRM):
        signal.signal(each, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0013, 0.0013)
    try:
        for _ in range(passes):
            wrong += [said for said in (call.check() for call in calls) if said]
    finally:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL):
            signal.setitimer(timer, 0)
    return wrong, len(seen), passes * len(calls)


def test_a_timer_that_never_rests(repeat, tmp_path):
    passes = 20 if repeat.how == "soak" else 2
    for number in repeat("processes that get two signals a millisecond", 60):
        folder = tmp_path / str(number)
        folder.mkdir()
        wrong, signals, calls = in_watched_child(lambda number=number, folder=folder: with_a_timer(number, folder, passes))
        assert not wrong, f"round {number}: {wrong[:5]}"
        assert signals > 5
        repeat.most("signals", signals)
        repeat.most("calls", calls)


def stopped_and_continued(number, folder):
    """Another process stops this one and lets it go on, again and again, while threads call and change."""
    worlds, calls = world_of(number, folder)
    chosen, parent = random.Random(number), os.getpid()
    sys.setswitchinterval(1e-4)
    child = os.fork()
    if not child:
        for _ in range(20):
            time.sleep(chosen.uniform(0, 0.01))
            os.kill(parent, signal.SIGSTOP)
            time.sleep(chosen.uniform(0, 0.005))
            os.kill(parent, signal.SIGCONT)
        os._exit(0)
    crowd = Crowd()
    crowd.run(
        [crowd.caller(calls[1:], 25, seed) for seed in range(3)], [turn.change for world in worlds for turn in world.turns]
    )
    return crowd.wrong, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_stopped_and_continued(repeat, tmp_path):
    for number in repeat("processes that are stopped and continued 20 times", 60):
        folder = tmp_path / str(number)
        folder.mkdir()
        wrong, status = in_watched_child(lambda number=number, folder=folder: stopped_and_continued(number, folder))
        assert (wrong[:5], status) == ([], 0), f"round {number}"
