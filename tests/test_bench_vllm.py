"""bench/vllm without vLLM: the engine alone: who takes part, the figures, the table, and what becomes of a saved result.

Servers are in test_bench_vllm_servers.py.
"""

from __future__ import annotations

import json
import sys

import pytest
from rich.console import Console

from bench import full_tables, publish, results_file
from bench.engines.shapes import engines
from bench.results_file import Results
from bench.vllm import __main__ as command
from bench.vllm import dense, report, steps, ways

#: A worker that is as slow as its environment says, and twice as slow in the second round that counts.
WORKER = """
import os, sys
from pathlib import Path
from bench.peers.workers.protocol import answer_all

plain = os.environ.get("KTMOE_VLLM") == "0"

def answer(message):
    match message["do"]:
        case "write" | "write_bf16":
            return {}
        case "load":
            weights = Path(message["folder"]).name
            if plain and os.environ.get("FAKE") == "broken":
                raise RuntimeError("the moon is not full")
            packed = 2 if os.environ.get("FAKE") == "served anyway" or not plain else 0
            return {"seconds": 1.5, "memory": 2 * 10**9, "version": "0.32.0", "packed": packed}
    unit = (2.0 if plain else 1.0) * (1 + message["seed"] // 10)
    return {"prefill": unit, "decode": 2 * unit}

answer_all(answer)
"""


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """What fake workers say -> the result of two rounds, after a trip through JSON."""
    (tmp_path / "worker.py").write_text(WORKER)
    start = steps.processes.Process

    def process(words, log, environment):
        assert words[1:3] in (["-m", "bench.vllm.worker"], ["-m", "bench.engines.worker"])
        return start([sys.executable, tmp_path / "worker.py"], log, {"PYTHONPATH": str(ways.ROOT), **environment})

    monkeypatch.setattr(steps.processes, "Process", process)
    monkeypatch.setattr(steps.environments, "python", lambda environment, progress: sys.executable)

    def run(fake: str = "") -> dict:
        monkeypatch.setenv("FAKE", fake)
        folder = tmp_path / "work"
        folder.mkdir()
        return json.loads(json.dumps(steps.measure(engines()[ways.MODEL], 2, 2, folder, lambda text: None)))

    return run


def saved(result: dict) -> dict:
    cpu = {"name": "AMD EPYC 9754 128-Core Processor", "family": 25, "model": 160, "threads": 8}
    about = {"date": "2026-11-24", "commit": "012345678", "ktmoe": "0.1.0", "cpu": cpu}
    return about | {"model": "gpt-oss-20b", "of_layers": 24, "steps": result}


def test_figures(measured, tmp_path):
    """Medians of rounds that took twice and three times a second's worth; vLLM's own experts take twice as long."""
    result = saved(measured())
    ours, bf16, theirs = report.published(result)["vllm"]["way"]
    assert [way["name"] for way in (ours, bf16, theirs)] == ["ktmoe MXFP4", "ktmoe BF16", "vLLM BF16"]
    assert ours["prefill"] == [{"tokens": 512, "tokens_s": 204.8}]
    assert theirs["prefill"] == [{"tokens": 512, "tokens_s": 102.4, "lead": 2.0}]
    assert ours["decode"] == [{"texts": 1, "tokens_s": 6.4}, {"texts": 4, "tokens_s": 12.8}]
    assert (theirs["decode"][1]["lead"], bf16["decode"][1]["lead"]) == (2.0, 1.0)
    assert (ours["memory_gb"], ours["load_s"], ours["environment"]) == (2.0, 1.5, {"OMP_WAIT_POLICY": "passive"})

    made = publish.vllm_alone(result, tmp_path)
    assert results_file.read(publish.write(made, tmp_path)) == made
    heads, rows = full_tables.vllm([made, Results({"cpu": result["cpu"]})])
    assert heads[:5] == ("CPU", "model", "layers", "way", "prefill, 512 tokens")
    assert [row[3:5] for row in rows] == [
        ("ktmoe MXFP4", "205 tokens/s"),
        ("ktmoe BF16", "205 tokens/s, 1.0 x"),
        ("vLLM BF16", "102 tokens/s, 2.0 x"),
    ]
    assert {row[2] for row in rows} == {"2 of 24"}


def test_without_results_the_table_is_empty(tmp_path):
    with pytest.raises(results_file.ResultsError, match="no part of vLLM"):
        publish.vllm_alone({name: value for name, value in saved({}).items() if name != "steps"}, tmp_path)
    assert full_tables.vllm([])[1] == full_tables.vllm_servers([])[1] == []


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        ("broken", "RuntimeError: the moon is not full"),
        ("served anyway", "expected ktmoe in 0 layers, found 2"),
    ],
)
def test_a_way_that_cannot_be_measured_is_out(measured, fake, reason):
    result = saved(measured(fake))
    assert result["steps"]["ways"]["vLLM BF16"]["failure"] == reason
    assert [way["name"] for way in report.published(result)["vllm"]["way"]] == ["ktmoe MXFP4", "ktmoe BF16"]
    console = Console(width=200, record=True)
    with console.capture() as capture:
        report.show(result, console)
    assert f"out: steps: vLLM BF16: {reason}" in capture.get()


def test_what_cannot_be_done_is_said(capsys):
    with pytest.raises(SystemExit):
        command.main(["--rounds", "0"])
    assert "expected a number above 0, found 0" in capsys.readouterr().err


def test_the_command_measures_the_parts_that_are_named(tmp_path, monkeypatch, capsys):
    """One after the other, each in a folder that is empty, and none is left."""
    seen = []

    def part(*arguments):
        *_, folder, _ = arguments
        seen.append((folder, [*folder.iterdir()]))
        (folder / "weights").touch()
        return {"ways": {}, "servers": {}}

    for each in (command.dense, command.steps, command.servers):
        monkeypatch.setattr(each, "measure", part)
    monkeypatch.setattr(command.report, "show", lambda saved: None)
    file = tmp_path / "saved" / "vllm.json"
    for words, parts in (([], {"dense", "steps", "servers"}), (["--parts", "servers"], {"servers"})):
        seen.clear()
        assert command.main(["--folder", str(tmp_path), "--save", str(file), *words]) == 0
        assert {"dense", "steps", "servers"} & json.loads(file.read_text()).keys() == parts
        assert [there for _, there in seen] == [[]] * len(parts)
        assert not any(folder.exists() for folder, _ in seen)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.steps, "measure", interrupted)
    assert command.main(["--folder", str(tmp_path), "--save", str(file)]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_figures_of_dense_layers():
    """Ratios are those of each round, of which the median counts; bytes are those of one token."""
    times = {"tokens": [1, 512], "vllm": [[2.0, 4.0, 9.0], [1.0, 1.0, 1.0]], "ktmoe": [[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]]}
    found = dense.section({"layers": {"a router": {"n": 1024, "k": 512, **times}}})
    [layer] = found["layer"]
    assert [each["lead"] for each in layer["tokens"]] == [2.0, 0.5]
    assert layer["gb_s"] == pytest.approx(2 * 1024 * 512 / 2.0 / 1e9, rel=0.01)
    heads, rows = dense.table(found)
    assert heads == ("layer", "weights", "1 token", "512 tokens")
    assert rows == [("a router, 1024 x 512", "1 MiB", "2.00 x", "0.50 x")]
