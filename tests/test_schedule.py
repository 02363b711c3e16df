"""What is in the driver's lists, and who gets it, for machines and batches that are made up."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktmoe import MXFP4, SILU, ExpertWeights
from ktmoe._native import core
from ktmoe.backends.base import Plan
from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS
from ktmoe.machine import numa

A, B = 0, 1
PANEL, TILE_ROWS, SPLIT_ROWS, PANEL_ROWS, RUNS_LEFT = 64, 16, 64, 8, 4
DEFAULTS = core.tune()
TOGETHER = 8  # panels of y that one worker adds up at once, at most


def weightless(num_experts, hidden, intermediate):
    def read(expert, projection):
        raise AssertionError("a schedule reads no weights")

    return ExpertWeights(num_experts, hidden, intermediate, read, dict.fromkeys(PROJECTIONS, MXFP4), SILU)


def scheduled(domains, threads, sizes, ids, **tuning):
    """domains, threads: as core.Teams takes them. sizes: experts, hidden, intermediate."""
    core.tune(**(DEFAULTS | tuning))
    experts = weightless(*sizes)
    columns = numa.split(experts.intermediate, experts.shard_unit, len(domains))
    return core.Schedule(core.kernel_table("portable"), experts, Plan(), columns, core.Teams(domains, threads), ids)


def random_ids(rng, tokens, top_k, num_experts, kind):
    """Ids of any expert, of few, or of one; or many of none."""
    most = {"any": num_experts, "few": min(3, num_experts), "one": 1, "skipped": num_experts}[kind]
    ids = rng.integers(0, most, (tokens, top_k))
    if kind == "skipped":
        ids[rng.random(ids.shape) < 0.9] = -1
        ids[: tokens // 2] = num_experts
        ids[[0, -1], 0] = 0
    return ids


#: A busy machine makes no test fail, and two runs have the same examples.
alike = settings(deadline=None, derandomize=True)
machines = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), min_size=1, max_size=8)
tunings = st.fixed_dictionaries(
    {},
    optional={
        "reduce_slots": st.sampled_from([0, 1, 20, 10**9]),
        "ranges": st.sampled_from([1, 2, 3, 8, 1000]),
        "halves": st.sampled_from([1, 2]),
        "uneven": st.integers(1, 2**32 - 1),
        "scratch_bytes": st.sampled_from([1, 1 << 20, 8 << 20]),
    },
)


@st.composite
def schedules(draw):
    """A schedule with the lists of one of its chunks, what it was made of, and a generator."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    domains, threads = draw(machines), draw(st.sampled_from([1, 2, 3, 4, 7, 16, 40, 128, 256]))
    sizes = draw(st.sampled_from([1, 5, 40])), PANEL * draw(st.integers(1, 9)), PANEL * draw(st.integers(4, 12))
    tokens, top_k = draw(st.sampled_from([1, 2, 3, 7, 16, 64, 65, 200, 700])), draw(st.sampled_from([1, 2, 8]))
    ids = random_ids(rng, tokens, top_k, sizes[0], draw(st.sampled_from(["any", "few", "one", "skipped"])))
    tuning = draw(tunings)
    s = scheduled(domains, threads, sizes, ids, **tuning)
    of_chunk = [ids[first : first + s.chunk] for first in range(0, tokens, s.chunk)]
    number = draw(st.integers(0, len(of_chunk) - 1))
    while not ((of_chunk[number] >= 0) & (of_chunk[number] < sizes[0])).any():  # of which there is no schedule
        number = (number + 1) % len(of_chunk)
    s.fill(number * s.chunk)
    return s, core.Teams(domains, threads), sizes, of_chunk[number], tuning, rng


def rows_of(ids, num_experts):
    """Rows of each expert."""
    return np.bincount(ids[(ids >= 0) & (ids < num_experts)], minlength=num_experts)


def costs_of(s, shard, phase):
    """The cost of each item, in rows of one panel."""
    if phase == B and s.by_panel:
        rows = np.split(s.pieces[:, 1], np.cumsum([pieces for _, _, pieces in s.ranges])[:-1])
        of_strip = [1 + len(own) * PANEL_ROWS + own.sum() for own in rows]
    else:
        of_strip = s.strips[:, 1] + PANEL_ROWS
    return np.repeat(of_strip, s.per_strip(shard, phase))


def serving(teams, shard):
    first, size, _, _ = teams.of[shard]
    return range(first, first + size)


@alike
@given(schedules())
def test_pieces_are_the_rows_of_each_expert_in_each_range(made):
    s, _, (num_experts, _, _), ids, tuning, _ = made
    assert s.tokens == len(ids)
    tokens = [count for count, _, _ in s.ranges]
    assert sum(tokens) == len(ids)
    assert max(tokens) - min(tokens) <= 1
    assert min(tokens) >= 1
    at, first_piece = 0, 0
    for count, first, pieces in s.ranges:
        assert first == first_piece
        rows = rows_of(ids[at : at + count], num_experts)
        assert s.pieces[first : first + pieces].tolist() == [[e, rows[e]] for e in range(num_experts) if rows[e]]
        at, first_piece = at + count, first + pieces
    assert first_piece == len(s.pieces)
    assert s.slots == rows_of(ids, num_experts).sum()
    if not s.by_panel:
        assert len(tokens) == 1
    elif "ranges" in tuning and s.tokens == s.chunk:
        assert len(tokens) == min(tuning["ranges"], len(ids))


@alike
@given(schedules())
def test_strips_cover_the_pieces(made):
    """In whole tiles from a piece's first row on, so that the rows of a tile stay together; pieces of most rows first."""
    s, *_ = made
    strips, order = s.strips, []
    firsts = np.cumsum(s.pieces[:, 1]) - s.pieces[:, 1]
    for piece, group in itertools.groupby(zip(strips.tolist(), s.strip_slots, strict=True), key=lambda strip: strip[0][0]):
        order.append(piece)
        at = firsts[piece]
        *whole, last = [(rows, first) for (_, rows), first in group]
        for rows, first in [*whole, last]:
            assert first == at
            at += rows
        assert all(rows % TILE_ROWS == 0 and rows > SPLIT_ROWS // 2 for rows, _ in whole)
        assert 0 < last[0] <= min([rows for rows, _ in whole] or [last[0]])
        assert at == firsts[piece] + s.pieces[piece, 1]
    assert sorted(order) == list(range(len(s.pieces)))
    assert (np.diff(s.pieces[order, 1]) <= 0).all()
    assert len(strips) <= len(s.pieces) + s.slots // SPLIT_ROWS  # which is what scratch memory has room for


@alike
@given(schedules())
def test_every_item_is_dealt_once_whoever_comes(made):
    """To any of a team's workers, of whom some may never come, in any order; runs are neighbours."""
    s, teams, _, _, _, rng = made
    for shard, phase in itertools.product(range(teams.shards), (A, B)):
        team = serving(teams, shard)
        there = rng.choice(team, rng.integers(1, len(team), endpoint=True), replace=False).tolist()
        dealt = np.zeros(s.items(shard, phase), int)
        while there:
            worker = there[rng.integers(len(there))]
            for _ in range(rng.integers(1, 4)):
                run = s.take(worker, shard, phase)
                if run is None:
                    there.remove(worker)
                    break
                first, end = run
                assert first < end
                dealt[first:end] += 1
        assert (dealt == 1).all()
        assert all(s.take(worker, shard, phase) is None for worker in team)


@alike
@given(schedules())
def test_runs_are_shares_of_what_is_left(made):
    """But for tests' uneven ones: so that a team's workers end together. A run has its last item whole."""
    s, teams, _, _, tuning, _ = made
    for shard, phase in itertools.product(range(teams.shards), (A, B)):
        costs, team = costs_of(s, shard, phase), serving(teams, shard)
        before = np.concatenate([[0], costs.cumsum()])
        while not tuning.get("uneven") and (run := s.take(team[0], shard, phase)):
            first, end = run
            left = before[-1] - before[first]  # three quarters at least of what its round began with
            share = left / ((RUNS_LEFT - 1) * len(team))
            assert before[end] - before[first] <= max(share, costs.max()) + costs.max()


@alike
@given(schedules())
def test_items_that_are_computed_together(made):
    """Neighbours of a strip; gate and up of one panel where these are two items, and never other two."""
    s, teams, *_ = made
    for shard, phase in itertools.product(range(teams.shards), (A, B)):
        per_strip, pairs = s.per_strip(shard, phase), phase == A and s.halves(shard)
        most = (TOGETHER if s.by_panel else 2) if phase == B else 1 + pairs
        while run := s.take(serving(teams, shard)[0], shard, phase):
            first, end = run
            while first < end:
                count = s.together(shard, phase, first, end)
                assert 1 <= count <= min(most, end - first, per_strip - first % per_strip)
                if pairs:
                    assert count == (2 if first % 2 == 0 and first + 1 < end else 1)
                first += count


@alike
@given(schedules())
def test_items_and_what_is_forced(made):
    s, teams, (_, hidden, intermediate), _, tuning, _ = made
    for shard in range(teams.shards):
        columns = numa.split(intermediate, 32, teams.shards)[shard]
        panels = -(-(columns[1] - columns[0]) // PANEL)
        assert s.per_strip(shard, A) == panels * (1 + s.halves(shard))
        assert s.per_strip(shard, B) == hidden // PANEL
        assert s.items(shard, A) == len(s.strips) * s.per_strip(shard, A)
        assert s.items(shard, B) == (len(s.ranges) if s.by_panel else len(s.strips)) * s.per_strip(shard, B)
        if s.by_panel or tuning.get("halves") == 1:
            assert not s.halves(shard)
        elif tuning.get("halves") == 2 and s.slots <= 8:
            assert s.halves(shard)
    if "reduce_slots" in tuning and tuning["reduce_slots"] in (0, 10**9):
        assert s.by_panel == (tuning["reduce_slots"] == 0)


def test_neighbours_in_memory_go_to_one_cache():
    """In each round, what a group gets is one part of the list."""
    domains, threads = [[8, 8, 8, 8], [8, 8]], 48
    for tokens in (16, 512):
        ids = random_ids(np.random.default_rng(1), tokens, 6, 128, "any")
        s, teams = scheduled(domains, threads, (128, 2048, 2048), ids), core.Teams(domains, threads)
        for shard, phase in itertools.product((0, 1), (A, B)):
            ends = []
            for of, first, size in teams.groups:
                if of == shard:
                    runs = sorted(s.take(worker, shard, phase) for worker in range(first, first + size))
                    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(runs))
                    ends.append((runs[0][0], runs[-1][1]))
            assert [end for _, end in ends[:-1]] == [begin for begin, _ in ends[1:]]


def test_a_worker_whose_group_has_no_more_takes_from_others():
    domains, threads = [[8, 8]], 16
    s = scheduled(domains, threads, (8, 512, 512), np.arange(8).reshape(4, 2))
    runs = list(iter(lambda: s.take(9, 0, A), None))
    assert sum(end - first for first, end in runs) == s.items(0, A)
    own = [first for first, _ in runs].index(min(first for first, _ in runs))  # the first run of all is of group 0
    assert own > 0


@pytest.mark.parametrize("ask", ["take", "rounds_left"])
def test_only_a_worker_of_the_team_is_asked_for(ask):
    """Two workers for three shards: the first one serves the first and the last."""
    s = scheduled([[1], [1], [1]], 2, (8, 512, 512), np.arange(8).reshape(4, 2))
    for worker, shard in ((0, 0), (0, 2), (1, 1)):
        assert getattr(s, ask)(worker, shard, B)
    for worker, shard, message in (
        (0, 1, "worker 0 does not serve shard 1"),
        (1, 2, "worker 1 does not serve shard 2"),
        (2, 0, "worker: expected 0 to 1, found 2"),
        (0, 3, "expected a shard and phase 0 or 1, found 3 and 1"),
    ):
        with pytest.raises(InputError, match=message):
            getattr(s, ask)(worker, shard, B)


def test_one_token_keeps_threads_busy_by_halves():
    """Where they end sooner by that, and only there: 96 pairs are 2 rounds for 64 threads, 192 halves are 3 of half a pair."""
    ids = np.arange(6)[None]
    for threads, halves in ((2, False), (16, False), (64, True), (128, False), (256, True)):
        s = scheduled([[threads]], threads, (8, 4096, 1024), ids)
        assert (s.halves(0), s.items(0, A)) == (halves, 6 * 16 * (1 + halves))


def test_token_ranges_where_panels_are_too_few_for_the_threads():
    ids = random_ids(np.random.default_rng(2), 4096, 6, 64, "any")
    for threads in (1, 2, 16, 64, 128):
        s = scheduled([[threads]], threads, (64, 2048, 512), ids)
        assert s.by_panel
        assert s.items(0, B) >= threads
        assert (len(s.ranges) > 1) == (s.per_strip(0, B) % threads != 0)


def test_one_experts_rows_are_split_for_many_threads():
    ids = np.zeros((512, 1), int)
    for threads, strips in ((1, 1), (8, 1), (128, 8)):
        assert len(scheduled([[threads]], threads, (4, 2048, 2048), ids).strips) == strips


def test_a_short_last_chunk_has_no_empty_ranges():
    ids = random_ids(np.random.default_rng(3), 1001, 8, 40, "any")
    forced = {"reduce_slots": 0, "ranges": 10**6, "scratch_bytes": 2 << 20}
    s = scheduled([[2]], 2, (40, 256, 256), ids, **forced)
    last = len(ids) % s.chunk
    assert 0 < last < s.chunk < len(ids)
    assert [tokens for tokens, _, _ in s.ranges] == [1] * s.chunk
    s.fill(len(ids) - last)
    assert [tokens for tokens, _, _ in s.ranges] == [1] * last


def test_the_last_round_deals_all_that_is_left():
    """Of a list that tests' uneven rounds hardly begin: 63 of them deal no item or one."""
    hardly = 610  # times the multiplier of uneven(), and that times 1 to 64, has no high bits
    for threads in (1, 3, 16):
        s = scheduled(
            [[threads]], threads, (40, 512, 512), random_ids(np.random.default_rng(4), 30, 8, 40, "any"), uneven=hardly
        )
        runs = sorted(iter(lambda s=s: s.take(0, 0, A), None))
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(runs))
        assert (runs[0][0], runs[-1][1]) == (0, s.items(0, A))
        assert max(end - first for first, end in runs) > s.items(0, A) // (2 * threads)
