"""bench/vllm without vLLM: who takes part, the figures, the table, and what becomes of a saved result."""

from __future__ import annotations

import json
import sys

import pytest
from rich.console import Console

from bench import document, publish, results_file
from bench.results_file import Results
from bench.vllm import __main__ as command
from bench.vllm import report

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
    start = command.processes.Process

    def process(words, log, environment):
        assert words[1:3] in (["-m", "bench.vllm.worker"], ["-m", "bench.engines.worker"])
        return start([sys.executable, tmp_path / "worker.py"], log, {"PYTHONPATH": str(command.ROOT), **environment})

    monkeypatch.setattr(command.processes, "Process", process)
    monkeypatch.setattr(command.environments, "python", lambda environment, progress: sys.executable)

    def run(fake: str = "") -> dict:
        monkeypatch.setenv("FAKE", fake)
        folder = tmp_path / "work"
        folder.mkdir()
        return json.loads(json.dumps(command.measure(2, 2, folder, lambda text: None)))

    return run


def saved(result: dict) -> dict:
    cpu = {"name": "AMD EPYC 9754 128-Core Processor", "family": 25, "model": 160, "threads": 8}
    return result | {"date": "2026-11-24", "commit": "012345678", "ktmoe": "0.1.0", "cpu": cpu}


def test_figures(measured, tmp_path):
    """Medians of rounds that took twice and three times a second's worth; vLLM's own experts take twice as long."""
    result = saved(measured())
    ours, bf16, theirs = report.published(result)["way"]
    assert [way["name"] for way in (ours, bf16, theirs)] == ["ktmoe MXFP4", "ktmoe BF16", "vLLM BF16"]
    assert ours["prefill"] == [{"tokens": 512, "tokens_s": 204.8}]
    assert theirs["prefill"] == [{"tokens": 512, "tokens_s": 102.4, "lead": 2.0}]
    assert ours["decode"] == [{"texts": 1, "tokens_s": 6.4}, {"texts": 4, "tokens_s": 12.8}]
    assert (theirs["decode"][1]["lead"], bf16["decode"][1]["lead"]) == (2.0, 1.0)
    assert (ours["memory_gb"], ours["load_s"], ours["environment"]) == (2.0, 1.5, {"OMP_WAIT_POLICY": "passive"})

    made = publish.vllm_alone(result, tmp_path)
    assert results_file.read(publish.write(made, tmp_path)) == made
    heads, rows = document.vllm([made, Results({"cpu": result["cpu"]})])
    assert heads[:5] == ("CPU", "model", "layers", "way", "prefill, 512 tokens")
    assert [row[3:5] for row in rows] == [
        ("ktmoe MXFP4", "205 tokens/s"),
        ("ktmoe BF16", "205 tokens/s, 1.0 x"),
        ("vLLM BF16", "102 tokens/s, 2.0 x"),
    ]
    assert {row[2] for row in rows} == {"2 of 24"}


def test_without_results_the_table_is_empty():
    assert document.vllm([])[1] == []


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        ("broken", "RuntimeError: the moon is not full"),
        ("served anyway", "expected ktmoe in 0 layers, found 2"),
    ],
)
def test_a_way_that_cannot_be_measured_is_out(measured, fake, reason):
    result = saved(measured(fake))
    assert result["ways"]["vLLM BF16"]["failure"] == reason
    assert [way["name"] for way in report.published(result)["way"]] == ["ktmoe MXFP4", "ktmoe BF16"]
    console = Console(width=200, record=True)
    with console.capture() as capture:
        report.show(result, console)
    assert f"out: vLLM BF16: {reason}" in capture.get()


def test_what_cannot_be_done_is_said(capsys):
    with pytest.raises(SystemExit):
        command.main(["--rounds", "0"])
    assert "expected --rounds and --layers above 0, found 0 and 2" in capsys.readouterr().err
