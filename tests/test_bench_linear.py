"""bench/linear: calls of dense matrices, with peers made for this; only right ones are timed. What is published of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import footprints, publish, results_file, saved_run, summary
from bench.linear import __main__ as bench_linear
from bench.linear import page, report, session
from bench.linear.calls import Call, calls
from bench.linear.sample import sample
from bench.models import models
from bench.peers import environments
from bench.peers.peers import BF16, INT8, Peer, Way
from bench.peers.session import WORKERS
from bench.peers.workers.dispatches import Copies, inputs, outputs
from bench.results_file import Results, ResultsError
from ktmoe import reference
from ktmoe.matrix import Matrix
from ktmoe.weights.ggml import GGML

TINY = (
    Call("tiny", "two dispatches", "BF16", [[[64, 96], [130, 96]], [[96, 64]]], biases=True),
    Call("tiny", "own", "FP8, UE8M0", [[[128, 256], [128, 256]]], inputs="own", rows=(1,)),
    Call("tiny", "a cut block", "FP8", [[[200, 320]]], rows=(5,)),
)
WORKER = """
import os, signal, sys
sys.path.insert(0, {workers!r})
import numpy as np
from linear import LinearWorker, serve


def float32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Fake(LinearWorker):
    def __init__(self, way, threads):
        if way == "does not start":
            raise ValueError("the moon is not full")
        self.way = way

    def load(self, call, copies):
        self.own = call.inputs == "own"
        self.dispatches = [[(float32(each.bfloat16()), each.bias) for each in matrices] for matrices in call.dispatches]
        self.about = {{"version": "fake 1", "weights": "BF16", "bytes": 1000, "copies": copies}}

    def unload(self):
        self.dispatches = []

    def settings(self, rows):
        return ["slow", "fast"]

    def prepare(self, xs):
        if self.way == "one row alone" and len(xs[0]) > 1:
            raise ValueError("one row, please")
        self.xs = [float32(x) for x in xs]

    def run(self, setting, copy):
        for _ in range(50 if setting == "slow" else 1):
            self.y = []
            for x, matrices in zip(self.xs, self.dispatches, strict=True):
                for number, (matrix, bias) in enumerate(matrices):
                    y = (x[:, number] if self.own else x) @ matrix.T
                    self.y.append(y if bias is None else y + bias)
        if self.way == "dies" and len(self.xs[0]) > 1:
            os.kill(os.getpid(), signal.SIGILL)

    def output(self):
        return [y * np.float32({{"3 % off": 1.03, "1.5 % off": 1.015}}.get(self.way, 1)) for y in self.y]


serve(Fake)
"""
EVERY = {"right": BF16, "1.5 % off": INT8, "3 % off": INT8, "dies": BF16, "does not start": BF16, "one row alone": BF16}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A result as it is after a trip through JSON."""
    folder = tmp_path_factory.mktemp("linear")
    worker = folder / "worker_fake.py"
    worker.write_text(WORKER.format(workers=str(WORKERS)))
    fake, absent = Peer("fake", "fake", ()), Peer("absent", "absent", ())

    def interpreter(peer, progress):
        if peer is absent:
            raise environments.SetUpError("no such package")
        return Path(sys.executable)

    ways = tuple(Way(name, numerics, 16) for name, numerics in EVERY.items())
    of_fp8 = (Way("for FP8", BF16, 16),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "PEERS", (fake, absent))
        patch.setattr(session, "SCRIPTS", {"fake": (str(worker), ways, of_fp8), "absent": (str(worker), of_fp8, ())})
        patch.setattr(session, "LEAST_PAGES", 1 << 20)
        patch.setattr(footprints, "wanted_bytes", lambda: 200_000)
        patch.setattr(environments, "python", interpreter)
        words = ["--rows", "1", "5", "--seconds", "0.05", "--rounds", "4"]
        options = bench_linear._parser().parse_args(words)
        return json.loads(json.dumps(session.measure_all([*TINY], options, folder, lambda text: None)))


def timed(point: dict) -> set[str]:
    return {key for row in point["rounds"] for key in row["seconds"]}


def test_only_right_answers_are_timed(result):
    both, own, cut = result["calls"]
    one, five = both["points"]
    everyone = {"ktmoe auto", "fake right", "fake 1.5 % off"}
    assert timed(one) == everyone | {"fake dies", "fake one row alone"}
    assert timed(five) == everyone
    assert [point["rows"] for point in own["points"]] == [1]
    assert timed(own["points"][0]) == everyone | {"fake for FP8", "fake one row alone"}
    assert timed(cut["points"][0]) == everyone | {"fake for FP8"}
    for call in result["calls"]:
        for point in call["points"]:
            assert 3 <= len(point["rounds"]) <= 4
            assert point["participants"]["fake right"]["best"] == "fast"
            assert all(row["read"] > 0 and row["peaks"] for row in point["rounds"])


def test_who_is_out_is_told_why(result):
    both = result["calls"][0]
    one, five = (point["participants"] for point in both["points"])
    assert one["fake 3 % off"]["failure"].startswith("WRONG: error 3.")
    assert five["fake one row alone"]["failure"] == "ValueError: one row, please"
    assert five["fake dies"]["failure"] == "the worker was killed by SIGILL"
    assert both["participants"]["fake does not start"]["failure"] == "ValueError: the moon is not full"
    assert result["participants"]["absent for FP8"]["failure"] == "no such package"
    printed = "\n".join(report.notes(result))
    for why in ("SIGILL", "the moon is not full", "no such package", "5 rows: fake one row alone: ValueError"):
        assert why in printed
    assert set(report.wrong(result)) == {
        f"tiny, {name}, {rows} rows: fake 3 % off"
        for name, rows in (("two dispatches", 1), ("two dispatches", 5), ("own", 1), ("a cut block", 5))
    }


def test_figures(result):
    call = result["calls"][0]
    point = call["points"][1]
    found = session.figures(result, call, point, "fake right")
    ratios = sorted(row["seconds"]["fake right"] / row["seconds"]["ktmoe auto"] for row in point["rounds"])
    assert found["lead"] == pytest.approx(np.median(ratios))
    shares = [1000 / row["seconds"]["fake right"] / row["read"] for row in point["rounds"]]
    assert found["read_share"] == pytest.approx(np.median(shares))  # of its own bytes
    kernels = call["participants"]["ktmoe auto"]["about"]["kernels"]
    flops = 2 * 5 * (64 * 96 + 130 * 96 + 96 * 64)
    shares = [flops / row["seconds"]["fake right"] / row["peaks"][kernels] for row in point["rounds"]]
    assert found["peak_share"] == pytest.approx(np.median(shares))
    assert session.figures(result, call, point, "ktmoe auto")["lead"] is None
    assert session.figures(result, call, point, "fake dies") is None
    assert call["copies"] == -(-200_000 // (2 * (64 * 96 + 130 * 96 + 96 * 64)))


def test_from_the_result_to_the_page(result):
    entry = report.published(result)
    day = entry["date"]
    cpu = {"name": "AMD EPYC 9754 128-Core Processor", "family": 25, "model": 160, "threads": 8}
    data = {"date": day, "commit": "0123456789", "source": "make bench", "cpu": cpu, "linear_peers": entry}
    results_file.check(data, "made")
    heads, rows = page.peers_table([Results(data)])
    assert heads[-3:] == ("1 row", "5 rows", "distance from float64")
    named = {(row[0], row[3]): row for row in rows}
    assert ("tiny, two dispatches", "fake 3 % off") not in named
    assert named["tiny, own", "ktmoe auto"][5] == "equal"
    assert named["tiny, own", "fake right"][5:7] == ("BF16", "0.001 MB")
    assert named["tiny, own", "fake right"][8] == "-"
    assert " % of read, " in named["tiny, own", "fake right"][7]
    assert len(list(report.rows(result))) == sum(len(timed(point)) for call in result["calls"] for point in call["points"])


@pytest.mark.parametrize("call", TINY, ids=lambda call: call.call)
def test_a_sample_sees_one_wrong_output(call):
    dispatches, xs = call.make(), call.x(2)
    copies = Copies(dispatches, call.inputs, 2)
    wanted = sample(dispatches, xs, call.inputs)
    for copy in range(2):
        found = [np.array(y) for y in wanted.of(outputs(copies.run(inputs(xs), np.float32, copy=copy)))]
        assert [y.shape[0] for y in found] == len(call.shapes) * [2]
        assert wanted.of_bound(found, rounded=False) <= 1
        rounded = wanted.of(outputs(copies.run(inputs(xs), copy=copy)))
        assert wanted.of_bound(rounded, rounded=True) <= 1 < wanted.of_bound(rounded, rounded=False)
        found[-1][1, 3] += 0.01
        assert wanted.of_bound(found, rounded=True) > 1
    copies.close()


def test_the_calls_of_the_file():
    found = calls()
    assert len({call.id for call in found}) == len(found)
    for call in found:
        if call.model in models() and call.call in ("q, k, v", "attention layer", "output layer", "wq_a, wkv", "shared w1, w3"):
            assert call.dispatches[0][0][1] == models()[call.model].hidden
    attention = next(call for call in found if call.call == "attention layer")
    assert attention.nbytes == 2 * 2880 * (4096 + 512 + 512 + 4096)
    fp8 = next(call for call in found if call.call == "wo_a")
    assert fp8.nbytes == 8 * (1024 * 4096 + 8 * 32)
    assert {call.weights for call in found} == {"BF16", "FP8", "FP8, UE8M0"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('weights = "FP9"\ndispatches = [[[64, 64]]]', "m-c: weights 'FP9' are unknown"),
        ('weights = "BF16"\ndispatches = [[[64, 64], [64, 96]]]', "m-c: expected matrices .* of one k"),
        ('weights = "BF16"\ndispatches = [[[64, 64]]]\ninputs = "mine"', "m-c: inputs must be one of"),
        ('weights = "BF16"\ndispatches = [[[64, 64]]]\ninputs = "own"\nbiases = true', "m-c: expected no biases"),
        ('weights = "BF16"\nmatrices = [[[64, 64]]]', r"\[m\].*matrices"),
    ],
)
def test_fields_that_are_wrong(tmp_path, fields, message):
    path = tmp_path / "matrices.toml"
    path.write_text(f'[[m]]\ncall = "c"\n{fields}\n')
    with pytest.raises(ValueError, match=message):
        calls(path)


def test_asking_for_calls():
    def asked(*words: str) -> list[str]:
        return [call.call for call in bench_linear.chosen(bench_linear._parser().parse_args([*words]))]

    assert asked("--models", "gpt-oss*", "--calls", "o", "output*") == ["o", "output layer"]
    with pytest.raises(ValueError, match="no call is of these names; there are gpt-oss-20b: attention layer"):
        asked("--calls", "nothing")
    with pytest.raises(SystemExit):
        asked("--rows", "0")


def test_q8_0_blocks_of_the_ggml_worker(tmp_path):
    """Each weight is within half a step of its block's scale, which is the largest weight's part of 127."""
    numbers = np.random.default_rng(1).standard_normal((6, 96), np.float32)
    numbers[0, :32] = 0
    np.save(tmp_path / "numbers.npy", numbers)
    made = (
        "import sys, numpy as np, worker_linear_ggml as worker\n"
        "folder = sys.argv[1]\n"
        "np.save(folder + '/blocks.npy', worker.q8_0_blocks(np.load(folder + '/numbers.npy')))\n"
    )
    subprocess.run([sys.executable, "-c", made, tmp_path], cwd=WORKERS, check=True)
    records = np.load(tmp_path / "blocks.npy").reshape(6, -1)
    found = reference.dequantize(Matrix("blocks", GGML["Q8_0"], (6, 96), records))
    steps = np.repeat(np.abs(numbers.reshape(6, 3, 32)).max(axis=2) / 127, 32, axis=1)
    assert np.all(np.abs(found - numbers) <= 0.5 * steps + 127 * 2.0**-11 * steps)  # the scale is rounded to float16


def point(call: str, rows: int, **fields) -> dict:
    names = {"suite": "linear", "model": "tiny", "call": call, "weights": "BF16", "backend": "avx2", "isa": "avx2"}
    names |= {"activations": "bf16", "shapes": [[64, 96]], "dispatches": 1, "copies": 3, "cached": False, "nbytes": 12_345_678}
    numbers = {"ms": 0.123456, "read_gb_s": 28.44, "share_of_read_bandwidth": 0.951, "gflop_s": 210.4, "rows": rows}
    numbers |= {"share_of_multiply_peak": 0.912, "limit_read_gb_s": 30.0, "limit_gflop_s": 230.0, "footprint_of_llc": 4.0}
    errors = {"bound_of_output": 1e-5, "worst_error_of_bound": 0.25, "shares": [0.9]}
    return {"fullname": f"{call} {rows}", "extra_info": names | numbers | errors | fields}


def run(*points: dict) -> dict:
    about = {"version": "0.1.0", "compiler": "", "machine": {"threads": 8, "features": ["avx2"]}}
    cpu = {"brand_raw": "AMD EPYC 9754 128-Core Processor", "family": 25, "model": 160}
    return {
        "machine_info": {"cpu": cpu, "ktmoe": about},
        "commit_info": {"id": "0123456789abcdef", "dirty": False},
        "datetime": "2026-11-23T09:42:23.330271+00:00",
        "benchmarks": [*points],
    }


POINTS = (point("q", 1), point("q", 192), point("small", 1, cached=True, ms=0.0076543))


def test_a_saved_run_becomes_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "LINEAR", tmp_path / "absent")
    new = publish.linear_alone([run(*POINTS)], tmp_path)
    assert results_file.read(publish.write(new, tmp_path)) == new
    heads, rows = page.table([new])
    assert heads[-2:] == ("1 row", "192 rows")
    name = "AMD EPYC 9754 25-160, 8 threads"
    assert rows == [
        ("tiny, q", "BF16", "12.3 MB", "`avx2`", name, "0.123 ms, 28.4 GB/s, 95 %", "210 GFLOP/s, 91 %"),
        ("tiny, small", "BF16", "12.3 MB", "`avx2`", name, "7.65 µs", "-"),
    ]
    printed = summary.text([each["extra_info"] for each in POINTS])
    assert "Dense matrices" in printed
    assert "tiny, q" in printed
    with pytest.raises(ResultsError, match="has no dense matrices"):
        publish.linear_alone([run({"fullname": "failed", "extra_info": {}})], tmp_path)


def test_both_stay_in_the_file_until_they_are_measured_again(tmp_path, monkeypatch, result):
    for name, value in (("PEERS", {}), ("ENGINES", tmp_path / "absent"), ("LINEAR", tmp_path / "linear.json")):
        monkeypatch.setattr(publish, name, value)
    cpu = {**saved_run.cpu_of(run()["machine_info"])}
    publish.LINEAR.write_text(json.dumps(result | {"cpu": cpu}))
    publish.write(publish.with_others(saved_run.results([run(*POINTS)]), tmp_path), tmp_path)
    publish.LINEAR.write_text(json.dumps(result | {"cpu": cpu | {"threads": 2}, "date": "2026-12-24"}))
    load = {"fullname": "load", "extra_info": {"suite": "load", "work": "packing", "gb_s": 6.3}}
    kept = publish.with_others(saved_run.results([run(load)]), tmp_path)
    assert len(kept.data["linear"]["call"]) == 2
    assert kept.data["linear_peers"]["date"].isoformat() == result["date"]
    renewed = publish.with_others(saved_run.results([run(load, POINTS[0])]), tmp_path)
    assert len(renewed.data["linear"]["call"]) == 1
