"""bench/results: its files are as bench/README.md says, docs/performance.md shows them, and a saved run becomes one."""

from __future__ import annotations

import copy
import datetime
import json
import os
import re

import pytest

from bench import document, full_tables, machine, publish, results_file, runs, saved_run
from bench.peers import published as of_peers
from bench.results_file import FOLDER, Results, ResultsError

FILES = sorted(FOLDER.glob("*"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_is_as_the_schema_has_it(path):
    results = results_file.read(path)
    assert path.name == results.file_name
    assert re.match(r"[0-9a-f]{9}(, with uncommitted changes)?$", results.data["commit"])


def test_cpus_are_told_apart():
    labels = [results.label for results in results_file.read_all()]
    assert len(set(labels)) == len(labels) > 0


def test_the_page_shows_the_files():
    """make results writes the tables."""
    for page, tables in document.PAGES.items():
        text = page.read_text()
        assert document.filled(text, results_file.read_all(), tables) == text


def test_each_file_is_in_the_page():
    text = document.PAGE.read_text()
    for results in results_file.read_all():
        assert f"| {results.label} |" in text
    assert set(re.findall(r"<!-- table: (.*) -->", text)) == set(document.TABLES)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("Intel(R) Xeon(R) Processor", "Intel Xeon"),
        ("Intel(R) Xeon(R) Platinum 8480+", "Intel Xeon Platinum 8480+"),
        ("Intel(R) Xeon(R) CPU @ 2.50GHz", "Intel Xeon"),
        ("AMD Ryzen 9 9950X 16-Core Processor", "AMD Ryzen 9 9950X"),
        ("Intel(R) Core(TM) Ultra 9 285K", "Intel Core Ultra 9 285K"),
    ],
)
def test_a_cpu_name_without_what_says_nothing(name, short):
    assert results_file.short_name(name) == short


def made(**changed) -> dict:
    """A small results file's fields."""
    layer = {
        "model": "V4-Flash",
        "weights": "MXFP4",
        "backend": "avx2",
        "isa": "avx2",
        "activations": "int16",
        "rounding": "exact",
        "experts": 256,
        "copies": 1,
        "decode": [{"tokens": 1, "ms": 3.5, "gb_s": 22.9, "of_read": 0.74}],
        "per_expert": [{"rows": 24, "experts": 64, "gflop_s": 218.0, "of_peak": 0.97}],
    }
    day = datetime.date(2026, 11, 22)
    cpu = {"name": "AMD EPYC 9754 128-Core Processor", "family": 25, "model": 160, "threads": 8}
    return {"date": day, "commit": "0123456789", "source": "make bench", "cpu": cpu, "layer": [layer], **changed}


def test_tables_of_two_cpus():
    """The same way to compute stands below itself; pool and loading have a column for each CPU."""
    other = made(pool=[{"work": "barrier", "us": 0.25}])
    other["cpu"] = {**other["cpu"], "name": "Intel(R) Xeon(R) Processor", "family": 6, "model": 207}
    both = [
        Results(made(pool=[{"work": "barrier", "us": 1.5}, {"work": "call", "us": 60.0, "of_call": 0.018}])),
        Results(other),
    ]
    _, rows = full_tables.ways(both)
    assert rows == [
        ("`avx2`", "avx2", "int16", label, "22.9 GB/s, 74 % of 1 stream", "-", "-", "218 GFLOP/s, 97 %", "-")
        for label in ("AMD EPYC 9754 25-160, 8 threads", "Intel Xeon 6-207, 8 threads")
    ]
    layer = without("layer", 0, "per_expert")["layer"]
    heads, rows = full_tables.ways([Results(made(layer=layer))])
    assert heads[-2:] == ("16 tokens", "bound")
    assert rows[0][-2:] == ("-", "-")
    heads, rows = full_tables.pool(both)
    assert heads[1:] == ("AMD EPYC 9754 25-160, 8 threads", "Intel Xeon 6-207, 8 threads")
    assert rows == [("barrier", "1.5 µs", "0.25 µs"), ("call", "60 µs, 1.8 % of the call", "-")]


def without(*path):
    """Fields that lack one."""
    data = copy.deepcopy(made())
    *parents, last = path
    inner = data
    for key in parents:
        inner = inner[key]
    del inner[last]
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (without("date"), r"file: unknown fields \[\], missing fields \['date'\]; known are date, "),
        (made(speed=1), r"file: unknown fields \['speed'\]"),
        (without("cpu", "model"), r"file: cpu: unknown fields \[\], missing fields \['model'\]"),
        (without("layer", 0, "isa"), r"file: layer\[0\]: unknown fields \[\], missing fields \['isa'\]"),
        (made(commit=7), "file: commit: expected a str, found 7"),
        (made(layer={}), r"file: layer: expected a list, found \{\}"),
        (made(cpu=[]), r"file: cpu: expected a table, found \[\]"),
        (made(pool=[{"work": "x", "us": -1}]), r"file: pool\[0\]: us: expected a number, found -1"),
        (made(pool=[{"work": "x", "us": float("nan")}]), r"us: expected a number, found nan"),
        (
            made(peers=[{"date": 7}]),
            r"peers\[0\]: unknown fields \[\], missing fields \['experts', 'library', 'source', 'weights'\]",
        ),
        (made(pool=[{"work": "x", "us": True}]), r"us: expected a number, found True"),
        (made(limits={"multiply_gflop_s": {"amx": "fast"}}), r"multiply_gflop_s: amx: expected a number, found 'fast'"),
    ],
)
def test_what_a_file_must_not_say(data, message):
    results_file.check(made(), "file")
    with pytest.raises(ResultsError, match=message):
        results_file.check(data, "file")


def test_a_file_that_is_no_toml(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("date = ")
    with pytest.raises(ResultsError, match=f"^{re.escape(str(path))}: "):
        results_file.read(path)


def test_tables_replace_what_stands_between_marks():
    text = "before\n<!-- table: a -->\nold\n<!-- end of a -->\nafter"
    assert document.replaced(text, "a", "new\\1\n") == text.replace("old", "new\\1")
    for broken in ("no marks", "<!-- table: a -->\nno end"):
        with pytest.raises(ValueError, match="expected the marks '<!-- table: a -->' and '<!-- end of a -->'"):
            document.replaced(broken, "a", "new\n")


# A saved run

CALL = {
    "ms": 1.23456,
    "read_gb_s": 22.98765,
    "share_of_read_bandwidth": 0.7412345,
    "gflop_s": 218.0,
    "share_of_multiply_peak": 0.9,
    "limit_read_gb_s": 31.0,
    "limit_gflop_s": 240.0,
    "bound_of_output": 0.00097,
}
WAY = {"backend": "avx2", "isa": "avx2", "activations": "int16", "rounding": "exact"}
LAYER = {"suite": "layer", "model": "V4-Flash", "routing": "random", "num_experts": 256, "layers": 1}


def point(name, **fields) -> dict:
    return {"fullname": name, "extra_info": {"shares": [0.7], **fields}}


def run(*points, commit="0123456789abcdef", dirty=False, threads=8) -> dict:
    """What pytest-benchmark saves."""
    about = {"version": "0.1.0", "compiler": "GCC 14.2", "machine": {"threads": threads, "features": ["avx2", "fma"]}}
    cpu = {"brand_raw": "AMD EPYC 9754 128-Core Processor", "family": 25, "model": 160, "stepping": 2, "bits": 64}
    return {
        "machine_info": {"cpu": cpu, "ktmoe": about},
        "commit_info": {"id": commit, "dirty": dirty},
        "datetime": "2026-11-22T09:42:23.330271+00:00",
        "benchmarks": [*points],
    }


POINTS = (
    point("a", work="decode", tokens=1, among=256, **LAYER, **WAY, **CALL),
    point("b", work="decode", tokens=1, among=256, **{**LAYER, "routing": "skewed"}, **WAY, **CALL),
    point("c", work="prefill", tokens=64, among=256, **LAYER, **WAY, **CALL),
    point("d", work="24 an expert", tokens=128, among=32, **LAYER, **WAY, **CALL),
    point("e", suite="kernels", weights="INT4", scales="of sums", source="L2", rows=192, called="chosen", **WAY, **CALL),
    point("f", suite="kernels", weights="INT4", scales="of sums", source="L2", rows=4, called="many", **WAY, **CALL),
    point("g", suite="pool", work="a call", us=61.23456, handoff_us=0.06, most_us=(60.0, 70.0), share_of_call=0.0181),
    point("h", suite="load", work="packing", gb_s=6.3, of_memcpy=0.51, figure="text"),
    {"fullname": "failed", "extra_info": {}},
)


def test_a_saved_run_becomes_a_file(tmp_path):
    results = saved_run.results([run(*POINTS)])
    call = {"ms": 1.235, "gb_s": 22.99, "of_read": 0.7412, "gflop_s": 218.0, "of_peak": 0.9}
    way = {**WAY, "weights": "INT4", "scales": "of sums"}
    del way["backend"], way["rounding"]
    assert results.data == {
        "date": datetime.date(2026, 11, 22),
        "commit": "012345678",
        "source": "make bench",
        "ktmoe": "0.1.0",
        "compiler": "GCC 14.2",
        "cpu": {
            "name": "AMD EPYC 9754 128-Core Processor",
            "family": 25,
            "model": 160,
            "stepping": 2,
            "threads": 8,
            "features": ["avx2", "fma"],
        },
        "limits": {"read_gb_s": 31.0, "handoff_us": 0.06, "multiply_gflop_s": {"avx2": 240.0}},
        "layer": [
            {
                **WAY,
                "model": "V4-Flash",
                "weights": "MXFP4",
                "experts": 256,
                "copies": 1,
                "bound": 0.00097,
                "decode": [{"tokens": 1, **call}],
                "prefill": [{"tokens": 64, **call}],
                "per_expert": [{"rows": 24, "experts": 32, **call}],
            }
        ],
        "kernel": [{**way, "l2": [{"rows": 192, **call}]}],
        "pool": [{"work": "a call", "us": 61.23, "low_us": 60.0, "high_us": 70.0, "of_call": 0.0181}],
        "load": [{"work": "packing", "gb_s": 6.3, "of_memcpy": 0.51}],
    }
    path = publish.write(results, tmp_path)
    assert path.name == "amd-epyc-9754-25-160-8-threads.toml"
    assert results_file.read(path) == results


def test_runs_are_joined_where_they_belong_together():
    parts = run(*POINTS[:2]), run(*POINTS[2:])
    assert saved_run.results([*parts]) == saved_run.results([run(*POINTS)])
    for other in (run(*POINTS, commit="fedcba9876543210"), run(*POINTS, dirty=True), run(*POINTS, threads=4)):
        with pytest.raises(ResultsError, match="different commits or machines"):
            saved_run.results([run(*POINTS), other])
    assert saved_run.results([run(*POINTS, dirty=True)]).data["commit"] == "012345678, with uncommitted changes"


def test_a_run_of_before_is_refused():
    old = run(*POINTS)
    del old["machine_info"]["ktmoe"]
    with pytest.raises(ResultsError, match="does not say which CPU"):
        saved_run.results([old])


def test_the_command(tmp_path, monkeypatch, capsys):
    """It takes the last run, or those that are named, and writes file and page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(document, "PAGE", tmp_path / "page.md")
    written = []
    monkeypatch.setattr(document, "write", lambda: written.append("page"))
    monkeypatch.setattr(publish, "write", lambda results: written.append(results.data["pool"][0]["us"]))
    monkeypatch.setattr(publish, "with_others", lambda results: results)
    assert publish.main([]) == 2
    assert "expected a saved run, found none; make bench saves one" in capsys.readouterr().err
    folder = tmp_path / runs.STORAGE / "Linux"
    folder.mkdir(parents=True)
    for number, us in ((1, 50.0), (2, 60.0)):
        latency = point("g", suite="pool", work="a call", us=us, handoff_us=0.06, most_us=(1, 2))
        path = folder / f"{number:04}_commit.json"
        path.write_text(json.dumps(run(latency)))
        os.utime(path, (number, number))
    assert publish.main([]) == 0
    assert publish.main(["1"]) == 0
    assert publish.main(["--tables"]) == 0
    assert written == [60.0, "page", 50.0, "page", "page"]


def test_which_compiler_built_a_module():
    assert machine.compiler(b"\0GCC: (Debian 12.2.0-14) 12.2.0\0") == "GCC 12.2.0"
    assert machine.compiler(b"\0Debian clang version 14.0.6\0") == "clang version 14.0.6"
    assert machine.compiler(b"\0nothing\0") == ""


# What make bench-peers saved


def peers_run(weights="MXFP4", cpu="AMD EPYC 9754 128-Core Processor") -> dict:
    took = ({"ktmoe avx2 int16": seconds, "ggml repack": 2 * seconds} for seconds in (1e-3, 2e-3))
    rounds = [{"batch": 0, "read": 3e10, "peaks": {}, "seconds": seconds} for seconds in took]
    errors = {"ktmoe avx2 int16": {"error": 0.0016}, "ggml repack": {"error": 0.012}, "torch BF16": {"failure": "too large"}}
    about = {"ggml repack": {}, "torch BF16": {}, "ktmoe avx2 int16": {"version": "0.1.0"}}
    return {
        "date": "2026-11-22",
        "commit": "012345678",
        "machine": {"cpu": cpu, "threads": 8},
        "shape": {"weights": weights, "experts": 64, "bytes an expert": 10},
        "base": "ktmoe avx2 int16",
        "participants": {name: {"numerics": "int8", "about": words, "failure": ""} for name, words in about.items()},
        "points": [{"name": "decode-4", "tokens": 4, "flops": 1e9, "experts": [6], "participants": errors, "rounds": rounds}],
    }


def test_what_the_peers_took():
    ours = {"name": "ktmoe avx2 int16", "version": "0.1.0", "least_error": 0.0016, "most_error": 0.0016}
    theirs = {"name": "ggml repack", "least_error": 0.012, "most_error": 0.012}
    assert of_peers.section(peers_run()) == {
        "weights": "MXFP4",
        "auto": "ktmoe avx2 int16",
        "date": datetime.date(2026, 11, 22),
        "commit": "012345678",
        "source": "make bench-peers",
        "experts": 64,
        "library": [
            {**ours, "activations": "int8", "calls": [{"tokens": 4, "ms": 1.5}]},
            {**theirs, "activations": "int8", "calls": [{"tokens": 4, "ms": 3.0, "lead": 2.0}]},
        ],
    }
    results = Results(made(peers=[of_peers.section(peers_run("INT4")), of_peers.section(peers_run())]))
    heads, rows = full_tables.peers("MXFP4", [results])
    assert heads[4:] == ("4 tokens", "distance from float64")
    assert [row[1:4] for row in rows] == [("64", "ktmoe avx2 int16, auto", "int8"), ("64", "ggml repack", "int8")]
    assert rows[1][4:] == ("3 ms, 2.0 x", "1.2 %")
    assert full_tables.peers("FP8", [results])[1] == []


def test_the_page_compares_a_peer_of_int8_with_ktmoes_int8_too():
    made_of = peers_run()
    for row in made_of["points"][0]["rounds"]:
        row["seconds"]["ktmoe avx2 int8"] = row["seconds"]["ktmoe avx2 int16"] / 2
    made_of["points"][0]["participants"]["ktmoe avx2 int8"] = {"error": 0.01}
    made_of["participants"]["ktmoe avx2 int8"] = {"numerics": "int8", "about": {}, "failure": ""}
    made_of["participants"]["ktmoe avx2 int16"]["numerics"] = "int16"
    saved = of_peers.section(made_of | {"int8_base": "ktmoe avx2 int8"})
    assert saved["int8"] == "ktmoe avx2 int8"
    _, rows = full_tables.peers("MXFP4", [Results(made(peers=[saved]))])
    assert [(row[2], row[4]) for row in rows] == [
        ("ktmoe avx2 int16, auto", "1.5 ms"),
        ("ktmoe avx2 int8, auto for int8", "0.75 ms, 0.5 x"),
        ("ggml repack", "3 ms, 2.0 x, int8 4.0 x"),
    ]


def test_peers_stay_in_the_file_until_they_are_measured_again(tmp_path, monkeypatch):
    """Each format by itself."""
    monkeypatch.chdir(tmp_path)
    fresh = Results(made())
    assert publish.with_others(fresh, tmp_path) == fresh
    old = [of_peers.section(peers_run(weights)) | {"commit": "876543210"} for weights in ("MXFP4", "INT4")]
    publish.write(Results(made(peers=old)), tmp_path)
    assert publish.with_others(fresh, tmp_path).data["peers"] == old
    with pytest.raises(ResultsError, match="make bench-peers"):
        publish.peers_alone(fresh.data["cpu"], tmp_path / "elsewhere")
    runs.STORAGE.mkdir()
    publish.PEERS["INT4"].write_text(json.dumps(peers_run("INT4", cpu="another CPU")))
    assert publish.with_others(fresh, tmp_path).data["peers"] == old
    for weights in ("INT4", "BF16"):
        publish.PEERS[weights].write_text(json.dumps(peers_run(weights)))
    new = [of_peers.section(peers_run(weights)) for weights in ("BF16", "INT4")]
    assert publish.with_others(fresh, tmp_path).data["peers"] == [old[0], *new]
    beside = publish.peers_alone(fresh.data["cpu"], tmp_path).data
    assert (beside["peers"], beside["date"]) == ([old[0], *new], made()["date"])
    alone = publish.peers_alone(fresh.data["cpu"], tmp_path / "elsewhere").data
    assert (alone["peers"], alone["source"]) == (new, "make bench-peers")


def test_engines_stay_in_the_file_that_make_bench_writes_again(tmp_path, monkeypatch):
    """A file that has nothing else so far, too, as make bench-engines makes it."""
    monkeypatch.chdir(tmp_path)
    fresh, engines = (
        saved_run.results([run(*POINTS)]),
        {"date": made()["date"], "source": "make bench-engines", "comparison": []},
    )
    alone = {name: fresh.data[name] for name in ("date", "commit", "source", "cpu")} | {"engines": engines}
    publish.write(Results(alone), tmp_path)
    assert publish.with_others(fresh, tmp_path).data == {**fresh.data, "engines": engines}


# The streams that reading was measured with


def test_shares_of_one_stream_are_told_apart():
    """In every table that has shares of the read bandwidth, by the file and not by the CPU."""
    old, new = Results(made()), Results(made(limits={"read_gb_s": 31.0, "read_streams": 4}))
    assert (old.of_one_stream(), new.of_one_stream()) == (True, False)
    heads, rows = full_tables.cpus([old, new, Results(without("layer"))])
    assert [row[heads.index("streams")] for row in rows] == ["1 alone", "4", "-"]
    _, rows = full_tables.ways([old, new])
    assert [row[4] for row in rows] == ["22.9 GB/s, 74 % of 1 stream", "22.9 GB/s, 74 %"]
    assert all(row[7] == "218 GFLOP/s, 97 %" for row in rows)


def test_a_run_says_how_many_streams_were_best():
    """What most points found."""
    points = [point(f"{n}", work="decode", tokens=1, **LAYER, **WAY, **CALL, read_streams=n) for n in (4, 8)]
    points.append(point("c", work="prefill", tokens=64, **LAYER, **WAY, **CALL, read_streams=8))
    assert saved_run.results([run(*points)]).data["limits"]["read_streams"] == 8


def test_the_commit_is_what_git_says():
    commit = machine.commit()
    assert commit == "" or re.match(r"[0-9a-f]{9,}(, with uncommitted changes)?$", commit)
