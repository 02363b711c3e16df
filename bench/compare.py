"""Is a saved run of the benchmarks slower than another one, beyond the noise that the two runs themselves show?

    python -m bench.compare [NEW [OLD]]

NEW and OLD are files that pytest-benchmark saved, or the numbers that their names begin with; by default the last one and the
one before it. The exit status is 1 if a point regressed, 2 if the runs cannot be compared, which they cannot either if no point
is left to judge, else 0.

What is compared is never a time but a point's shares of limits that its own rounds measured, by their logarithms.

1. A point whose limits of reading or multiplying, as its rounds measured them, differ by more than a factor of MOST_LIMITS
   between the runs was measured on another machine state, such as with a CPU taken away for a while. It is listed, not judged,
   and counts for nothing below: its rounds agree among themselves, so that no spread would tell.
2. A point's change d is the difference of the medians over rounds, new less old.
3. A median of n rounds is off by 1.2533 * s / sqrt(n) (the standard error of a median), where s is the rounds' spread, 1.4826 *
   their median absolute deviation, which outliers do not move. Few rounds may agree by chance: s is at least the median spread
   of all points of that run. Both runs' errors, as the root of the sum of squares, are the point's error e.
4. Runs differ by more than rounds do: other pages, other neighbours on the host. What most points show is taken for that: all
   errors are multiplied by 1.4826 * the median absolute deviation of d / e over all points, where that is above 1. It is taken
   around the median of d / e, so that what slows all points alike is not taken for noise.
5. A point regressed if d < -max(t * e, FLOOR), and improved if d > max(t * e, FLOOR). With hundreds of points some are always
   unlucky: t is such that a run in which nothing changed has a regression with probability FALSE_ALARM, over all points
   together (Bonferroni: each has FALSE_ALARM / points). It is a quantile of Student's distribution, since the spread is an
   estimate itself: by the median absolute deviation, a round is worth MAD_EFFICIENCY of a degree of freedom.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console

from bench import tables

FALSE_ALARM = 0.01
#: A share that changed by less than this factor is never reported.
FLOOR = math.log(1.03)
MAD_TO_DEVIATION = 1.4826
MAD_EFFICIENCY = 0.37
MEDIAN_ERROR = 1.2533
STORAGE = Path(".benchmarks")
#: What has to be alike in both runs.
CONDITIONS = ("cpu", "threads")
#: Limits that a point may have recorded, by what people call them.
LIMITS = {"limit_read_gb_s": "GB/s", "limit_gflop_s": "GFLOP/s"}
#: By what factor a limit may differ between the runs.
MOST_LIMITS = 1.25


class CannotCompareError(Exception):
    """The runs, or one of them, cannot be compared; the message is for a person."""


@dataclass(frozen=True)
class Run:
    """A saved run. By a point's name: the logarithms of its shares, its CONDITIONS, and those LIMITS that it recorded."""

    path: Path
    points: dict[str, list[float]]
    conditions: dict[str, dict]
    limits: dict[str, dict[str, float]]

    @cached_property
    def spread(self) -> float:
        """The median spread of its points, of those that have one."""
        return statistics.median([spread(logs) for logs in self.points.values() if len(logs) > 1] or [0.0])


@dataclass(frozen=True)
class Change:
    """Of one point, in logarithms. noise: a change up to that much, either way, says nothing."""

    point: str
    old: float
    new: float
    noise: float

    @property
    def size(self) -> float:
        return self.new - self.old

    @property
    def regressed(self) -> bool:
        return self.size < -self.noise

    @property
    def improved(self) -> bool:
        return self.size > self.noise


def read(path: Path) -> Run:
    """Raises CannotCompareError, which names the file, if it is not there or is not what pytest-benchmark writes."""
    try:
        saved = json.loads(path.read_text())["benchmarks"]
        rows = {row["fullname"]: row["extra_info"] for row in saved}
        measured = {name: info for name, info in rows.items() if "shares" in info}  # a test that failed recorded none
        points = {name: [math.log(share) for share in info["shares"]] for name, info in measured.items()}
        conditions = {name: {key: info[key] for key in CONDITIONS} for name, info in measured.items()}
        limits = {name: {key: float(info[key]) for key in LIMITS if key in info} for name, info in measured.items()}
    except OSError as error:
        raise CannotCompareError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CannotCompareError(
            f"{path}: expected a run that make bench saved, found {type(error).__name__}: {error}"
        ) from None
    if not all(points.values()) or not points:
        raise CannotCompareError(f"{path}: expected points with the shares of their rounds, found none")
    if not all(0 < limit < math.inf for found in limits.values() for limit in found.values()):
        raise CannotCompareError(f"{path}: expected limits above 0, found others")
    return Run(path, points, conditions, limits)


def spread(logs: list[float]) -> float:
    """A standard deviation that outliers do not move."""
    middle = statistics.median(logs)
    return MAD_TO_DEVIATION * statistics.median([abs(log - middle) for log in logs])


@dataclass(frozen=True)
class OtherState:
    """A point that is not judged: a limit's old and new value are too far apart."""

    point: str
    limit: str
    old: float
    new: float

    @property
    def change(self) -> float:
        return self.new / self.old - 1


def common_points(old: Run, new: Run) -> tuple[list[str], list[OtherState]]:
    """Points of both runs: those to judge, and those of another machine state.

    Raises CannotCompareError if there are none to judge, or if they were measured under other CONDITIONS.
    """
    common = [point for point in new.points if point in old.points]
    if not common:
        raise CannotCompareError(f"{new.path} and {old.path} have no point in common")
    for point in common:
        for key in CONDITIONS:
            was, found = old.conditions[point][key], new.conditions[point][key]
            if was != found:
                raise CannotCompareError(f"{point}: {new.path} was measured with {key} {found}, {old.path} with {was}")
    others = {point: other for point in common if (other := _other_state(old, new, point))}
    judged = [point for point in common if point not in others]
    if not judged:
        farthest = max(others.values(), key=lambda other: abs(math.log1p(other.change)))
        raise CannotCompareError(
            f"{new.path} and {old.path} were measured on different states of the machine: at all {len(others)} points a limit"
            f" differs by more than a factor of {MOST_LIMITS}, by {farthest.change:+.0%} at {farthest.point}"
        )
    return judged, [*others.values()]


def _other_state(old: Run, new: Run, point: str) -> OtherState | None:
    """By the limit that differs most, if it differs too much."""
    were, are = old.limits[point], new.limits[point]
    ratios = {name: abs(math.log(are[name] / were[name])) for name in LIMITS if name in were and name in are}
    name = max(ratios, key=ratios.get, default=None)
    if name is None or ratios[name] <= math.log(MOST_LIMITS):
        return None
    return OtherState(point, LIMITS[name], were[name], are[name])


def changes(old: Run, new: Run, common: list[str]) -> list[Change]:
    """Of the points to judge."""
    sizes = {point: statistics.median(new.points[point]) - statistics.median(old.points[point]) for point in common}
    errors = {point: math.hypot(_error(old, point), _error(new, point)) for point in common}
    scale = max(1.0, spread([sizes[point] / errors[point] for point in common if errors[point]] or [0.0]))
    rounds = statistics.median([len(old.points[point]) + len(new.points[point]) - 2 for point in common])
    factor = scale * student(FALSE_ALARM / len(common), max(1.0, MAD_EFFICIENCY * rounds))
    noise = {point: max(factor * errors[point], FLOOR) for point in common}
    before = {point: statistics.median(old.points[point]) for point in common}
    return [Change(point, before[point], before[point] + sizes[point], noise[point]) for point in common]


def student(tail: float, freedom: float) -> float:
    """The number that a variable of Student's distribution exceeds with probability `tail`, below 1/2."""
    steps = 1000
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def exceeds(angle: float) -> float:
        """With x = sqrt(freedom) * tan(u), the density is scale * cos(u) ** (freedom - 1); by midpoints."""
        width = (math.pi / 2 - angle) / steps
        return scale * width * sum(math.cos(angle + (i + 0.5) * width) ** (freedom - 1) for i in range(steps))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) > tail else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _error(run: Run, point: str) -> float:
    """A median's standard error."""
    logs = run.points[point]
    return MEDIAN_ERROR * max(spread(logs), run.spread if len(logs) > 1 else 0.0) / math.sqrt(len(logs))


def find(given: list[str], storage: Path = STORAGE) -> tuple[Path, Path]:
    """The files of (new, old). Raises CannotCompareError where there are too few."""
    saved = sorted(storage.glob("*/[0-9]*.json"), key=lambda path: path.stat().st_mtime)
    chosen = [_file(name, saved) for name in given]
    earlier = [path for path in saved if path not in chosen]
    if len(chosen) == 1:
        earlier = [path for path in earlier if not chosen[0].exists() or path.stat().st_mtime <= chosen[0].stat().st_mtime]
    while len(chosen) < 2:
        if not earlier:
            raise CannotCompareError(f"{storage}: expected two saved runs to compare, found {len(saved)}; make bench saves one")
        chosen.append(earlier.pop())
    return chosen[0], chosen[1]


def _file(name: str, saved: list[Path]) -> Path:
    if not name.isdigit():
        return Path(name)
    for path in reversed(saved):
        if int(re.match(r"\d+", path.name)[0]) == int(name):
            return path
    raise CannotCompareError(f"no saved run has the number {name}; there are {', '.join(p.name for p in saved) or 'none'}")


def report(old: Run, new: Run, found: list[Change], others: list[OtherState], console: Console) -> None:
    """What regressed and what improved, the worst first, what was not judged, and the points that only one run has."""
    regressed = [change for change in found if change.regressed]
    improved = [change for change in found if change.improved]
    for title, picked in (("regressed", regressed), ("improved", improved)):
        if picked:
            picked = sorted(picked, key=lambda change: -abs(change.size))
            heads = ("point", "old share", "new share", "change", "noise")
            console.print(tables.table(heads, map(_cells, picked), title=f"{len(picked)} {title}"))
    if others:
        heads = ("point", "old limit", "new limit", "change", "")
        rows = ((o.point, f"{o.old:.1f}", f"{o.new:.1f}", f"{o.change:+.1%}", o.limit) for o in others)
        console.print(tables.table(heads, rows, title=f"{len(others)} measured on another machine state, not judged"))
    for run, other in ((old, new), (new, old)):
        if alone := [point for point in run.points if point not in other.points]:
            console.print(f"only in {run.path}:", *alone, sep="\n  ", markup=False, highlight=False, soft_wrap=True)
    typical = math.expm1(statistics.median([change.noise for change in found]))
    not_judged = f", {len(others)} more not judged" if others else ""
    console.print(
        f"{new.path} against {old.path}: {len(found)} points, {len(regressed)} regressed, {len(improved)} improved{not_judged};"
        f" changes up to {typical:.1%} are noise at half of them",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _cells(change: Change) -> tuple[str, ...]:
    noise = math.copysign(change.noise, change.size)
    shares = (f"{math.exp(log):.1%}" for log in (change.old, change.new))
    return change.point, *shares, f"{math.expm1(change.size):+.1%}", f"{math.expm1(noise):+.1%}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="the new run and the old one: files, or the numbers they begin with"
    )
    given = parser.parse_args(arguments).runs
    try:
        if len(given) > 2:
            raise CannotCompareError(f"expected a new run and an old one at most, found {len(given)} runs")
        new, old = (read(path) for path in find(given))
        judged, others = common_points(old, new)
    except CannotCompareError as error:
        print(f"bench-compare: {error}", file=sys.stderr)
        return 2
    found = changes(old, new, judged)
    report(old, new, found, others, tables.console(180))
    return 1 if any(change.regressed for change in found) else 0


if __name__ == "__main__":
    sys.exit(main())
