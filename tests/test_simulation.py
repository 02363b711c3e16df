"""bench/simulation: what the clock, the memory and a whole call must do, whatever the costs are; and what the page shows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from bench.document import markdown
from bench.models import models
from bench.results_file import ResultsError
from bench.simulation import call, costs, document, files, grid, memory
from bench.simulation.assumptions import Machine
from bench.simulation.costs import Costs, Kernel
from bench.simulation.events import Clock, Gate, Work
from ktmoe import measuring
from ktmoe._native import core

MODEL = replace(models()["V4-Flash"], name="small", hidden=512, intermediate=1024, experts=16, top_k=4)
KERNEL = Kernel("MXFP4", "avx2", "avx2", "bf16", 100.0, [1, 192], [0.05, 5.0])
COSTS = Costs("test", None, "", 1, {"1": 20.0}, [{"read_mb": 0.0, "us": 0.0}, {"read_mb": 1.0, "us": 0.0}], 0.0, 0.0, [KERNEL])
#: Memory that nobody waits for, and neither latencies nor anything but items.
IDEAL = Machine(1, 1, 1e15, cores=16, near=0.0, far=0.0, add=0.0)


def ids_of(tokens: int, seed: int = 0) -> np.ndarray:
    return next(measuring.random_batches(tokens, MODEL.top_k, MODEL.experts, 64, seed=seed)).ids


# The clock and the memory


def clock(workers: list, bandwidth: float = 10.0, sharpness: float = 50.0):
    """Runs generators that get the clock."""
    made = Clock(len(workers), 1, bandwidth, sharpness)
    return made.go([worker(made) for worker in workers])


def test_two_workers_by_hand():
    """Each reads 10 bytes in 1 s if it is alone; together 10 bytes a second. The second one computes 1 s before."""

    def reads(_clock):
        yield Work(1.0, 10.0)

    def computes_and_reads(_clock):
        yield Work(1.0)
        yield Work(1.0, 10.0)

    assert clock([reads]).seconds == pytest.approx(1)
    assert clock([reads, reads]).seconds == pytest.approx(2, rel=0.02)
    assert clock([reads, computes_and_reads]).seconds == pytest.approx(2)
    assert clock([reads, reads], bandwidth=1e9).seconds == pytest.approx(1)


def test_a_gate_holds_until_all_have_passed():
    gate = Gate(2, 0.25)

    def passes(seconds):
        def worker(made):
            yield Work(seconds)
            made.pass_gate(gate)

        return worker

    def waits(_clock):
        yield Work(0.5)
        yield gate
        yield Work(1.0)

    run = clock([passes(1.0), passes(3.0), waits])
    assert run.seconds == pytest.approx(4.25)
    assert run.waited.tolist() == pytest.approx([0, 0, 2.5])
    assert run.overhead.tolist() == pytest.approx([0, 0, 0.25])
    assert run.busy.tolist() == pytest.approx([1, 3, 1.5])
    assert run.ended.tolist() == pytest.approx([3.25, 1.25, 0])


def test_a_gate_that_nobody_passes():
    with pytest.raises(RuntimeError, match="nobody passes"):
        clock([lambda _clock: iter([Work(1.0), Gate(1)])])


def test_a_gate_that_is_passed_too_often():
    with pytest.raises(RuntimeError, match="more often"):
        Clock(1, 1, 1.0, 5.0).pass_gate(Gate(1), 2)


@pytest.mark.parametrize(
    ("demands", "bandwidth", "level"),
    [
        ([1, 2, 3], 100, 3 + 94 / 3),  # what is left is for all
        ([1, 2, 3], 6, 3),
        ([1, 2, 3], 5, 2),  # 1 + 2 + 2
        ([1, 2, 3], 3, 1),
        ([1, 4, 4], 6, 2.5),
    ],
)
def test_demands_below_the_level_are_met(demands, bandwidth, level):
    assert memory.level(np.array(demands, float), bandwidth) == pytest.approx(level)


def test_who_reads_alone_takes_as_long_as_measured():
    one = np.array([3.0])
    assert memory.seconds(one, np.array([100.0]), 1.0, 5.0).tolist() == [3.0]
    together = memory.seconds(np.array([3.0, 1e-6]), np.array([100.0, 1e-9]), 1e9, 5.0)
    assert together.tolist() == pytest.approx([3.0, 1e-6])


# Calls


@pytest.mark.parametrize("tokens", [1, 16, 200])
@pytest.mark.parametrize(("nodes", "threads"), [(1, 1), (1, 16), (2, 16), (2, 3)])
def test_every_byte_is_read_once(tokens, nodes, threads):
    """Where arrays stay in caches, and where no range of tokens reads the weights again."""
    ids = ids_of(tokens)
    machine = replace(IDEAL, nodes=nodes, threads=threads, bandwidth=1e11)
    kernel = COSTS.of("MXFP4")
    schedule = call.schedule_of(MODEL, ids, machine, kernel)
    ranges = len(schedule.ranges)
    simulated = call.simulate(MODEL, ids, machine, COSTS)
    assert schedule.chunk == tokens
    if ranges == 1:
        assert simulated.read == pytest.approx(simulated.nbytes)
    else:
        assert simulated.nbytes < simulated.read <= ranges * simulated.nbytes


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_one_worker_takes_the_sum_of_all_items(tokens):
    """And of copying x, where that pays."""
    ids = ids_of(tokens)
    rows = np.bincount(ids.reshape(-1), minlength=MODEL.experts)
    expected = sum(COSTS.of("MXFP4").seconds(int(m), MODEL.expert_bytes) for m in rows if m)
    expected += 3 * call.schedule_of(MODEL, ids, IDEAL, KERNEL).staged_bytes / COSTS.core_read
    simulated = call.simulate(MODEL, ids, IDEAL, COSTS)
    assert simulated.seconds == pytest.approx(expected, rel=1e-6)
    assert simulated.idle == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_shares_are_all_of_the_time(tokens):
    machine = Machine(2, 12, 50e9, cores=16)
    simulated = call.simulate(MODEL, ids_of(tokens), machine, replace(COSTS, route_ns=100.0))
    parts = simulated.busy + simulated.before + simulated.dealing + simulated.gates
    assert parts + simulated.end == pytest.approx(1)
    assert 0 < simulated.busy < 1 > simulated.end >= 0


def test_more_memory_is_never_slower():
    ids = ids_of(16)
    machines = [Machine(2, 16, bandwidth, cores=16) for bandwidth in (10e9, 20e9, 50e9, 200e9, 1e12)]
    seconds = [call.simulate(MODEL, ids, machine, COSTS).seconds for machine in machines]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == pytest.approx(len(np.unique(ids)) * MODEL.expert_bytes / 10e9, rel=0.15)


def test_memory_that_is_endless_leaves_one_worker_s_work_for_all():
    ids = ids_of(64)
    one, sixteen = (call.simulate(MODEL, ids, replace(IDEAL, threads=threads), COSTS) for threads in (1, 16))
    assert sixteen.busy * 16 * sixteen.seconds == pytest.approx(one.seconds, rel=1e-3)
    assert one.seconds / 16 < sixteen.seconds < 1.2 * one.seconds / 16


@pytest.fixture
def pairs():
    """Phase A's items are pairs of gate and up."""
    old = core.tune(halves=1)
    yield
    core.tune(**old)


@pytest.mark.usefixtures("pairs")
def test_where_there_are_fewer_items_than_workers_nobody_takes_two():
    """64 pairs of panels, then 32 panels of down, for 96 workers: each phase takes as long as one item."""
    ids, machine = ids_of(1), replace(IDEAL, threads=96, cores=128)
    schedule = call.schedule_of(MODEL, ids, machine, KERNEL)
    assert (schedule.items(0, 0), schedule.items(0, 1)) == (64, 32)
    assert schedule.rounds_left(0, 0, 0) == schedule.rounds_left(95, 0, 0) == 1
    simulated = call.simulate(MODEL, ids, machine, COSTS)
    assert simulated.seconds == pytest.approx(sum(KERNEL.seconds(1, nbytes) for nbytes in schedule.panel_bytes(0)))
    while schedule.take(0, 0, 0):
        pass
    assert schedule.rounds_left(0, 0, 0) == 0


def test_slow_workers_get_less_to_do():
    ids = ids_of(64)
    even, uneven = (
        call.simulate(MODEL, ids, replace(IDEAL, threads=16, jitter=jitter), COSTS, seed=3) for jitter in (0.0, 0.2)
    )
    assert even.seconds < uneven.seconds < 1.5 * even.seconds


#: Exact in float: a thread sees what one with the same L3 wrote after 1 s, what another one wrote after 8 s.
FAR_APART = Machine(1, 8, 1.0, cores=8, domain_cores=2, near=1.0, far=8.0)


def test_whoever_is_awake_wakes_the_next_group():
    """By hand: the caller wakes its neighbour at 1; these two wake a group each until 9; one of the four wakes the last."""
    teams = FAR_APART.teams
    assert [(first, size) for _, first, size in teams.groups] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    begins = call.begin_times(teams, FAR_APART)
    assert sorted(begins) == [9, 9, 9, 10, 10, 17, 17, 18]
    assert sorted(begins[:2]) == [9, 17]  # the caller's group is awake first
    assert begins[2:] == [9, 10, 9, 10, 17, 18]
    assert call.begin_times(replace(FAR_APART, threads=1).teams, replace(FAR_APART, threads=1)) == [0]


def test_the_caller_shuts_the_doors_in_a_row():
    """Its own door takes 1 s, each other one 8 s; it waits for whoever is still behind one."""
    teams = FAR_APART.teams
    assert call.end_time(teams, FAR_APART, np.full(8, 5.0)) == 5 + 1 + 3 * 8
    assert call.end_time(teams, FAR_APART, np.array([5, 4, 3, 20, 0, 0, 0, 0.0])) == 20 + 3 * 8
    assert call.end_time(teams, FAR_APART, np.array([5, 4, 3, 6, 0, 0, 0, 99.0])) == 99 + 8
    one = replace(FAR_APART, threads=1)
    assert call.end_time(one.teams, one, np.array([5.0])) == 5


@pytest.mark.parametrize("changed", [{"nodes": 3}, {"threads": 0}, {"threads": 17}, {"nodes": 0}])
def test_machines_that_cannot_be(changed):
    with pytest.raises(ValueError, match="expected"):
        replace(IDEAL, **changed)


# Files and the page


def test_costs_between_the_measured_ones():
    assert KERNEL.seconds(1, 1000) == pytest.approx(50e-9)
    assert KERNEL.seconds(192, 1000) == pytest.approx(5e-6)
    assert KERNEL.seconds(96, 1000) == pytest.approx(1e-6 * (0.05 + 4.95 * 95 / 191))
    assert KERNEL.seconds(384, 1000) == pytest.approx(2 * KERNEL.seconds(192, 1000))
    warm = replace(COSTS, before=[{"read_mb": 1.0, "us": 10.0}, {"read_mb": 3.0, "us": 30.0}])
    assert [warm.before_seconds(mb * 1e6) for mb in (0, 1, 2, 9)] == pytest.approx([10e-6, 10e-6, 20e-6, 30e-6])


def test_weights_without_costs():
    with pytest.raises(ValueError, match="test: no costs of BF16 were measured; known are MXFP4"):
        COSTS.of("BF16")


@pytest.mark.parametrize("path", costs.paths(), ids=lambda path: path.stem)
def test_each_cost_file_is_whole(path):
    found = costs.read(path)
    for kernel in found.kernel:
        assert kernel.rows[0] == 1
        assert all(0 < ns < math.inf for ns in kernel.memory_ns)
    assert {kernel.weights for kernel in found.kernel} == {"MXFP4", "BF16"}


def test_a_cost_file_of_unequal_lists(tmp_path):
    path = tmp_path / "x.toml"
    whole = costs.paths()[0]
    path.write_text(whole.read_text().replace("rows = [\n", "rows = [\n    7,\n", 1))
    with pytest.raises(ResultsError, match="expected a cost for each"):
        costs.read(path)


def test_the_page_shows_what_was_measured():
    """python -m bench.simulation document writes the tables."""
    text = document.PAGE.read_text()
    assert document.filled(text, document.measured()) == text


def test_the_page_shows_what_a_simulation_gives(tmp_path, monkeypatch):
    """By a row, which is simulated here; and no page is made without one of the machines."""
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    monkeypatch.setattr(grid, "MACHINES", ((8, 128),))
    about = {"bandwidth_gb_s": grid.BANDWIDTH / 1e9, "jitter": grid.JITTER, "commit": ""}
    for path in costs.paths():
        with pytest.raises(ResultsError, match=f"{path.stem}-simulated.toml: there is no such file; make simulation writes it"):
            document.simulated()
        found = costs.read(path)
        points = [
            point for tokens in grid.TOKENS for point in grid.points("gpt-oss-120b", tokens, found, grid.BANDWIDTH, grid.JITTER)
        ]
        data = {**about, "machine": found.machine, "date": found.date, "point": points}
        files.write(data, files.simulated(path), files.SIMULATED)
    heads, rows = document.calls(document.simulated())
    assert len(rows) == 1
    lines = document.PAGE.read_text().splitlines()
    assert all(line in lines for line in markdown(heads, rows).splitlines())
