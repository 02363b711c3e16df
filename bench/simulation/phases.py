"""What the workers of a team do: the order in which they compute, wait and pass gates, as ktmoe/_native/forward/phase_a.c and
phase_b.c have it. Which items there are, what is in a run and who gets it, core.Schedule says."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from bench.simulation.assumptions import Machine
from bench.simulation.costs import Kernel
from bench.simulation.events import Clock, Gate, Work
from ktmoe._native import core

#: Bytes of a row of a panel: of d and of sums in fp32, of h and x in bfloat16.
_FP32, _BF16 = 256, 128
#: A line that is written is read before, and written back later.
_WRITTEN = 2
#: Arrays that take at most this part of their team's L3 caches stay there.
_PART_OF_L3 = 0.5
#: The experts that a worker walks over at once in phase B by panel, if it does not have to wait.
_WALK = 16

Steps = Iterator[Work | Gate]


class Shard:
    """One team. summed: shards whose sums of a (range, panel) of y are there."""

    def __init__(
        self,
        number: int,
        schedule: core.Schedule,
        teams: core.Teams,
        machine: Machine,
        kernel: Kernel,
        core_read: float,
        clock: Clock,
        summed: dict[tuple[int, int], int],
    ):
        self._number, self._schedule, self._machine, self._kernel = number, schedule, machine, kernel
        self._core_read, self._clock, self._summed = core_read, clock, summed
        self._shards = teams.shards
        _, size, _, self._groups = teams.of[number]
        self._beside = max(1, size // self._groups)  # workers that share an L3
        self._strips, self._pieces, self._ranges = schedule.strips.tolist(), schedule.pieces.tolist(), schedule.ranges
        self._halves = schedule.halves(number)
        self._per_a, self._per_b = schedule.per_strip(number, 0), schedule.per_strip(number, 1)
        self._a_bytes, self._b_bytes = schedule.panel_bytes(number)
        self._gates = [Gate(0, machine.far) for _ in self._pieces]
        for piece, _ in self._strips:
            self._gates[piece].left += self._per_a
        self._met: set[tuple[int, int]] = set()
        self._arrived = [0] * self._per_b
        inter_panels, slots = self._per_a >> self._halves, schedule.slots
        self._h_row, self._x_row = inter_panels * _BF16, self._per_b * _BF16
        self.x_leaves = self._leaves(schedule.tokens * self._x_row)
        self._h_leaves = self._leaves(slots * self._h_row)
        self._d_leaves = self._leaves(slots * self._per_b * _FP32)
        self._sums_leave = self._leaves(schedule.tokens * self._per_b * _FP32)

    def _leaves(self, nbytes: int) -> bool:
        """Whether an array has to be read from memory again."""
        return nbytes > _PART_OF_L3 * self._groups * self._machine.domain_bytes

    def phases(self, worker: int) -> Steps:
        """All that a worker of the team does. With the last items of a run it takes the next one, but for the last round."""
        by_panel, ahead = self._schedule.by_panel, None
        run = yield from self._take(worker, 0)
        while run:
            then, done = None, 0
            for strip, items, last in self._parts(*run, 0):
                left = self._schedule.rounds_left(worker, self._number, 0)
                if last and left != 1:
                    then = yield from self._take(worker, 0)
                    if not then and not by_panel and not ahead:
                        ahead = yield from self._take(worker, 1)
                yield self._a(strip, items)
                done += self._passed(strip, items)
                if last or items.stop % self._per_a == 0:
                    self._clock.pass_gate(self._gates[self._strips[strip][0]], done)
                    done = 0
            run = then or (yield from self._take(worker, 0))
        run = ahead or (yield from self._take(worker, 1))
        while run:
            if by_panel:
                yield from self._y(*run)
                run = yield from self._take(worker, 1)
                continue
            then = None
            for strip, items, last in self._parts(*run, 1):
                if last and self._schedule.rounds_left(worker, self._number, 1) != 1:
                    then = yield from self._take(worker, 1)
                yield from self._d(strip, items)
            run = then or (yield from self._take(worker, 1))

    def _take(self, worker: int, phase: int) -> Generator[Work, None, tuple[int, int] | None]:
        """A run, from the counter of the worker's group; at the end it has looked at those of the others."""
        yield Work(self._machine.near, item=False)
        run = self._schedule.take(worker, self._number, phase)
        if not run:
            yield Work((self._groups - 1) * self._machine.far, item=False)
        return run

    def _parts(self, first: int, end: int, phase: int) -> Iterator[tuple[int, range, bool]]:
        """(strip, items, whether they are the last ones that are computed together) of a run."""
        per_strip = (self._per_a, self._per_b)[phase]
        while first < end:
            strip = first // per_strip
            then = min(end, (strip + 1) * per_strip)
            last = first
            while then == end and (after := last + self._schedule.together(self._number, phase, last, end)) < end:
                last = after
            if then < end:
                yield strip, range(first, then), False
            else:
                if first < last:
                    yield strip, range(first, last), False
                yield strip, range(last, end), True
            first = then

    def _a(self, strip: int, items: range) -> Work:
        rows = self._strips[strip][1]
        panels = len(items) / (1 + self._halves)
        h = _WRITTEN * _BF16 * panels * rows if self._h_leaves else 0
        return self._work(rows, panels * self._a_bytes, h + (rows * self._x_row if self.x_leaves else 0))

    def _passed(self, strip: int, items: range) -> int:
        """How many of these items are done: a half that comes first is not."""
        if not self._halves:
            return len(items)
        done, item = 0, items.start
        while item < items.stop:
            together = self._schedule.together(self._number, 0, item, items.stop)
            panel = strip, item % self._per_a // 2
            if together == 2 or panel in self._met:
                done += 2
            self._met.add(panel)
            item += together
        return done

    def _d(self, strip: int, items: range) -> Steps:
        piece, rows = self._strips[strip]
        yield self._gates[piece]
        d = _WRITTEN * _FP32 * len(items) * rows if self._d_leaves else 0
        yield self._work(rows, len(items) * self._b_bytes, d + (rows * self._h_row if self._h_leaves else 0))
        for item in items:
            yield from self._arrive(item % self._per_b)

    def _arrive(self, panel: int) -> Steps:
        """Whoever finishes a panel last adds it up."""
        self._arrived[panel] += 1
        if self._arrived[panel] == len(self._strips):
            slots = self._schedule.slots
            yield self._added(slots, slots * _FP32 if self._d_leaves else 0)
            yield from self._sum(0, panel, self._schedule.tokens)

    def _y(self, first: int, end: int) -> Steps:
        while first < end:
            panels = self._schedule.together(self._number, 1, first, end)
            number, panel = divmod(first, self._per_b)
            tokens, first_piece, pieces = self._ranges[number]
            yield from self._walk(range(first_piece, first_piece + pieces), panels)
            for each in range(panel, panel + panels):
                yield from self._sum(number, each, tokens)
            first += panels

    def _walk(self, pieces: range, panels: int) -> Steps:
        """The work of some panels of down, of all experts. The workers of an L3 walk together: one of them reads h for all."""
        works: list[Work] = []
        for piece in pieces:
            if self._gates[piece].left or len(works) == _WALK:
                yield _sum_of(works)
                works = []
            yield self._gates[piece]
            rows = self._pieces[piece][1]
            works.append(self._work(rows, panels * self._b_bytes, rows * self._h_row / self._beside if self._h_leaves else 0))
        yield _sum_of(works)

    def _sum(self, number: int, panel: int, tokens: int) -> Steps:
        """A panel of y is there; the last shard adds all of them up."""
        self._summed[number, panel] = self._summed.get((number, panel), 0) + 1
        if self._summed[number, panel] == self._shards > 1:
            yield self._added(tokens * self._shards, tokens * self._shards * _FP32 if self._sums_leave else 0)

    def _added(self, rows: int, nbytes: float) -> Work:
        return Work(max(rows * self._machine.add, nbytes / self._core_read), nbytes, self._number)

    def _work(self, rows: int, packed: float, others: float) -> Work:
        """rows: of a strip. packed: bytes of its panels. others: of rows that come from memory or go there."""
        nbytes = packed + others
        return Work(max(self._kernel.seconds(rows, packed), nbytes / self._core_read), nbytes, self._number)


def _sum_of(works: list[Work]) -> Work:
    if not works:
        return Work(0.0)
    return works[0]._replace(seconds=sum(work.seconds for work in works), nbytes=sum(work.nbytes for work in works))
