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
import json
import sys
from pathlib import Path

import ktmoe
from bench import document, machine, modes, runs, soak
from bench.distributed import report as distributed_report
from bench.engines import cold_report
from bench.engines import page as whole_page
from bench.engines import published as of_experts
from bench.engines.ways import COLD, OF_GGUF, OF_MXFP4
from bench.linear import page as linear_page
from bench.linear import report as linear_report
from bench.peers import published as of_peers
from bench.peers.formats import FORMATS, file_stem
from bench.results_file import FOLDER, Results, ResultsError, check, read, read_all
from bench.saved_run import by_suite_of, cpu_of, made_of
from bench.saved_run import results as results_of
from bench.training import report as training_report
from bench.vllm import report as vllm_report

#: Where make bench-peers, by format, and the others save what they measured.
PEERS = {weights: runs.STORAGE / f"{file_stem('peers', weights)}.json" for weights in FORMATS}
SAVED = ("engines", "vllm", "linear", "distributed", "training")
ENGINES, VLLM, LINEAR, DISTRIBUTED, TRAINING = (runs.STORAGE / f"{name}.json" for name in SAVED)


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
            found[weights] = of_peers.section(saved)
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
    found = {"engines": of_experts.section(saved), "whole": whole_page.section(saved, OF_MXFP4)}
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
        expected, found = (f"{name}, {threads} threads" for name, threads in ((cpu["name"], cpu["threads"]), where))
        raise ResultsError(f"{TRAINING}: expected a run on {expected}, found one on {found}")
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
    made, last = made_of(saved), saved[-1]["machine_info"]
    found = modes.section(made, by_suite_of(saved)["modes"])
    if not found:
        raise ResultsError("the run has no activation modes: expected what make bench ARGS='-k test_modes' saves")
    return _alone({"modes": found}, {"commit": made["commit"], "ktmoe": last["ktmoe"]["version"], "cpu": cpu_of(last)}, folder)


def linear_alone(saved: list[dict], folder: Path = FOLDER) -> Results:
    """The same of dense matrices, with what make bench-linear saved if it was on this CPU."""
    made, last = made_of(saved), saved[-1]["machine_info"]
    found = linear_page.section(made, by_suite_of(saved)["linear"])
    if not found:
        raise ResultsError("the run has no dense matrices: expected what make bench ARGS='-k test_linear' saves")
    about = {"commit": made["commit"], "ktmoe": last["ktmoe"]["version"], "cpu": cpu_of(last)}
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
                found = linear_alone(saved) if options.linear else with_others(results_of(saved))
            print(f"written: {write(found)}")
        document.write()
    except (OSError, ValueError) as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    print(f"written: {', '.join(map(str, document.PAGES))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
