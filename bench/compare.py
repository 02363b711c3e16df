"""Is a saved run of the benchmarks slower than another one?

    python -m bench.compare [NEW [OLD]]

NEW and OLD are files that pytest-benchmark saved, or the numbers that their names begin with; by default the last run and the
one before it. The exit status is 1 if a point is slower, 2 if the runs cannot be compared, else 0.

A point has a figure for each of its rounds: its share of a limit that the round measured. It is slower if three things hold:

1. Its median share fell by more than FLOOR, and by more than SMALLEST in itself.
2. The rounds say so: Yuen's test (Welch's t-test of trimmed means) of the logarithms of both runs' shares. All points together
   are called slower by chance with probability FALSE_ALARM (Bonferroni).
3. It fell by more than points do between two runs of the same code, which differ by pages, neighbours and clock. The median
   absolute deviation of all points' changes tells how much that is, and Student's distribution how far the farthest of so many
   points gets with probability FALSE_ALARM. With fewer than FEWEST points this rule is left out.

What is slower everywhere alike does not deviate: then most points are slower. A point is faster by the same rule.

A point is not judged, and tells nothing of the others, if the machine was in another state: a limit differs by more than a
factor of MOST_LIMITS between the runs, or the rounds of one run deviate by more than MOST_SPREAD. (Where nobody else uses the
machine, they deviate by 1 to 5 %.) Nor is it judged if one run measured reading by one stream alone.

Latencies of the pool are compared as times. Their limit, a handoff between CPUs, swings more than they do. What counts is the
time that a tenth of the rounds stay below: in the others somebody else had the CPU. A latency is slower if it takes LATENCY
times as long, and more than SHORTEST_US longer.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from scipy import stats

from bench import runs, tables

FALSE_ALARM = 0.01
FEWEST = 10
FLOOR, SMALLEST = 0.07, 0.005
LATENCY, SHORTEST_US = 2.0, 0.5
MOST_LIMITS, MOST_SPREAD = 1.25, 0.1
LIMITS = {"limit_read_gb_s": "GB/s", "limit_gflop_s": "GFLOP/s"}
#: The share of the rounds that Yuen's test leaves out at either end.
TRIM = 0.2
#: What has to be alike in both runs.
CONDITIONS = ("cpu", "threads")


class CannotCompareError(ValueError):
    """The runs cannot be compared; the message is for a person."""


@dataclass(frozen=True)
class Change:
    """The change of a point. factor: new speed / old speed. verdict: "slower", "faster", "" or "not judged"."""

    point: str
    old: str
    new: str
    factor: float
    verdict: str


def read(path: Path) -> dict[str, dict]:
    """What a run recorded of each point that it measured. Raises CannotCompareError where it is not what make bench saves."""
    try:
        rows = {row["fullname"]: row["extra_info"] for row in json.loads(path.read_text())["benchmarks"]}
        points = {name: row for name, row in rows.items() if "shares" in row}  # a test that failed recorded nothing
        for row in points.values():
            figures = [*row["shares"], *row.get("rounds_us", ()), *(row[name] for name in LIMITS if name in row)]
            if not row["shares"] or not all(0 < figure < math.inf for figure in figures):
                raise ValueError("figures that are missing or not above 0")
            row.update({name: row[name] for name in CONDITIONS})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotCompareError(
            f"{path}: expected a run that make bench saved, found {type(error).__name__}: {error}"
        ) from None
    if not points:
        raise CannotCompareError(f"{path}: expected a run that make bench saved, found no point in it")
    return points


def compare(old: dict[str, dict], new: dict[str, dict]) -> list[Change]:
    """The changes of all points that both runs have. Raises CannotCompareError for none, or for other conditions."""
    common = [point for point in new if point in old]
    if not common:
        raise CannotCompareError("no point can be judged: the runs have none in common")
    for point in common:
        for name in CONDITIONS:
            if old[point][name] != new[point][name]:
                raise CannotCompareError(f"{name} is {new[point][name]} in the new run and {old[point][name]} in the old one")
    latencies = [point for point in common if "rounds_us" in new[point] and "rounds_us" in old[point]]
    shares = [point for point in common if point not in latencies]
    others = {point: other for point in shares if (other := _other_state(point, old[point], new[point]))}
    judged = [point for point in shares if point not in others]
    found = [_latency(point, old[point]["rounds_us"], new[point]["rounds_us"]) for point in latencies]
    return [*found, *_shares(judged, old, new), *others.values()]


def _shares(points: list[str], old: dict[str, dict], new: dict[str, dict]) -> list[Change]:
    logs = [(np.log(old[point]["shares"]), np.log(new[point]["shares"])) for point in points]
    sizes = np.array([np.median(after) - np.median(before) for before, after in logs])
    each = FALSE_ALARM / max(1, len(points))
    usual = 0.0
    if len(points) >= FEWEST:
        usual = stats.t.isf(each, len(points) - 1) * stats.median_abs_deviation(sizes, scale="normal")
    found = []
    for point, (before, after), size in zip(points, logs, sizes, strict=True):
        was, is_now = np.exp(np.median(before)), np.exp(np.median(after))
        large = abs(size) > max(-math.log1p(-FLOOR), usual) and abs(is_now - was) > SMALLEST
        judge = large and _differ(before, after, "less" if size < 0 else "greater") < each
        verdict = ("slower" if size < 0 else "faster") if judge else ""
        found.append(Change(point, f"{was:.1%}", f"{is_now:.1%}", math.exp(size), verdict))
    return found


def _differ(before: np.ndarray, after: np.ndarray, how: str) -> float:
    """The probability that rounds which are alike differ so much by chance. A single figure is a count, not a sample."""
    if min(len(before), len(after)) == 1:
        return 0.0
    return float(stats.ttest_ind(after, before, equal_var=False, trim=TRIM, alternative=how).pvalue)


def _latency(point: str, before: list[float], after: list[float]) -> Change:
    was, is_now = np.quantile(before, 0.1), np.quantile(after, 0.1)
    longer, shorter = max(was, is_now), min(was, is_now)
    large = longer > LATENCY * shorter and longer - shorter > SHORTEST_US
    verdict = ("slower" if is_now > was else "faster") if large else ""
    return Change(point, f"{was:.2f} us", f"{is_now:.2f} us", was / is_now, verdict)


def _other_state(point: str, old: dict, new: dict) -> Change | None:
    """Why a point cannot be judged: another way of reading, a limit that differs, or the rounds' spread; None if it can."""
    streams = [run.get("read_streams", "1 alone") for run in (old, new)]
    if "limit_read_gb_s" in new and streams.count("1 alone") == 1:
        return Change(point, *(f"{number} streams" for number in streams), 1.0, "not judged")
    pairs = [(old[name], new[name], unit) for name, unit in LIMITS.items() if name in old and name in new]
    was, is_now, unit = max(pairs, key=lambda pair: abs(math.log(pair[1] / pair[0])), default=(1.0, 1.0, ""))
    if abs(math.log(is_now / was)) > math.log(MOST_LIMITS):
        return Change(point, f"{was:.1f} {unit}", f"{is_now:.1f} {unit}", is_now / was, "not judged")
    was, is_now = (_spread(run["shares"]) for run in (old, new))
    if max(was, is_now) > MOST_SPREAD:
        return Change(point, f"rounds deviate by {was:.0%}", f"by {is_now:.0%}", 1.0, "not judged")
    return None


def _spread(shares: list[float]) -> float:
    """How much the rounds of a point deviate."""
    return float(stats.median_abs_deviation(np.log(shares), scale="normal"))


def report(found: list[Change], console: Console) -> None:
    """The points that are slower, faster and not judged, farthest first."""
    titles = {
        "slower": "slower",
        "faster": "faster",
        "not judged": "not judged: the machine was in another state, or reading was measured by other streams",
    }
    for verdict, title in titles.items():
        picked = sorted((c for c in found if c.verdict == verdict), key=lambda c: -abs(math.log(c.factor)))
        rows = ((c.point, c.old, c.new, f"{c.factor - 1:+.1%}" if c.factor != 1 else "") for c in picked)
        if picked:
            console.print(tables.table(("point", "old", "new", "change"), rows, title=f"{len(picked)} {title}"))


def state(points: dict[str, dict]) -> str:
    """The machine's during a run: medians over its points of what they measured of it."""
    measured = {unit: [row[name] for row in points.values() if name in row] for name, unit in LIMITS.items()}
    limits = [f"limit {statistics.median(found):.1f} {unit}" for unit, found in measured.items() if found]
    spread = statistics.median(_spread(row["shares"]) for row in points.values())
    return ", ".join([*limits, f"rounds deviate by {spread:.0%}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new", nargs="?", help="a file, or the number that its name begins with")
    parser.add_argument("old", nargs="?", help="the same of the run to compare with")
    options = parser.parse_args(arguments)
    try:
        new = runs.named(options.new) if options.new else runs.last()
        old = runs.named(options.old) if options.old else runs.before(new)
        before, after = read(old), read(new)
        found = compare(before, after)
    except ValueError as error:
        print(f"bench-compare: {error}", file=sys.stderr)
        return 2
    console, write = tables.console(180), _writer(tables.console(180))
    report(found, console)
    for path, points, others in ((old, before, after), (new, after, before)):
        if alone := [point for point in points if point not in others]:
            write(f"only in {path}: {', '.join(alone)}")
    counts = (f"{sum(c.verdict == verdict for c in found)} {verdict}" for verdict in ("slower", "faster", "not judged"))
    write(f"{new} against {old}: {len(found)} points, {', '.join(counts)}")
    for path, points in ((old, before), (new, after)):
        write(f"the machine in {path}: {state(points)}")
    if all(change.verdict == "not judged" for change in found):
        print("bench-compare: no point can be judged: the machine was in another state", file=sys.stderr)
        return 2
    return 1 if any(change.verdict == "slower" for change in found) else 0


def _writer(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
