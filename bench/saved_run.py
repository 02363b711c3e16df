"""What a results file keeps of runs of make bench, which pytest-benchmark saved."""

from __future__ import annotations

import datetime
import statistics

from bench import explain, modes
from bench.linear import page as linear_page
from bench.models import models
from bench.results_file import Results, ResultsError, check, digits
from bench.results_schema import LOADING

LISTS = {"decode": "decode", "prefill": "prefill"}  # by a layer's work; all other work is "per_expert"
CALL = {
    "ms": "ms",
    "gb_s": "read_gb_s",
    "of_read": "share_of_read_bandwidth",
    "gflop_s": "gflop_s",
    "of_peak": "share_of_multiply_peak",
}
SUITES = ("layer", "kernels", "modes", "linear", "pool", "load")
#: What is kept of a kernel: few rows from memory, and many from a core's cache.
KERNELS = {("memory", 1): "memory", ("L2", 192): "l2"}


def results(saved: list[dict]) -> Results:
    """The results of runs that pytest-benchmark saved. Raises ResultsError if they do not belong together or lack something."""
    made, by_suite = made_of(saved), by_suite_of(saved)
    about = saved[-1]["machine_info"]["ktmoe"]
    data = {
        **made,
        "ktmoe": about["version"],
        **({"compiler": about["compiler"]} if about["compiler"] else {}),
        "cpu": cpu_of(saved[-1]["machine_info"]),
        "limits": _limits(by_suite),
        "layer": _layers(by_suite["layer"]),
        "kernel": _kernels(by_suite["kernels"]),
        "pool": [_pool(row) for row in by_suite["pool"]],
        "modes": modes.section(made, by_suite["modes"]),
        "linear": linear_page.section(made, by_suite["linear"]),
        "load": [{"work": row["work"], **{k: digits(row[k]) for k in LOADING if k in row}} for row in by_suite["load"]],
    }
    data = {name: value for name, value in data.items() if value not in ([], {})}
    check(data, "the run")
    data |= {"cost": found} if (found := explain.fits(Results(data))) else {}
    return Results(data)


def made_of(saved: list[dict]) -> dict:
    """When and of what commit runs are. Raises ResultsError where they do not belong together."""
    infos = [run.get("machine_info", {}).get("ktmoe") for run in saved]
    if not all(infos):
        raise ResultsError("a run does not say which CPU it was measured on: it was saved by an older version")
    commits = {_commit(run) for run in saved}
    if any(info != infos[-1] for info in infos) or len(commits) > 1:
        raise ResultsError("the runs are of different commits or machines")
    date = datetime.datetime.fromisoformat(saved[-1]["datetime"]).date()
    return {"date": date, "commit": commits.pop(), "source": "make bench"}


def by_suite_of(saved: list[dict]) -> dict[str, list[dict]]:
    rows = {row["fullname"]: row["extra_info"] for run in saved for row in run["benchmarks"] if "suite" in row["extra_info"]}
    return {suite: [row for row in rows.values() if row["suite"] == suite] for suite in SUITES}


def _commit(run: dict) -> str:
    commit = run["commit_info"]
    return commit["id"][:9] + (", with uncommitted changes" if commit["dirty"] else "")


def cpu_of(machine: dict) -> dict:
    """The CPU as py-cpuinfo read it for pytest-benchmark, and the machine as bench.machine did."""
    cpu = machine["cpu"]
    known = {"name": "brand_raw", "family": "family", "model": "model", "stepping": "stepping"}
    return {name: cpu[key] for name, key in known.items() if key in cpu} | machine["ktmoe"]["machine"]


def _limits(rows: dict[str, list[dict]]) -> dict:
    """Medians over all points, and the number of streams that most of them read fastest with."""
    peaks: dict[str, list[float]] = {}
    for row in rows["layer"]:
        peaks.setdefault(row["isa"], []).append(row["limit_gflop_s"])
    found = {
        "read_gb_s": _median([row["limit_read_gb_s"] for row in rows["layer"]]),
        "read_streams": streams_of(rows["layer"]),
        "handoff_us": _median([row["handoff_us"] for row in rows["pool"]]),
        "multiply_gflop_s": {isa: _median(limits) for isa, limits in peaks.items()},
    }
    return {name: value for name, value in found.items() if value}


def _layers(rows: list[dict]) -> list[dict]:
    """A layer for each model and way to compute, with random routing; skewed routing stays with the saved run."""
    found: dict[tuple, dict] = {}
    for row in rows:
        if row["routing"] != "random":
            continue
        names = ("model", "backend", "isa", "activations", "rounding", *(["tuned_for"] if "tuned_for" in row else []))
        layer = found.setdefault(
            tuple(row[name] for name in names),
            {
                **{name: row[name] for name in names},
                "weights": models()[row["model"]].weights,
                "experts": row["num_experts"],
                "copies": row["layers"],
                "bound": digits(row["bound_of_output"]),
            },
        )
        what = LISTS.get(row["work"], "per_expert")
        number = {"tokens": row["tokens"]}
        if what == "per_expert":
            number = {"rows": int(row["work"].split()[0]), "experts": row["among"]}
        layer.setdefault(what, []).append({**number, **_call(row)})
    return list(found.values())


def _kernels(rows: list[dict]) -> list[dict]:
    found: dict[tuple, dict] = {}
    for row in rows:
        what = KERNELS.get((row["source"], row["rows"]))
        if what and row["called"] == "chosen":
            names = ("weights", "isa", "activations", "scales")
            kernel = found.setdefault(tuple(row[name] for name in names), {name: row[name] for name in names})
            kernel.setdefault(what, []).append({"rows": row["rows"], **_call(row)})
    return list(found.values())


def _pool(row: dict) -> dict:
    of_call = {"of_call": digits(row["share_of_call"])} if "share_of_call" in row else {}
    low, high = map(digits, row["most_us"])
    return {"work": row["work"], "us": digits(row["us"]), "low_us": low, "high_us": high, **of_call}


def _call(row: dict) -> dict:
    return {name: digits(row[key]) for name, key in CALL.items()}


def streams_of(rows: list[dict]) -> int | None:
    """The number of streams that most points or rounds were read fastest with; None of those that tried one alone."""
    found = statistics.multimode(row["read_streams"] for row in rows if "read_streams" in row)
    return found[0] if found else None


def _median(values: list[float]) -> float | None:
    return digits(statistics.median(values)) if values else None
