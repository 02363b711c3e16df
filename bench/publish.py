"""Writes a saved run of the benchmarks into bench/results, and the tables of all results files into docs/performance.md.

python -m bench.publish [RUN ...]     # by default the last saved run; several are joined, if they are of one commit and CPU
python -m bench.publish --engines     # what make bench-engines saved, and nothing else, into that CPU's file
python -m bench.publish --vllm        # what make bench-vllm saved, likewise
python -m bench.publish --distributed # what make bench-distributed saved, likewise
python -m bench.publish --training    # what make bench-training saved on this CPU, likewise
python -m bench.publish --soak        # what make soak saved on this CPU, likewise
python -m bench.publish --peers       # what make bench-peers saved on this CPU, likewise
python -m bench.publish --modes [RUN] # what a saved run has of activation modes, and nothing else, into that CPU's file
python -m bench.publish --linear [RUN] # what a saved run has of dense matrices, and what make bench-linear saved, likewise
python -m bench.publish --tables      # the tables alone
python -m bench.publish --show [WORD] # prints every table with all its columns; of the files with that word in their names
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path

import ktmoe
from bench import document, explain, machine, modes, runs, soak
from bench.distributed import report as distributed_report
from bench.engines import cold_report
from bench.engines import page as whole_page
from bench.engines import report as engines_report
from bench.engines.ways import COLD, OF_EXPERTS, OF_GGUF, OF_MXFP4
from bench.linear import page as linear_page
from bench.linear import report as linear_report
from bench.models import models
from bench.peers.formats import FORMATS, file_stem
from bench.peers.rounds import figures
from bench.results_file import FOLDER, LOADING, Results, ResultsError, check, digits, read, read_all
from bench.training import report as training_report
from bench.vllm import report as vllm_report

#: Where make bench-peers, by format, and the others save what they measured.
PEERS = {weights: runs.STORAGE / f"{file_stem('peers', weights)}.json" for weights in FORMATS}
SAVED = ("engines", "vllm", "linear", "distributed", "training")
ENGINES, VLLM, LINEAR, DISTRIBUTED, TRAINING = (runs.STORAGE / f"{name}.json" for name in SAVED)

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
    made, by_suite = _made(saved), _by_suite(saved)
    about = saved[-1]["machine_info"]["ktmoe"]
    data = {
        **made,
        "ktmoe": about["version"],
        **({"compiler": about["compiler"]} if about["compiler"] else {}),
        "cpu": _cpu(saved[-1]["machine_info"]),
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


def _made(saved: list[dict]) -> dict:
    """When and of what commit runs are. Raises ResultsError where they do not belong together."""
    infos = [run.get("machine_info", {}).get("ktmoe") for run in saved]
    if not all(infos):
        raise ResultsError("a run does not say which CPU it was measured on: it was saved by an older version")
    commits = {_commit(run) for run in saved}
    if any(info != infos[-1] for info in infos) or len(commits) > 1:
        raise ResultsError("the runs are of different commits or machines")
    date = datetime.datetime.fromisoformat(saved[-1]["datetime"]).date()
    return {"date": date, "commit": commits.pop(), "source": "make bench"}


def _by_suite(saved: list[dict]) -> dict[str, list[dict]]:
    rows = {row["fullname"]: row["extra_info"] for run in saved for row in run["benchmarks"] if "suite" in row["extra_info"]}
    return {suite: [row for row in rows.values() if row["suite"] == suite] for suite in SUITES}


def peers(saved: dict) -> dict:
    """An entry of a results file's `peers`, of one format that make bench-peers saved.

    ktmoe's own ways come first. Whoever failed at all points is left out.
    """
    libraries = []
    for name, participant in sorted(saved["participants"].items(), key=lambda item: not item[0].startswith("ktmoe ")):
        measured = [(point, figures(saved, point, name)) for point in saved["points"]]
        calls = [
            {
                "tokens": point["tokens"],
                "ms": digits(found["seconds"] * 1e3),
                **({"lead": digits(found["ratio"])} if found["ratio"] else {}),
                **({"int8_lead": digits(found["int8_ratio"])} if found["int8_ratio"] else {}),
            }
            for point, found in measured
            if found
        ]
        if calls:
            errors = [digits(point["participants"][name]["error"]) for point, found in measured if found]
            known = {"version": str(participant["about"]["version"])} if "version" in participant["about"] else {}
            about = {"name": name, **known, "activations": participant["numerics"]}
            libraries.append({**about, "least_error": min(errors), "most_error": max(errors), "calls": calls})
    commit = {"commit": saved["commit"]} if saved.get("commit") else {}
    date = datetime.date.fromisoformat(saved["date"])
    shape = {name: saved["shape"][name] for name in ("weights", "experts")}
    bases = {"auto": saved["base"], **({"int8": saved["int8_base"]} if saved.get("int8_base") else {})}
    return {**shape, "date": date, **commit, "source": "make bench-peers", **bases, "library": libraries}


def engines(saved: dict) -> dict | None:
    """A results file's `engines`, of what make bench-engines saved besides whole models; None if that is nothing.

    Ways that failed are left out.
    """
    kept = [comparison for comparison in saved["comparisons"] if comparison["comparison"] in OF_EXPERTS]
    if not kept:
        return None
    streams = _streams([row for comparison in kept for row in comparison["rounds"]])
    commit = {"commit": saved["commit"]} if saved["commit"] else {}
    comparisons = [
        {
            **{name: comparison[name] for name in ("model", "layers", "of_layers", "vocabulary")},
            "way": [
                _way(name, about, found)
                for name, about in comparison["ways"].items()
                if not about["failure"] and (found := engines_report.figures(comparison, name))
            ],
        }
        for comparison in kept
    ]
    date = datetime.date.fromisoformat(saved["date"])
    return {
        "date": date,
        **commit,
        "source": "make bench-engines",
        **({"read_streams": streams} if streams else {}),
        "comparison": comparisons,
    }


def _way(name: str, about: dict, found: dict) -> dict:
    """load_s: of a checkpoint that was read. bfloat16 weights were made."""

    def line(number: str, count: int, fields: dict) -> dict:
        lead = {"lead": digits(fields["lead"])} if fields["lead"] else {}
        read = {"read_gb_s": digits(fields["read"] / 1e9), "of_read": digits(fields["of_read"])} if "read" in fields else {}
        return {number: count, "tokens_s": digits(fields["rate"]), **lead, "experts": digits(fields["share"]), **read}

    return {
        "name": name,
        "weights": about["weights"],
        **({"environment": about["environment"]} if about["environment"] else {}),
        **({"error": digits(about["error"])} if about["error"] is not None else {}),
        "peak_gb": digits(found["peak"] / 1e9),
        **({"load_s": digits(found["load"]["seconds"])} if about["weights"] == "MXFP4" else {}),
        "prefill": [line("tokens", *entry) for entry in found["prefill"].items()],
        "decode": [line("texts", *entry) for entry in found["decode"].items()],
    }


def with_others(results: Results, folder: Path = FOLDER) -> Results:
    """The results, with what make bench-peers saved last of each format, make bench-engines and make bench-linear, each if it
    was on this CPU.

    Otherwise they get what the file that is there has of these, as of activation modes and dense matrices.
    """
    cpu, file = results.data["cpu"], folder / results.file_name
    data = dict(results.data)
    old = read(file).data if file.exists() else {}
    if found := _with_peers(old, cpu):
        data["peers"] = found
    saved = json.loads(ENGINES.read_text()) if ENGINES.exists() else None
    if saved and (saved["cpu"]["name"], saved["cpu"]["threads"]) == (cpu["name"], cpu["threads"]):
        data |= _of_engines(saved)
    data |= _linear_peers(cpu)
    kept = ("engines", "whole", "gguf", "cold", "modes", "vllm", "vllm_servers", "vllm_dense", "linear", "linear_peers")
    kept += ("distributed", "soak", "training")
    for section in kept:
        if section in old:
            data.setdefault(section, old[section])
    check(data, "the run")
    return Results(data)


def _with_peers(old: dict, cpu: dict) -> list[dict]:
    """A file's `peers`: those that it has, and in their place what make bench-peers saved last of each format on this CPU."""
    found = {entry["weights"]: entry for entry in old.get("peers", ())}
    for weights, path in PEERS.items():
        saved = json.loads(path.read_text()) if path.exists() else None
        if saved and (saved["machine"]["cpu"], saved["machine"]["threads"]) == (cpu["name"], cpu["threads"]):
            found[weights] = peers(saved)
    return [found[weights] for weights in FORMATS if weights in found]


def peers_alone(cpu: dict, folder: Path = FOLDER) -> Results:
    """The file of a CPU (bench.machine.cpu_fields()) with what make bench-peers saved on it; a new one has nothing else.

    Raises ResultsError where nothing was saved.
    """
    file = folder / Results({"cpu": cpu}).file_name
    old = read(file).data if file.exists() else {}
    found = _with_peers(old, cpu)
    if not found:
        raise ResultsError("nothing of this CPU: expected what make bench-peers saves")
    newest = max(found, key=lambda entry: entry["date"])
    new = {"date": newest["date"], "source": newest["source"], "commit": newest.get("commit", "unknown")}
    data = (old or new | {"ktmoe": ktmoe.__version__, "cpu": cpu}) | {"peers": found}
    check(data, "the run")
    return Results(data)


def _linear_peers(cpu: dict) -> dict:
    """What make bench-linear saved, if it was on this CPU."""
    saved = json.loads(LINEAR.read_text()) if LINEAR.exists() else None
    if not saved or (saved["cpu"]["name"], saved["cpu"]["threads"]) != (cpu["name"], cpu["threads"]):
        return {}
    return {"linear_peers": linear_report.published(saved)}


def engines_alone(saved: dict, folder: Path = FOLDER) -> Results:
    """The file of the CPU that make bench-engines ran on, with what it saved; a new one has nothing else."""
    return _alone(_of_engines(saved), _about(saved), folder)


def _of_engines(saved: dict) -> dict[str, dict]:
    found = {"engines": engines(saved), "whole": whole_page.section(saved, OF_MXFP4)}
    found |= {"gguf": whole_page.section(saved, (OF_GGUF,)), COLD: cold_report.section(saved)}
    return {name: section for name, section in found.items() if section}


def vllm_alone(saved: dict, folder: Path = FOLDER) -> Results:
    """The same of make bench-vllm. Raises ResultsError where no part was saved."""
    if not (found := vllm_report.published(saved)):
        raise ResultsError("no part of vLLM: expected what make bench-vllm saves")
    return _alone(found, _about(saved), folder)


def distributed_alone(saved: dict, folder: Path = FOLDER) -> Results:
    """The same of make bench-distributed."""
    return _alone({"distributed": distributed_report.published(saved)}, _about(saved), folder)


def training_alone(cpu: dict, folder: Path = FOLDER) -> Results:
    """The same of make bench-training, which saved it on the CPU of this machine (bench.machine.cpu_fields()).

    Raises ResultsError where it was another CPU.
    """
    saved = json.loads(TRAINING.read_text())
    where = saved["machine"]["cpu"], saved["machine"]["threads"]
    if where != (cpu["name"], cpu["threads"]):
        raise ResultsError(
            f"{TRAINING}: expected a run on this CPU, {cpu['name']}; found one on {where[0]}, {where[1]} threads"
        )
    file = folder / Results({"cpu": cpu}).file_name
    old = read(file).data.get("training", {}) if file.exists() else {}
    about = {"commit": saved["commit"] or "unknown", "ktmoe": ktmoe.__version__, "cpu": cpu}
    return _alone({"training": training_report.section(saved, old)}, about, folder)


def soak_alone(cpu: dict, folder: Path = FOLDER) -> Results:
    """The same of make soak, on the CPU of this machine (bench.machine.cpu_fields())."""
    found = soak.published(soak.saved())
    return _alone({"soak": found}, {"commit": found["commit"], "ktmoe": ktmoe.__version__, "cpu": cpu}, folder)


def _about(saved: dict) -> dict:
    return {"commit": saved["commit"] or "unknown", "ktmoe": saved["ktmoe"], "cpu": saved["cpu"]}


def modes_alone(saved: list[dict], folder: Path = FOLDER) -> Results:
    """The file of the CPU that saved runs are of, with their activation modes; a new one has nothing else.

    Raises ResultsError where runs do not belong together, or have no modes.
    """
    made, last = _made(saved), saved[-1]["machine_info"]
    found = modes.section(made, _by_suite(saved)["modes"])
    if not found:
        raise ResultsError("the run has no activation modes: expected what make bench ARGS='-k test_modes' saves")
    return _alone({"modes": found}, {"commit": made["commit"], "ktmoe": last["ktmoe"]["version"], "cpu": _cpu(last)}, folder)


def linear_alone(saved: list[dict], folder: Path = FOLDER) -> Results:
    """The same of dense matrices, with what make bench-linear saved if it was on this CPU."""
    made, last = _made(saved), saved[-1]["machine_info"]
    found = linear_page.section(made, _by_suite(saved)["linear"])
    if not found:
        raise ResultsError("the run has no dense matrices: expected what make bench ARGS='-k test_linear' saves")
    about = {"commit": made["commit"], "ktmoe": last["ktmoe"]["version"], "cpu": _cpu(last)}
    data = _alone({"linear": found}, about, folder).data | _linear_peers(about["cpu"])
    check(data, "the run")
    return Results(data)


def _alone(sections: dict[str, dict], about: dict, folder: Path) -> Results:
    """The file of a CPU, with these sections in the place of its own."""
    first = next(iter(sections.values()))
    new = {name: first[name] for name in ("date", "source")} | about
    file = folder / Results(new).file_name
    data = (read(file).data if file.exists() else new) | sections
    check(data, "the run")
    return Results(data)


def _commit(run: dict) -> str:
    commit = run["commit_info"]
    return commit["id"][:9] + (", with uncommitted changes" if commit["dirty"] else "")


def _cpu(machine: dict) -> dict:
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
        "read_streams": _streams(rows["layer"]),
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


def _streams(rows: list[dict]) -> int | None:
    """The number of streams that most points or rounds were read fastest with; None of those that tried one alone."""
    found = statistics.multimode(row["read_streams"] for row in rows if "read_streams" in row)
    return found[0] if found else None


def _median(values: list[float]) -> float | None:
    return digits(statistics.median(values)) if values else None


def write(found: Results, folder: Path = FOLDER) -> Path:
    """The file of that CPU is replaced."""
    import tomli_w  # only whoever measured needs it

    path = folder / found.file_name
    path.write_bytes(tomli_w.dumps(found.data).encode())
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="saved runs: files, or the numbers that their names begin with")
    parser.add_argument("--engines", action="store_true", help="only what make bench-engines saved")
    parser.add_argument("--vllm", action="store_true", help="only what make bench-vllm saved")
    parser.add_argument("--distributed", action="store_true", help="only what make bench-distributed saved")
    parser.add_argument("--training", action="store_true", help="only what make bench-training saved on this CPU")
    parser.add_argument("--soak", action="store_true", help="only what make soak saved on this CPU")
    parser.add_argument("--peers", action="store_true", help="only what make bench-peers saved on this CPU")
    parser.add_argument("--modes", action="store_true", help="only what the runs have of activation modes")
    parser.add_argument(
        "--linear", action="store_true", help="only dense matrices: of the runs, and what make bench-linear saved"
    )
    parser.add_argument("--tables", action="store_true", help="only write the tables of the files that are there")
    parser.add_argument(
        "--show", nargs="?", const="", metavar="WORD", help="only print all tables, of the files with WORD in their names"
    )
    options = parser.parse_args(arguments)
    try:
        if options.show is not None:
            print(document.full(read_all(), options.show))
            return 0
        if options.engines:
            print(f"written: {write(engines_alone(json.loads(ENGINES.read_text())))}")
        elif options.vllm:
            print(f"written: {write(vllm_alone(json.loads(VLLM.read_text())))}")
        elif options.distributed:
            print(f"written: {write(distributed_alone(json.loads(DISTRIBUTED.read_text())))}")
        elif options.training:
            print(f"written: {write(training_alone(machine.cpu_fields()))}")
        elif options.soak:
            print(f"written: {write(soak_alone(machine.cpu_fields()))}")
        elif options.peers:
            print(f"written: {write(peers_alone(machine.cpu_fields()))}")
        elif not options.tables:
            paths = [runs.named(name) for name in options.runs] or [runs.last()]
            saved = [json.loads(path.read_text()) for path in paths]
            if options.modes:
                found = modes_alone(saved)
            else:
                found = linear_alone(saved) if options.linear else with_others(results(saved))
            print(f"written: {write(found)}")
        document.write()
    except (OSError, ValueError) as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    print(f"written: {', '.join(map(str, document.PAGES))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
