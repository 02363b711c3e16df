"""What bench/test_modes.py measured: from a saved run into a results file and into the page's table, and what is refused."""

from __future__ import annotations

import pytest

from bench import modes, publish, results_file, saved_run, summary
from bench.results_file import ResultsError

CPU = {"brand_raw": "AMD EPYC 9754 128-Core Processor", "family": 25, "model": 160}
BACKEND = {"suite": "modes", "model": "V4-Flash", "num_experts": 24, "backend": "avx2", "isa": "avx2", "form": "int8"}


def point(mode: str, work: str, ratio: float, beside: str = "bf16") -> dict:
    tokens = {"1 token": 1, "24 tokens an expert": 96}[work]
    numbers = {"tokens": tokens, "ms": 3.14159, "ratio": ratio, "worst_error_of_bound": 0.5, "shares": [1 / ratio]}
    names = {"activations": mode, "beside": beside, "work": work}
    return {"fullname": f"{mode} {beside} {work}", "extra_info": BACKEND | names | numbers}


POINTS = (
    point("mxfp4", "1 token", 0.98761),
    point("mxfp4", "24 tokens an expert", 1.04),
    point("mxfp8", "24 tokens an expert", 1.02),
    point("mxfp4", "1 token", 1.3, "forward()"),
)


def run(*points: dict, commit: str = "0123456789abcdef", threads: int = 8) -> dict:
    about = {"version": "0.1.0", "compiler": "", "machine": {"threads": threads, "features": ["avx2"]}}
    return {
        "machine_info": {"cpu": CPU, "ktmoe": about},
        "commit_info": {"id": commit, "dirty": False},
        "datetime": "2026-11-23T09:42:23.330271+00:00",
        "benchmarks": [*points],
    }


def test_into_the_file_of_the_cpu_and_nothing_else(tmp_path):
    new = publish.modes_alone([run(*POINTS)], tmp_path)
    path = publish.write(new, tmp_path)
    assert set(new.data) == {"date", "commit", "source", "ktmoe", "cpu", "modes"}
    assert results_file.read(path) == new
    calls = [
        (mode["activations"], mode["beside"], [call["ratio"] for call in mode["call"]]) for mode in new.data["modes"]["mode"]
    ]
    assert calls == [("mxfp4", "bf16", [0.9876, 1.04]), ("mxfp8", "bf16", [1.02]), ("mxfp4", "forward()", [1.3])]
    again = publish.modes_alone([run(POINTS[1], commit="f" * 40)], tmp_path)
    assert len(again.data["modes"]["mode"]) == 1
    assert (again.data["commit"], again.data["modes"]["commit"]) == ("012345678", "f" * 9)


def test_a_whole_run_has_its_modes_or_those_of_the_file(tmp_path, monkeypatch):
    for name, value in (("PEERS", {}), ("ENGINES", tmp_path / "absent")):
        monkeypatch.setattr(publish, name, value)
    publish.write(saved_run.results([run(*POINTS)]), tmp_path)
    load = {"fullname": "load", "extra_info": {"suite": "load", "work": "packing", "gb_s": 6.3}}
    kept = publish.with_others(saved_run.results([run(load)]), tmp_path)
    assert kept.data["load"] == [{"work": "packing", "gb_s": 6.3}]
    assert len(kept.data["modes"]["mode"]) == 3
    renewed = publish.with_others(saved_run.results([run(load, POINTS[2])]), tmp_path)
    assert [mode["activations"] for mode in renewed.data["modes"]["mode"]] == ["mxfp8"]


def test_runs_without_modes_or_of_several_machines():
    with pytest.raises(ResultsError, match=r"has no activation modes: expected what make bench .* saves"):
        publish.modes_alone([run({"fullname": "failed", "extra_info": {}})])
    with pytest.raises(ResultsError, match="different commits or machines"):
        publish.modes_alone([run(POINTS[0]), run(POINTS[1], threads=2)])


def test_the_table(tmp_path):
    heads, rows = modes.table([publish.modes_alone([run(*POINTS)], tmp_path)])
    assert heads[-2:] == ("1 token", "24 tokens an expert")
    name = "AMD EPYC 9754 25-160, 8 threads"
    assert rows == [
        ("`avx2`", "avx2", "int8", "`mxfp4`", "bf16", name, "3.14 ms, 0.99 x", "3.14 ms, 1.04 x"),
        ("`avx2`", "avx2", "int8", "`mxfp8`", "bf16", name, "-", "3.14 ms, 1.02 x"),
        ("`avx2`", "avx2", "int8", "`mxfp4`, two stages", "forward()", name, "3.14 ms, 1.30 x", "-"),
    ]


def test_the_summary_of_a_run():
    printed = summary.text([each["extra_info"] for each in POINTS])
    assert "Activation modes" in printed
    assert "1.040" in printed
    assert "50%" in printed
