"""Forks in the middle of everything: a child does whatever its parent can, while the parent's threads go on."""

from __future__ import annotations

import faulthandler
import itertools
import os
import random
import signal
import sys
import threading
import traceback

import pytest
from changing import Crowd
from crowded_layers import KINDS, Dense, Experts, Files, others
from watched import in_watched_child

from ktmoe import set_num_threads

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
CHILDREN, CALLS = 6, 8
SECONDS = 60  # that a child may take before it counts as hanging


def in_the_child(calls, turns, chosen):
    """Changes and calls; what was wrong."""
    for turn in turns:
        turn.change()
    return [said for said in (chosen.choice(calls).check() for _ in range(CALLS)) if said]


def forked(calls, turns, seed):
    """Whether a child did all that, and was not wrong; it says on stderr what was."""
    child = os.fork()
    if child:
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"a child ended with {ended}\n" * bool(ended), end="", file=sys.__stderr__, flush=True)
        return ended == 0
    status = 1
    try:
        # not dump_traceback_later(), whose lock the parent's watchdog has
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, file=sys.__stderr__, chain=True)
        signal.alarm(SECONDS)
        wrong = in_the_child(calls, turns, random.Random(seed))
        status = int(bool(wrong))
        print(*wrong, sep="\n", end="", file=sys.__stderr__, flush=True)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        sys.__stderr__.flush()
    finally:
        os._exit(status)


def in_a_crowd(number, folder):
    """What was wrong in children, in the parent, and how many calls the parent made."""
    chosen = random.Random(number)
    sys.setswitchinterval(chosen.choice((1e-6, 1e-4)))
    set_num_threads(chosen.randint(1, 3))
    worlds = [Experts(number, chosen.choice(KINDS)), Dense(number, chosen.choice(KINDS))]
    calls = [call for world in worlds for call in world.calls()] + others(number)
    calls += Files(folder, chosen.choice(Files.SCHEMES)).calls()
    turns = [turn for world in worlds for turn in world.turns]
    crowd, right, stop = Crowd(), [], threading.Event()

    def fork():
        for child in range(CHILDREN):
            right.append(forked(calls, turns, 1000 * number + child))
        stop.set()

    def call(seed, calls):
        def run():
            for turn in itertools.takewhile(lambda _: not stop.is_set(), itertools.count(seed)):
                crowd.caller(calls, 1, turn)()

        return run

    crowd.run([fork, call(0, calls), call(10**6, calls), call(0, [worlds[0].captured()])], [turn.change for turn in turns])
    return right.count(False), crowd.wrong, crowd.calls


def test_forks_in_a_crowd(repeat, tmp_path):
    for number in repeat(f"processes that fork {CHILDREN} times while seven threads call and change", 100):
        folder = tmp_path / str(number)
        folder.mkdir()
        failed, wrong, calls = in_watched_child(lambda number=number, folder=folder: in_a_crowd(number, folder))
        assert not failed, f"round {number}: {failed} children were wrong; see stderr"
        assert not wrong, f"round {number}: {wrong[:5]}"
        repeat.most("calls of the parent meanwhile", calls)
