"""Everything at once: many threads call, replace, mask, load, round and close, on the same layers. Each result has the exact
bits of a state that there was while it was called. changing.py says which states these are."""

from __future__ import annotations

import itertools
import random
import sys

import pytest
from changing import Call, Crowd, Turn
from crowded_layers import KINDS, Closing, Dense, Experts, Files, others
from watched import in_watched_child

from ktmoe import set_num_threads

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def in_a_crowd(number, folder, count):
    """A round of its own numbers, in which each thread makes so many calls. What was wrong, and how many calls and changes."""
    chosen = random.Random(number)
    sys.setswitchinterval(chosen.choice((1e-6, 1e-4, 5e-3)))
    set_num_threads(chosen.randint(1, 4))
    one, other, dense = chosen.choices(KINDS, k=3)
    worlds = [Experts(number, one), Experts(number + 1, other, tuned_for="prefill"), Dense(number, dense)]
    calls = [call for world in worlds for call in world.calls()] + others(number)
    calls += Files(folder, chosen.choice(Files.SCHEMES)).calls()
    replayed = [world.captured() for world in worlds[:2]]
    crowd = Crowd()
    callers = [crowd.caller(calls, count, seed) for seed in range(4)]
    callers += [crowd.caller([replay], count, 0) for replay in replayed]
    crowd.run(callers, [turn.change for world in worlds for turn in world.turns])
    return crowd.wrong, crowd.calls, crowd.changes


def test_threads_at_once(repeat, tmp_path):
    count = 500 if repeat.how == "soak" else 25
    for number in repeat("rounds of six threads that call and seven that change", 100):
        folder = tmp_path / str(number)
        folder.mkdir()
        wrong, calls, changes = in_watched_child(lambda number=number, folder=folder: in_a_crowd(number, folder, count))
        assert not wrong, f"round {number}: {wrong[:5]}"
        assert changes, f"round {number} changed nothing"
        repeat.most("calls of a round", calls)
        repeat.most("changes of a round", changes)


def while_it_is_closed(number):
    chosen = random.Random(number)
    sys.setswitchinterval(chosen.choice((1e-6, 1e-4)))
    set_num_threads(chosen.randint(1, 3))
    closing, crowd = Closing(number), Crowd()

    def caller(submit):
        def run():
            for turn in itertools.takewhile(lambda turn: turn < 100 or not closing.refused, itertools.count()):
                closing.call(None if turn % 2 else chosen.randrange(len(closing.layers)), submit)

        return run

    crowd.run([caller(submit) for submit in (False, False, True)], [closing.close])
    return crowd.wrong, closing.refused, crowd.changes


def test_closing_while_others_call(repeat):
    refusals = []
    for number in repeat("rounds of three threads that call layers while they are closed", 100):
        wrong, refused, closed = in_watched_child(lambda number=number: while_it_is_closed(number))
        assert not wrong, f"round {number}: {wrong[:5]}"
        assert closed
        refusals.append(refused)
        repeat.most("calls that were refused, of a round", refused)
    assert any(refusals) or len(refusals) < 5  # a caller may be done before the first layer is closed


def test_a_result_of_another_time_is_seen():
    """What these tests rely on: a state is told from one that was there before, and from a mixture."""
    state, said = [0, 0], []
    turns = [Turn(lambda value, i=i: state.__setitem__(i, value)) for i in range(2)]
    call = Call("both", lambda: (said or [tuple(state)]).pop(), *turns)
    assert call.known == {(a, b): (a, b) for a in range(2) for b in range(2)}
    assert call.check() is None
    turns[0].change()
    assert call.check() is None
    said.append((0, 0))
    assert "expected a state of [{1}, {0}], found [(0, 0)]" in call.check()
    said.append("a mixture")
    assert "none that there ever was" in call.check()
    turns[1].begun += 1  # a change is going on
    for value in ((1, 0), (1, 1)):
        said.append(value)
        assert call.check() is None
    said.append((0, 1))
    assert "found [(0, 1)]" in call.check()


def test_what_a_thread_raises_is_seen():
    crowd = Crowd()
    crowd.run([lambda: 1 / 0], [lambda: None])
    assert crowd.wrong == ["ZeroDivisionError('division by zero')"]
