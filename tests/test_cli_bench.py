"""`ktmoe bench` at small sizes: what it prints, the results file that it writes, and what it leaves out."""

from __future__ import annotations

import functools
import json
import re
import sys

import ml_dtypes
import numpy as np
import pytest

from bench import results_file
from ktmoe import MoELayer, backends, cli, measuring, synthetic
from ktmoe.backends.base import Backend
from ktmoe.cli import bench, units
from ktmoe.machine import memory

PREFILL_TOKENS = 12


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few calls, of a small layer."""
    made = functools.partial(synthetic.deepseek_v4_experts, hidden=64, intermediate=96)
    monkeypatch.setattr(synthetic, "deepseek_v4_experts", made)
    monkeypatch.setattr(bench, "DECODE", (1, 3))
    monkeypatch.setattr(bench, "PREFILL", (PREFILL_TOKENS,))
    monkeypatch.setattr("ktmoe.measuring.meter.LEAST_SECONDS", 1e-4)
    monkeypatch.setattr(measuring, "settled", functools.partial(measuring.LimitMeter, streams=2))


@pytest.fixture
def run(capsys):
    """A function that gives (exit status, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = cli.main(["bench", "--seconds", "0", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_json_and_the_results_file(run, tmp_path):
    file = tmp_path / "results.toml"
    status, out, err = run("--experts", 8, "--json", "--output", file)
    assert (status, err) == (0, "")
    data = json.loads(out)
    layer, calls = data["layer"], data["calls"]
    assert [(call["work"], call["tokens"]) for call in calls] == [("decode", 1), ("decode", 3), ("prefill", PREFILL_TOKENS)]
    with MoELayer(synthetic.deepseek_v4_experts(num_experts=8)) as packed:
        assert (layer["backend"], layer["activations"], layer["rounding"]) == (packed.backend, packed.activations, "exact")
        assert (layer["model"], layer["weights"], layer["experts"], layer["top_k"]) == ("V4-Flash", "MXFP4", 8, 6)
        for call in calls:
            assert call["tokens_s"] == pytest.approx(call["tokens"] / call["ms"] * 1e3)
            # six of eight experts a token: a call reads at least those of one token, at most all
            read = call["gb_s"] * 1e9 * call["ms"] / 1e3
            assert packed.nbytes * 6 / 8 * (1 - 1e-6) <= read <= packed.nbytes * (1 + 1e-6)
            flops = call["tokens"] * 6 * 2 * 3 * 64 * 96
            assert call["gflop_s"] == pytest.approx(flops / (call["ms"] / 1e3) / 1e9)
            assert 0 <= call["error_of_bound"] <= 1
            assert call["right"]
    assert data["not_measured"] == []
    written = results_file.read(file).data
    assert written["source"] == "ktmoe bench"
    assert written["cpu"] == data["cpu"]
    (entry,) = written["layer"]
    assert {name: entry[name] for name in entry if name not in ("decode", "prefill")}.items() <= layer.items()
    for work in ("decode", "prefill"):
        of_work = [call for call in calls if call["work"] == work]
        for call, kept in zip(of_work, entry[work], strict=True):
            assert kept == pytest.approx({name: call[name] for name in kept}, rel=1e-3)
    (limits,) = data["limits"]
    assert written["limits"]["read_gb_s"] == pytest.approx(limits["read_gb_s"], rel=1e-3)
    assert written["limits"]["read_streams"] == 2
    assert written["limits"]["multiply_gflop_s"] == pytest.approx({limits["isa"]: limits["multiply_gflop_s"]}, rel=1e-3)


def test_text_of_a_checkpoint(run, tmp_path):
    model = tmp_path / "model"
    synthetic.write_deepseek_v4(model, num_experts=7, hidden=64, intermediate=32, layers=2, mtp_layers=1, top_k=2)
    file = tmp_path / "results.toml"
    status, out, err = run(model, "--layer", "mtp.0", "--backend", "fp32_lut", "--output", file)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert "mtp.0.ffn.experts: 7 experts of 64 x 32, E2M1 with ue8m0 scales per 1x32, " in out
    assert ", top-2\n" in out
    assert "this machine: " in out
    rows = [line.split() for line in out.splitlines() if line.startswith("fp32_lut ")]
    assert [row[1] for row in rows] == ["1", "3", str(PREFILL_TOKENS)]
    (entry,) = results_file.read(file).entries("layer")
    assert (entry["model"], entry["backend"], entry["experts"]) == ("model", "fp32_lut", 7)
    status, out, _ = run(model, "--experts", 3, "--top-k", 5, "--json")
    assert (status, json.loads(out)["layer"]["experts"], json.loads(out)["layer"]["top_k"]) == (0, 3, 3)


def test_a_wrong_result_fails_and_is_not_written(run, monkeypatch, tmp_path):
    right = MoELayer.forward

    def wrong(layer, x, ids, weights, out=None):
        y = right(layer, x, ids, weights, out)
        return (y * 1.01).astype(y.dtype) if len(x) == 3 and y.dtype in (np.float32, ml_dtypes.bfloat16) else y

    monkeypatch.setattr(MoELayer, "forward", wrong)
    file = tmp_path / "results.toml"
    status, out, _ = run("--experts", 8, "--output", file)
    assert status == 1
    assert "decode: 3 tokens: an output is off by " in out
    assert out.count("WRONG: ") == 1
    assert not file.exists()


@pytest.mark.parametrize(("backend", "activations"), [("fp32_lut", "bf16"), ("avx2", "int16")])
def test_shares_that_cannot_be(run, monkeypatch, backend, activations):
    """Others used the machine while a limit was measured. AVX2's integer kernels have no peak of their own instruction."""
    if backend not in measuring.backends_for(synthetic.deepseek_v4_experts(num_experts=1)):
        pytest.skip(f"this CPU cannot run {backend}")
    monkeypatch.setattr(measuring.LimitMeter, "peak", lambda limits, seconds: 1.0)
    monkeypatch.setattr(measuring.LimitMeter, "read", lambda limits, seconds: 1e15)
    options = "--experts", 8, "--backend", backend, "--activations", activations
    status, out, _ = run(*options, "--json")
    disturbed = activations == "bf16" or json.loads(out)["layer"]["isa"] != "avx2"  # AVX-VNNI's have one
    assert (status, [call["disturbed"] for call in json.loads(out)["calls"]]) == (0, [disturbed] * 3)
    status, out, _ = run(*options)
    words = r"decode: 3 tokens: \d+% of peak: others used the machine while this limit was measured"
    assert status == 0
    assert bool(re.search(rf"^DISTURBED: {backend} {words}$", out, re.MULTILINE)) == disturbed
    monkeypatch.setattr(measuring.LimitMeter, "read", lambda limits, seconds: 1.0)
    assert all(call["disturbed"] for call in json.loads(run(*options, "--json")[1])["calls"])


def test_a_result_that_is_no_number(run, monkeypatch):
    monkeypatch.setattr(MoELayer, "forward", lambda layer, x, *rest: np.full_like(x, np.nan))
    status, out, _ = run("--experts", 8, "--json")
    assert status == 1
    assert [call["right"] for call in json.loads(out)["calls"]] == [False] * 3


def test_calls_that_take_too_long_are_left_out(run, monkeypatch):
    monkeypatch.setattr(bench, "PREFILL", (PREFILL_TOKENS, 1000, 2000))
    monkeypatch.setattr(bench, "LONGEST", 0.0)
    status, out, _ = run("--experts", 8, "--json")
    data = json.loads(out)
    assert (status, [call["tokens"] for call in data["calls"]]) == (0, [1, 3, PREFILL_TOKENS])
    (line,) = data["not_measured"]
    assert line.startswith("prefill of 1000, 2000 tokens: a call of 1000 would take up to ")


def test_little_memory_has_few_experts(run, monkeypatch):
    nbytes = synthetic.deepseek_v4_experts(num_experts=1).nbytes
    monkeypatch.setattr(bench, "SYNTHETIC_BYTES", 10 * nbytes)
    for available, experts in ((None, 10), (20 * nbytes, 8)):
        monkeypatch.setattr(memory, "available_bytes", lambda available=available: available)
        status, out, _ = run("--json")
        assert (status, json.loads(out)["layer"]["experts"]) == (0, experts)


def test_more_experts_than_memory_has(run, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1_000_000)
    words = r"ktmoe: 1000 synthetic experts need \S+ GB of memory, found 0.00100 GB; ask for fewer with --experts\n"
    status, out, err = run("--experts", 1000)
    assert (status, out) == (1, "")
    assert re.fullmatch(words, err)


def drawn(monkeypatch) -> list:
    """From now on, the figures that pictures are made of, when they are saved."""
    figure = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed").Figure
    found, save = [], figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *rest, **options: (found.append(self), save(self, *rest, **options)))
    return found


def test_a_picture(run, monkeypatch, tmp_path):
    """Its bars and lines are the figures of JSON, and its texts are the shares."""
    figures, file = drawn(monkeypatch), tmp_path / "picture.png"
    monkeypatch.setattr(bench, "PREFILL", (PREFILL_TOKENS, 16))
    monkeypatch.setattr(measuring.LimitMeter, "read", lambda limits, seconds: 2e12)
    monkeypatch.setattr(measuring.LimitMeter, "peak", lambda limits, seconds: 3e12)
    status, out, err = run("--experts", 8, "--json", "--picture", file)
    assert (status, err) == (0, "")
    assert file.read_bytes().startswith(b"\x89PNG")
    calls = json.loads(out)["calls"]
    (figure,) = figures
    for axes, work, rate, share in zip(
        figure.axes, ("decode", "prefill"), ("gb_s", "gflop_s"), ("of_read", "of_peak"), strict=True
    ):
        of_work = [call for call in calls if call["work"] == work]
        assert [bar.get_height() for bar in axes.patches] == pytest.approx([call[rate] for call in of_work])
        (lines,) = axes.collections
        limits = [segment[0][1] for segment in lines.get_segments()]
        assert limits == pytest.approx([2000 if work == "decode" else 3000] * len(of_work))
        assert [text.get_text() for text in axes.texts] == [units.percent(call[share]) for call in of_work]
        assert [label.get_text() for label in axes.get_xticklabels()] == [str(call["tokens"]) for call in of_work]
        assert axes.get_ylabel().startswith(rate[:2].upper())


def test_a_picture_says_what_was_disturbed(run, monkeypatch, tmp_path):
    figures = drawn(monkeypatch)
    for read, count in ((2e12, 0), (1.0, 3)):
        monkeypatch.setattr(measuring.LimitMeter, "read", lambda limits, seconds, read=read: read)
        monkeypatch.setattr(measuring.LimitMeter, "peak", lambda limits, seconds: 3e12)
        out = run("--experts", 8, "--picture", tmp_path / "a.png")[1]
        assert figures[-1].get_supxlabel().count("DISTURBED: ") == out.count("DISTURBED: ") == count


@pytest.mark.parametrize(("name", "begins"), [("a.svg", b"<?xml"), ("a.PDF", b"%PDF")])
def test_other_kinds_of_pictures(run, tmp_path, name, begins):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert run("--experts", 8, "--picture", tmp_path / name)[0] == 0
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_picture_of_no_known_kind(run, monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "run", None)  # nothing is measured
    for name, found in (("picture", "''"), ("picture.jpeg", "'.jpeg'")):
        status, out, err = run("--picture", tmp_path / name)
        assert (status, out) == (1, "")
        assert err == f"ktmoe: {tmp_path / name}: expected a picture's name that ends in .png, .svg, .pdf, found {found}\n"
    status, out, err = run("--picture", tmp_path / "absent" / "a.png")
    assert (status, out) == (1, "")
    assert "expected a folder that can be written to" in err


def test_without_matplotlib(run, monkeypatch, tmp_path):
    """It is needed for --picture alone."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("--experts", 8)[0] == 0
    monkeypatch.setattr(measuring, "run", None)
    status, out, err = run("--picture", tmp_path / "a.png")
    assert (status, out) == (1, "")
    install = "pip install 'ktmoe[picture]', or '.[picture]' in a clone of ktmoe"
    assert err == f"ktmoe: --picture needs matplotlib, which is not installed: {install}\n"


def test_a_wrong_result_has_no_picture(run, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setattr(MoELayer, "forward", lambda layer, x, *rest: np.full_like(x, np.nan))
    assert run("--experts", 8, "--picture", tmp_path / "a.png")[0] == 1
    assert not list(tmp_path.iterdir())


class Elsewhere(Backend):
    """A backend without a kernel table."""

    def pack(self, experts, plan, progress=None):
        raise AssertionError


def test_errors(run, monkeypatch, tmp_path):
    backends.register("elsewhere", Elsewhere())
    try:
        found = run("--experts", 8, "--backend", "elsewhere")
    finally:
        backends.unregister("elsewhere")
    assert found == (
        1,
        "",
        "ktmoe: backend 'elsewhere' (asked for by name) has no kernel table: its limits cannot be measured\n",
    )
    status, out, err = run("--backend", "none", "--experts", 8)
    assert (status, out) == (1, "")
    assert "'none'" in err
    monkeypatch.setattr(measuring, "run", None)  # nothing is measured before it is known where to write
    status, out, err = run("--output", tmp_path / "absent" / "results.toml")
    assert (status, out) == (1, "")
    assert f"{tmp_path}/absent/results.toml: expected a folder that can be written to, found {tmp_path}/absent" in err
    synthetic.write_deepseek_v4(tmp_path, num_experts=2, hidden=64, intermediate=32, top_k=3)
    status, out, err = run(tmp_path)
    assert (status, out) == (1, "")
    assert "num_experts_per_tok of config.json: expected a whole number from 1 to 2, found 3" in err
