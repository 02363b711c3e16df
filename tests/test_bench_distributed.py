"""bench/distributed without processes: formulas of bytes against counted ones, and a measurement of ranks that are threads."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from distributed_layers import EXPERTS, HIDDEN, TOP_K, batch_of, made
from ranks import Threads, raised

from bench.distributed import session, traffic
from bench.distributed.recorder import Recorder
from bench.distributed.worker import Rank, ends
from bench.models import Model
from bench.peers.processes import WorkerError
from ktmoe.distributed import DistributedLayer, Distribution, Division

COPIES = {0: [1], 1: [1], 14: [0]}
TINY = Model("tiny", "MXFP4", hidden=64, intermediate=64, experts=16, top_k=4)


def counted(batch, size, **options) -> tuple[Division, list[np.ndarray], Threads]:
    """What ranks send each other in a call, round by round."""
    x, ids, weights = batch
    at, group = ends(len(x), size), Threads(size)
    experts = made()

    def on(communicator):
        recorder = Recorder(communicator)
        layer = DistributedLayer(experts, Distribution(recorder, **options))
        own = slice(*at[communicator.rank :][:2]) if options["tokens"] == "own" else slice(None)
        layer.forward(x[own], ids[own], weights[own])
        return layer.division, recorder.sent

    results = group.run(on)
    assert not any(raised(results)), raised(results)
    return results[0][0], list(np.array([sent for _, sent in results]).swapaxes(0, 1)), group


def between(rounds) -> np.ndarray:
    """Without what ranks give themselves."""
    return np.array(rounds) * ~np.eye(len(rounds[0]), dtype=bool)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "options", [{}, {"gathered": 0}, {"gathered": 4, "cut": 2}, {"cut": 8}, {"replicas": {None: COPIES}}], ids=str
)
def test_formulas_are_what_is_sent(size, options):
    """Round by round, between each two ranks, with both kinds of tokens."""
    for tokens in ("same", "own"):
        for count in (1, 3, 24):
            batch = batch_of(made(), count * (size if tokens == "own" else 1))
            division, sent, group = counted(batch, size, tokens=tokens, **options)
            ids = np.where((batch[1] >= 0) & (batch[1] < EXPERTS), batch[1], EXPERTS).astype(int)
            gathered = options.get("gathered", 1)
            if tokens == "same":
                rounds = traffic.same_tokens(division, ids, HIDDEN, gathered)
            else:
                own = [ids[first:][:count] for first in ends(len(ids), size)[:-1]]
                rounds = traffic.own_tokens(division, own, HIDDEN, gathered)
            assert len(rounds) == group.calls
            np.testing.assert_array_equal(between(rounds), between(sent), str((tokens, count)))
            np.testing.assert_array_equal(between(rounds).sum(axis=0), between([group.sent])[0])


def test_formulas_of_more_tokens_than_one_round_has():
    batch = batch_of(made(), 1100)
    ids = np.where((batch[1] >= 0) & (batch[1] < EXPERTS), batch[1], EXPERTS).astype(int)
    division, sent, _ = counted(batch, 2, tokens="same")
    np.testing.assert_array_equal(between(traffic.same_tokens(division, ids, HIDDEN)), between(sent))
    assert len(sent) == 3 * 3
    division, sent, _ = counted(batch, 2, tokens="own")
    np.testing.assert_array_equal(between(traffic.own_tokens(division, [ids[:550], ids[550:]], HIDDEN)), between(sent))


def test_ranks_with_no_tokens_left_send_headers():
    division = Division(EXPERTS, 8, 1, 2, {})
    ids = np.zeros((600, TOP_K), int)
    rounds = traffic.own_tokens(division, [ids[:3], ids], HIDDEN)
    assert len(rounds) == 3 + 3
    assert rounds[4][0, 1] == 0 < rounds[4][1, 0] == 88 * (2 * HIDDEN + 8 * TOP_K + 8)


def test_a_recorder_gives_what_was_given_and_asks_nobody():
    batch, group = batch_of(made(), 9), Threads(2)

    def on(communicator):
        recorder = Recorder(communicator)
        layer = DistributedLayer(made(), Distribution(recorder))
        recorder.live()
        y = layer.forward(*batch)
        calls = group.calls
        recorder.replay()
        again = layer.forward(*batch)
        assert len(recorder.times) == 2 * 3
        assert sorted(recorder.times) == recorder.times
        return y.tobytes() == again.tobytes(), calls

    results = group.run(on)
    assert not any(raised(results)), raised(results)
    assert all(equal for equal, _ in results)
    assert group.calls == 3 == max(calls for _, calls in results)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A result of ranks that are threads, after a trip through JSON."""

    def run(network, ranks, words, variables, place):
        job = json.loads((place / "job.json").read_text())
        results = Threads(ranks).run(lambda communicator: Rank(job, communicator).run())
        assert not any(raised(results)), raised(results)
        for rank, found in enumerate(results):
            (place / f"rank-{rank}.json").write_text(json.dumps(found))

    monkeypatch.setattr(session, "MODEL", TINY)
    monkeypatch.setattr(session, "SIZES", (64, 1024))
    monkeypatch.setattr(session, "POINTS", [("same", 1, 2), ("same", 5, 1), ("own", 3, 1)])
    monkeypatch.setattr(session.footprints, "wanted_bytes", lambda: 0)
    monkeypatch.setattr(session.environments, "python", lambda environment, progress: "python")
    monkeypatch.setattr(session, "_run", run)
    points = (("same", 1), ("same", 5), ("own", 3))
    networks = [session.Network("loopback", ranks=(1, 2, 4), points=points)]
    return json.loads(json.dumps(session.measure(networks, 2, 2, tmp_path, lambda text: None)))


def test_a_measurement(measured):
    alone, two = measured["groups"]
    assert [len(point["calls"]) for point in two["points"]] == [4, 2, 2]
    assert [point["tokens"] for point in alone["points"]] == ["same", "same"]
    assert {size: len(seconds) for size, seconds in two["exchange"].items()} == {"64": 6, "1024": 6}
    (rounds,) = two["points"][0]["calls"][0]["rounds"]
    assert rounds[0][1] == rounds[1][0] > 4 * TINY.hidden
    assert [len(each) for each in two["points"][1]["calls"][0]["replayed"]] == [8, 8]
    calls = [call for group in (alone, two) for point in group["points"] for call in point["calls"]]
    assert all(sorted(edges) == edges for call in calls for edges in call["edges"] + call["replayed"])
    assert all(call["alone"] > 0 for call in calls)


def test_other_bytes_than_the_formulas_say_are_seen(measured, monkeypatch, tmp_path):
    (tmp_path / "again").mkdir()
    monkeypatch.setattr(traffic, "FLOAT32", 2)
    network = session.Network("loopback", points=(("same", 1),))
    with pytest.raises(WorkerError, match="1 tokens, same: ranks sent other bytes"):
        session.measure([replace(network, ranks=(2,))], 2, 1, tmp_path / "again", lambda text: None)


def test_each_rank_has_as_many_cpus(monkeypatch):
    monkeypatch.setattr(session.os, "sched_getaffinity", lambda pid: {4, 5, 6, 7})
    assert session.cpus_of(2, 2) == [[4, 5], [6, 7]]
    assert session.cpus_of(1, 4) == [[4]]
    assert session.cpus_of(4, 4) == [[4], [5], [6], [7]]
    monkeypatch.setattr(session.os, "sched_getaffinity", lambda pid: {0, 1})
    assert session.cpus_of(4, 4) == [[0], [1], [0], [1]]


#: A rank that fails, and one that would wait for it.
RANKS = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("the moon is not full")
time.sleep(100)
"""


def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)

    def failing(network, ranks, words, variables, place):
        return run(network, ranks, [Path(sys.executable), tmp_path / "ranks.py"], variables, place)

    run = session._run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "_run", failing)
        patch.setattr(session.environments, "python", lambda environment, progress: "python")
        expected = "loopback, 2 ranks: rank-1 ended with status 1: ValueError: the moon is not full"
        with pytest.raises(WorkerError, match=expected):
            session.measure([session.Network("loopback", ranks=(2,))], 2, 1, tmp_path, lambda text: None)
