"""The short tables of docs/performance.md, by results that are made up here; and the command that prints the whole ones."""

from __future__ import annotations

import datetime
import json

import pytest

from bench import document, page_layers, page_text, publish, results_file
from bench.results_file import Results, ResultsError
from bench.training import report

DAY = datetime.date(2026, 11, 22)
ABOUT = {"date": DAY, "source": "make bench"}


def made(day: int = 22, name: str = "AMD EPYC", **sections) -> Results:
    cpu = {"name": name, "family": 25, "model": 17, "threads": 2}
    data = {"date": DAY.replace(day=day), "commit": "012345678", "source": "make bench", "cpu": cpu, **sections}
    results_file.check(data, "made")
    return Results(data)


def text(name: str, prefill: list[dict], decode: list[dict]) -> dict:
    return {
        "name": name,
        "resident_gb": 2.0,
        "mapped_gb": 0.0,
        "packed_gb": 2.0,
        "load_s": 1.0,
        "prefill": prefill,
        "decode": decode,
    }


def test_whole_models_and_long_texts_are_apart():
    short = text("ours", [{"tokens": 512, "tokens_s": 300.0, "ratio": 2.5}], [{"texts": 4, "after": 128, "tokens_s": 70.04}])
    long = text("ours", [], [{"texts": 1, "after": 4096, "tokens_s": 20.0, "of_limit": 0.388, "ratio": 0.9}])
    about = {"model": "m", "layers": 2, "of_layers": 6, "vocabulary": 100, "by_turns": True}
    comparisons = [about | {"way": [short]}, about | {"file": "Q4_0", "way": [long]}]
    found = [made(whole=ABOUT | {"comparison": comparisons}), made(21, "older", whole=ABOUT | {"comparison": []})]
    heads, rows = page_text.texts(found, "whole")
    assert heads == ("on AMD EPYC 25-17", "way", "decode, 4 texts after 128 tokens", "prefill, 512 tokens", "memory")
    assert rows == [("m, 2 of 6 layers", "ours", "70", "300, **2.50 x**", "2 GB")]
    heads, rows = page_text.texts(found, "whole", long=True)
    assert heads[2:] == ("decode, 1 text after 4,096 tokens", "memory")
    assert rows == [("m Q4_0, 2 of 6 layers", "ours", "20, 39 %, **0.90 x**", "2 GB")]
    assert page_text.texts(found, "gguf") == ((), [])


def server(name: str, users: list[int], **leads) -> dict:
    points = [{"users": n, "texts": n, "first_s": 1.5 * n, "decode_tokens_s": 10.0, "tokens_s": 20.0, **leads} for n in users]
    return {"name": name, "weights": "MXFP4", "of": "", "options": "", "users": points}


def test_a_server_that_was_out_leaves_a_gap():
    about = {
        "version": "0",
        "model": "m",
        "layers": 2,
        "of_layers": 6,
        "prompt": 1,
        "new": 1,
        "read_gb_s": 1,
        "read_streams": 1,
    }
    servers = [server("ktmoe MXFP4", [1, 4]), server(page_text.SERVERS[1], [4], decode_lead=0.625, lead=3.0)]
    _, rows = page_text.vllm_servers([made(vllm_servers=ABOUT | about | {"server": servers})])
    assert rows == [
        ("1", "1.5 s; -, -", "10; -, -", "20; -, -"),
        ("4", "6 s; -, 6 s", "10; -, 0.62 x", "20; -, 3.00 x"),
    ]


def library(name: str, activations: str, *calls: tuple[int, float, float | None, float | None]) -> dict:
    def call(tokens, ms, lead, int8):
        return {"tokens": tokens, "ms": ms} | ({"lead": lead} if lead else {}) | ({"int8_lead": int8} if int8 else {})

    return {"name": name, "activations": activations, "calls": [call(*each) for each in calls]}


def test_the_fastest_other_library_of_each_call():
    """By the time of its call; 12 experts have top-6, so that 24 tokens an expert are 48 tokens."""
    libraries = [
        library("ktmoe a bf16", "bf16", (1, 2.0, None, None), (48, 9.0, None, None)),
        library("ktmoe a int8", "int8", (1, 1.0, 0.5, None), (48, 8.0, 0.9, None)),
        library("ggml plain", "int8", (1, 3.0, 1.5, 3.0), (48, 30.0, 3.3, 3.7)),
        library("torch BF16", "bf16", (1, 8.0, 4.0, None), (48, 18.0, 2.0, None)),
    ]
    entry = ABOUT | {"weights": "FP8", "experts": 12, "auto": "ktmoe a bf16", "int8": "ktmoe a int8", "library": libraries}
    heads, rows = page_layers.peers([made(peers=[entry])])
    assert heads[3:] == ("1 token", "16 tokens", "24 tokens an expert", "96 tokens an expert")
    assert rows == [
        ("FP8", "AMD EPYC 25-17", "bf16", "1.50 x ggml", "-", "2.00 x torch", "-"),
        ("FP8", "AMD EPYC 25-17", "int8", "3.00 x ggml", "-", "3.70 x ggml", "-"),
    ]


def test_ranges_of_dense_matrices():
    def call(model, name, leads):
        about = {"version": "1", "weights": "FP8", "activations": "bf16", "bytes": 1, "most_error": 0.1}
        ours = about | {"name": "ktmoe auto", "point": [{"rows": 1, "ms": 1.0, "of_read": leads[0] / 10, "of_peak": 0.1}]}
        points = [
            {"rows": rows, "ms": 1.0, "of_read": 0.1, "of_peak": 0.1, "lead": lead}
            for rows, lead in zip((1, 1024), leads, strict=True)
        ]
        theirs = about | {"name": "torch BF16", "point": points}
        shape = {"shapes": [[1, 1]], "dispatches": 1, "copies": 1, "weights": "FP8, UE8M0", "library": [ours, theirs]}
        return shape | {"model": model, "call": name}

    calls = [call("m", "o", (2.0, 1.0)), call("m", "k", (3.5, 1.001)), call("any", "64 x 64", (0.5, 0.5))]
    _, rows = page_layers.linear([made(linear_peers=ABOUT | {"call": calls})])
    assert rows == [
        ("FP8", "ktmoe auto", "20 to 35 % of read", "-", "-"),
        ("FP8", "torch BF16", "2.00 to 3.50 x", "-", "1.00 x"),
        ("64 x 64", "ktmoe auto", "5 % of read", "-", "-"),
        ("64 x 64", "torch BF16", "0.50 x", "-", "0.50 x"),
    ]


LAYER = {
    "model": "V4-Flash",
    "weights": "MXFP4",
    "backend": "avx2",
    "isa": "avx2",
    "activations": "int16",
    "rounding": "exact",
    "experts": 256,
    "copies": 1,
    "decode": [{"tokens": 1, "gb_s": 20.0, "of_read": 0.7}],
    "prefill": [{"tokens": 64, "gflop_s": 100.0, "of_peak": 0.5}, {"tokens": 1024, "gflop_s": 200.0, "of_peak": 0.6}],
    "per_expert": [
        {"rows": 96, "experts": 8, "gflop_s": 218.0, "of_peak": 0.97},
        {"rows": 6, "experts": 8, "gflop_s": 1.0, "of_peak": 0.1},
    ],
}


def test_layers_by_format_and_by_way():
    """A format's row is of what "auto" runs; a CPU with one way has no column."""
    folded = LAYER | {"rounding": "folded", "decode": []}
    both, one = made(layer=[folded, LAYER]), made(21, "Other", layer=[LAYER])
    heads, rows = page_layers.formats([both, one])
    assert heads[0] == "weights, on AMD EPYC 25-17"
    assert rows == [("MXFP4", "V4-Flash", "`avx2`", "20 GB/s, 70 %", "-", "200 GFLOP/s, 60 %, 1,024 tokens")]
    heads, rows = page_layers.ways([both, one])
    assert heads[3:] == ("AMD EPYC 25-17 (shares of 1 stream)",)
    assert [row[2:] for row in rows] == [("int16, folded", "-, -; 97 %"), ("int16", "70 %, -; 97 %")]


def trained(experts: int, commit: str) -> dict:
    """What make bench-training saves of a round in which ktmoe took 3 s, and another library 6 s."""
    about = {"about": {"resident bytes": 4e9}, "failure": ""}
    entry = {"best": "", "errors": {"y": 0.001, "grad_x": 0.002}, "most resident bytes": 5e9}
    seconds = {
        "ktmoe a": {"forward": 1.0, "backward": 2.0, "peak": 4e9},
        "torch": {"forward": 2.0, "backward": 4.0, "peak": 4e9},
    }
    point = {"tokens": 32, "flops": 2e9, "participants": dict.fromkeys(seconds, entry), "rounds": [seconds]}
    shape = {"num_experts": experts, "top_k": 6, "rank": 16}
    return {
        "date": "2026-11-23",
        "commit": commit,
        "shape": shape,
        "participants": dict.fromkeys(seconds, about),
        "points": [point],
    }


def test_training_keeps_runs_of_other_sizes():
    old = report.section(trained(64, "876543210"), {})
    found = report.section(trained(16, "012345678"), old)
    assert [(run["experts"], run["rows"]) for run in found["run"]] == [(16, 12), (64, 3)]
    assert report.section(trained(16, "012345678"), found) == found
    torch = found["run"][0]["participant"][1]
    assert (torch["forward_gflop_s"], torch["backward_of_peak"], torch["step_s"], torch["ratio"]) == (1.0, 0.125, 6.0, 2.0)
    results = made(training=found)
    _, rows = page_layers.training([results])
    assert rows[1] == ("16", "12", "torch", "25 %", "12 %", "6 s", "2.00 x", "4.0 + 1.0 GB")
    assert report.table([results])[1][1][-1] == "0.2 %"


def test_everything_is_printed(capsys):
    """Of one file, which a word names, or of all."""
    assert publish.main(["--show", "6-85"]) == 0
    of_one = capsys.readouterr().out
    assert "## V4-Flash in every way to compute\n\n| backend |" in of_one
    assert "Intel Xeon 6-85" in of_one
    assert "AMD EPYC" not in of_one
    assert publish.main(["--show"]) == 0
    of_all = capsys.readouterr().out
    assert all(results.label in of_all for results in results_file.read_all())
    assert publish.main(["--show", "no such CPU"]) == 2
    assert "expected a part of a file's name" in capsys.readouterr().err
    with pytest.raises(ResultsError, match="expected a part of a file's name"):
        document.full([], "x")


def test_training_goes_into_the_file_of_its_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "TRAINING", tmp_path / "training.json")
    cpu = made().data["cpu"]
    for experts in (64, 16):
        saved = trained(experts, "012345678") | {"machine": {"cpu": cpu["name"], "threads": 2}}
        publish.TRAINING.write_text(json.dumps(saved))
        path = publish.write(publish.training_alone(cpu, tmp_path), tmp_path)
    found = results_file.read(path).data
    assert ([run["experts"] for run in found["training"]["run"]], found["source"]) == ([16, 64], "make bench-training")
    with pytest.raises(ResultsError, match="expected a run on AMD EPYC, 4 threads, found one on AMD EPYC, 2 threads"):
        publish.training_alone(cpu | {"threads": 4}, tmp_path)
