"""bench/peers with peers made for this: who is wrong, dies or cannot be installed is in the result with the reason, untimed."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

import ktmoe
from bench.models import Model
from bench.peers import __main__ as peers
from bench.peers import environments, formats, report, rounds, session
from bench.peers.peers import BF16, INT8, PEERS, Peer, Way
from bench.peers.processes import Process, WorkerError
from bench.peers.workers import protocol, weights
from ktmoe import reference
from ktmoe.weights.ggml import TYPES

MODEL = Model("small", "MXFP4", hidden=128, intermediate=96, experts=8, top_k=2)
WORKER = """
import os, signal, sys
sys.path.insert(0, {workers!r})
import ktmoe, ml_dtypes, numpy as np
from ktmoe import MoELayer
from protocol import Calls, Worker, serve

class Fake(Worker):
    about = {{"version": "fake 1"}}
    def __init__(self, way, model, threads):
        if way == "does not load":
            raise ValueError("the moon is not full")
        print("a library's noise")
        self.way, self.layer = way, MoELayer(ktmoe.load_experts(model.folder, 0), "fp32_lut")
    def settings(self, tokens):
        return ["slow", "fast"]
    def prepare(self, batches):
        if self.way == "one token only" and batches.tokens > 1:
            raise ValueError("one token, please")
        calls = FakeCalls()
        calls.worker, calls.batches = self, batches
        return calls

class FakeCalls(Calls):
    def stage(self, batch):
        self.batch = batch
    def run(self, setting):
        b, layer = self.batches, self.worker.layer
        for _ in range(30 if setting == "slow" else 1):
            self.y = layer.forward(b.x.view(ml_dtypes.bfloat16), b.ids[self.batch], b.weights[self.batch])
        if self.worker.way == "dies" and b.tokens > 1:
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGILL)
    def output(self):
        y = self.y.astype(np.float32)
        return y * np.float32({{"3 % off": 1.03, "1.5 % off": 1.015, "NaN": np.nan}}.get(self.worker.way, 1))

serve(Fake)
"""
WAYS = {
    "right": BF16,
    "1.5 % off": INT8,
    "3 % off": INT8,
    "NaN": BF16,
    "dies": BF16,
    "does not load": BF16,
    "one token only": BF16,
}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The result of one decode and one prefill point, as it is after a trip through JSON."""
    folder = tmp_path_factory.mktemp("peers")
    worker = folder / "worker_fake.py"
    worker.write_text(WORKER.format(workers=str(session.WORKERS)))
    ways = {"MXFP4": tuple(Way(name, numerics, 4.25) for name, numerics in WAYS.items())}
    fake = Peer("fake", "fake", (), worker=str(worker), ways=ways, notes={"MXFP4": ("a fake",), "BF16": ("not here",)})
    ways = {"MXFP4": (Way("way", BF16, 4.25),), "BF16": (Way("another", BF16, 16),)}
    absent = Peer("absent", "absent", (("--no-index", "no-such-package"),), worker=str(worker), ways=ways)
    words = ["run", "--seconds", "0.1", "--rounds", "4", "--points", "decode-1", "--points", "prefill-6"]
    words += ["--only", "fake *", "--only", "absent *", "--only", "ktmoe fp32_lut bf16"]
    model = folder / "model"
    install = environments.python

    def create(home, clear, with_pip):
        """Runs this environment's pip, which refuses as one of its own would: making that one takes seconds."""
        interpreter = home / "bin" / "python"
        interpreter.parent.mkdir(parents=True)
        interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        interpreter.chmod(0o755)

    def interpreter(peer, progress):
        return Path(sys.executable) if peer is fake else install(peer, progress, folder / "environments")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "PEERS", (fake, absent))
        patch.setattr(environments, "python", interpreter)
        patch.setattr(environments.venv, "create", create)
        measured = session.measure_all(MODEL, peers._parser().parse_args(words), model, lambda text: None)
    return json.loads(json.dumps(measured))


def timed(point) -> set[str]:
    return {key for row in point["rounds"] for key in row["seconds"]}


def test_only_right_answers_are_timed(result):
    ours = next(key for key in result["participants"] if key.startswith("ktmoe fp32_lut"))
    assert result["base"] == ours
    decode, prefill = result["points"]
    assert timed(decode) == {ours, "fake right", "fake 1.5 % off", "fake dies", "fake one token only"}
    assert timed(prefill) == {ours, "fake right", "fake 1.5 % off"}
    for point in result["points"]:
        assert 3 <= len(point["rounds"]) <= 4
        assert all(ours in row["seconds"] and row["read"] > 0 and row["peaks"] for row in point["rounds"])


def test_who_is_out_is_told_why(result):
    decode, prefill = (point["participants"] for point in result["points"])
    assert re.fullmatch(r"WRONG: error [23]\.\d\d% of the output, more than 2%", decode["fake 3 % off"]["failure"])
    assert decode["fake NaN"]["failure"].startswith("WRONG: error inf")
    assert prefill["fake dies"]["failure"] == "the worker was killed by SIGILL: last words"
    assert prefill["fake one token only"]["failure"] == "ValueError: one token, please"
    assert result["participants"]["fake does not load"]["failure"] == "ValueError: the moon is not full"
    assert "pip install --no-index no-such-package failed" in result["participants"]["absent way"]["failure"]
    assert "absent another" not in result["participants"]
    assert result["notes"] == ["a fake"]
    assert report.wrong(result) == [f"{name}: fake {way}" for name in ("decode-1", "prefill-6") for way in ("3 % off", "NaN")]


def test_an_environment_without_its_python_is_made_again(tmp_path, monkeypatch):
    """What it links to may be gone."""
    environment, made = environments.Environment("nobody", "nobody", ()), []

    def create(home, clear, with_pip):
        interpreter = home / "bin" / "python"
        interpreter.parent.mkdir(parents=True, exist_ok=True)
        interpreter.unlink(missing_ok=True)
        interpreter.symlink_to(sys.executable)
        made.append(home)

    monkeypatch.setattr(environments.venv, "create", create)
    for _ in range(2):
        interpreter = environments.python(environment, lambda text: None, tmp_path)
        assert made == [tmp_path / "nobody"]
    interpreter.unlink()
    interpreter.symlink_to(tmp_path / "gone")
    assert environments.python(environment, lambda text: None, tmp_path).exists()
    assert len(made) == 2


def test_an_environment_sees_the_packages_of_its_base(tmp_path, monkeypatch):
    def create(home, clear, with_pip):
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").symlink_to(sys.executable)
        environments.packages(environments.Environment(home.name, "", ()), tmp_path).mkdir(parents=True)

    monkeypatch.setattr(environments.venv, "create", create)
    base = environments.Environment("base", "base", ())
    above, said = environments.Environment("above", "above", (), base=base), []
    environments.python(above, said.append, tmp_path)
    assert said == ["installing base", "installing above"]
    assert (environments.packages(above, tmp_path) / "base.pth").read_text() == f"{environments.packages(base, tmp_path)}\n"


def test_an_installation_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    def run(command, timeout, **others):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(environments.venv, "create", lambda home, clear, with_pip: home.mkdir())
    monkeypatch.setattr(environments.subprocess, "run", run)
    with pytest.raises(environments.SetUpError, match="pip install this took more than 600 seconds"):
        environments.python(environments.Environment("slow", "slow", (("this",),)), lambda text: None, tmp_path)


def test_the_fastest_setting_is_taken(result):
    for point in result["points"]:
        assert point["participants"]["fake right"]["best"] == "fast"


def test_the_table_has_all_of_them(result):
    console = Console(width=200, record=True, force_terminal=True)
    with console.capture() as capture:
        report.show(result, console)
    text = capture.get()
    for word in (
        "fake right",
        "decode-1",
        "prefill-6",
        "out: decode-1: fake NaN: WRONG",
        "SIGILL: last words",
        "moon",
    ):
        assert word in text


def test_a_peer_of_int8_is_compared_with_ktmoes_int8_too():
    seconds = {"ktmoe exact": 2.0, "ktmoe int8": 1.0, "peer bf16": 4.0, "peer int8": 3.0}
    numerics = {"peer int8": "int8, per 256"}
    result = {
        "shape": {"bytes an expert": 10},
        "base": "ktmoe exact",
        "int8_base": "ktmoe int8",
        "participants": {key: {"about": {}, "numerics": numerics.get(key, key.split()[1])} for key in seconds},
    }
    point = {"flops": 4.0, "tokens": 4, "experts": [6], "rounds": [{"batch": 0, "read": 60.0, "peaks": {}, "seconds": seconds}]}
    found = {key: rounds.figures(result, point, key) for key in seconds}
    assert [found[key]["ratio"] for key in seconds] == [None, 0.5, 2.0, 1.5]
    assert [found[key]["int8_ratio"] for key in seconds] == [None, None, None, 3.0]


def test_ktmoes_int8_is_what_it_runs_if_int8_is_asked_for():
    ours = [rounds.Participant("ktmoe", Way(name, name.split()[1], 4), bound=True) for name in ("a bf16", "b int8", "c int8")]
    peer = rounds.Participant("ggml", Way("plain", INT8, 4))
    assert session._int8([peer, *ours]) is ours[1]
    ours[1].fail("it fell ill")
    assert session._int8([peer, *ours]) is ours[2]
    assert session._int8([peer, ours[0]]) is None


def test_a_ratio_is_the_median_of_rounds_ratios():
    """Not a ratio of medians, which the machine's changes between rounds would be part of."""
    seconds = [(1.0, 2.0), (3.0, 9.0), (8.0, 8.0)]
    result = {
        "shape": {"bytes an expert": 10},
        "base": "ours",
        "participants": {"ours": {"about": {"kernels": "k"}}, "theirs": {"about": {}}},
    }
    point = {
        "flops": 480.0,
        "tokens": 4,
        "experts": [6],
        "rounds": [{"batch": 0, "read": 60.0, "peaks": {"k": 480.0}, "seconds": {"ours": a, "theirs": b}} for a, b in seconds],
    }
    theirs, ours = rounds.figures(result, point, "theirs"), rounds.figures(result, point, "ours")
    assert theirs["ratio"] == 2.0
    assert ours["ratio"] is None
    assert (ours["seconds"], ours["bytes_rate"], ours["flops_rate"]) == (3.0, 20.0, 160.0)
    assert (ours["read_share"], ours["peak_share"], theirs["peak_share"]) == (1 / 3, 1 / 3, None)


FORMATS = [*formats.FORMATS]
#: Those that peers take in bfloat16.
IN_BFLOAT16 = [name for name in FORMATS if any("BF16" in {way.name for way in peer.ways.get(name, ())} for peer in PEERS)]


@pytest.fixture(params=FORMATS)
def checkpoint(request, tmp_path):
    """(what a worker has of a format's checkpoint, what ktmoe loads of it). FP8's last blocks are cut."""
    cut = 8 if request.param == "FP8" else 0
    intermediate = 256 if request.param.startswith("GGUF") else 160 - cut
    sizes = {"num_experts": 2, "hidden": 256 - cut, "intermediate": intermediate, "top_k": 2}
    formats.FORMATS[request.param].write(tmp_path, **sizes)
    session.list_tensors(tmp_path, **sizes)
    return protocol.Model(tmp_path, request.param), ktmoe.load_experts(tmp_path, 0)


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
@pytest.mark.parametrize("checkpoint", IN_BFLOAT16, indirect=True)
def test_peers_get_the_same_weights_in_bfloat16(checkpoint, projection):
    """Exactly, or rounded once where that is said."""
    model, experts = checkpoint
    expected = reference.dequantize(experts.matrix(1, projection)).astype(np.float32)
    if model.weights in ("FP8", "INT4", "GGUF Q4_K"):
        expected = expected.astype(ml_dtypes.bfloat16)
    bits = weights.bfloat16_weights(model.weights, *model.matrix(1, projection))
    assert np.array_equal(bits, expected.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.array_equal(weights.float32(bits), expected)
    assert (model.experts, model.top_k, model.hidden) == (experts.num_experts, 2, experts.hidden)


@pytest.mark.parametrize("checkpoint", ["MXFP4", "INT4"], indirect=True)
def test_ggml_gets_the_same_weights_in_blocks(checkpoint):
    """Of MXFP4 its table is twice E2M1's, and its scales are halved. Q4_0 has INT4's codes and float16 scales."""
    model, experts = checkpoint
    expected = reference.dequantize(experts.matrix(0, "up"))
    matrix = model.matrix(0, "up")
    if model.weights == "MXFP4":
        blocks = weights.mxfp4_blocks(*matrix)
        table, scales = 2 * np.array(ktmoe.MXFP4.element.values), np.exp2(blocks[..., :1].astype(np.float64) - 128)
    else:
        blocks = weights.q4_0_blocks(*matrix)
        table, scales = np.arange(-8, 8), np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
    codes = np.concatenate([blocks[..., -16:] & 15, blocks[..., -16:] >> 4], axis=-1)
    assert np.array_equal((table[codes] * scales).reshape(expected.shape), expected)


@pytest.mark.parametrize("checkpoint", [name for name in FORMATS if name.startswith("GGUF")], indirect=True)
def test_ggml_gets_the_records_of_a_gguf_file(checkpoint, monkeypatch):
    """As they are, with their type's own number, and a share of memory that is theirs."""
    monkeypatch.syspath_prepend(session.WORKERS)
    worker = importlib.import_module("worker_ggml")
    model, experts = checkpoint
    own, number, blocks = worker.OWN[model.weights]
    assert (f"GGUF {own}", own) == (model.weights, TYPES[number].name)
    for projection in protocol.PROJECTIONS:
        matrix = experts.matrix(1, projection)
        records = blocks(*model.matrix(1, projection))
        assert records.tobytes() == matrix.codes.tobytes()
        ways = next(peer for peer in PEERS if peer.name == "ggml").ways[model.weights]
        assert {way.bits for way in ways} == {8 * records.nbytes / math.prod(matrix.shape)}


def test_a_scale_that_q4_0_does_not_have_is_refused():
    scales = np.float32([[2.0**-30]]).astype(ml_dtypes.bfloat16).view(np.uint16)
    with pytest.raises(ValueError, match="Q4_0 has float16 scales"):
        weights.q4_0_blocks(np.zeros((1, 16), np.uint8), scales)


def test_numbers_round_to_bfloat16_as_ties_to_even():
    ties = np.float32([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 2.0**-130, 3.3e38, 0, -0.0])
    assert np.array_equal(weights.bfloat16(ties), ties.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.isnan(weights.float32(weights.bfloat16(np.float32([np.nan]))))[0]


def test_every_format_has_participants_and_a_shape():
    for name in formats.FORMATS:
        without = {"GGUF Q4_K": {"kt-kernel"}}.get(name, {"kt-kernel", "torch"} if name.startswith("GGUF") else set())
        assert {peer.name for peer in PEERS if peer.ways.get(name)} == {"kt-kernel", "ggml", "torch"} - without
    for name in FORMATS:
        tokens = [point.tokens for point in session.points(replace(MODEL, weights=name, experts=64, top_k=6), None)]
        assert tokens == [1, 4, 16, 64, 256, 1024]


ECHO = """
import sys
sys.path.insert(0, {workers!r})
from protocol import Worker, serve

class Echo(Worker):
    about = {{"version": "echo 1"}}
    def __init__(self, way, model, threads):
        pass

serve(Echo)
"""


@pytest.fixture
def echo(tmp_path):
    """The command of a worker that loads at once."""
    about = {"num_experts": 1, "top_k": 1, "hidden": 64, "intermediate": 64, "tensors": {}}
    (tmp_path / protocol.LISTING).write_text(json.dumps(about))
    worker = tmp_path / "worker_echo.py"
    worker.write_text(ECHO.format(workers=str(session.WORKERS)))
    return [sys.executable, str(worker), "way", str(tmp_path), "1", "MXFP4"]


def state(pid: int) -> str:
    """The state of a process, as Linux has it: T is stopped; nothing where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_a_worker_that_dies_while_it_is_stopped(echo, tmp_path):
    """As the kernel kills it when memory ends: the next message says so, and closing it is no failure."""
    process = Process(echo, tmp_path / "log")
    try:
        assert process.ask(do="load") == {"about": {"version": "echo 1"}}
        assert state(process._process.pid) == "T"
        os.kill(process._process.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(WorkerError, match="the worker was killed by SIGKILL"):
                process.ask(do="load")
    finally:
        process.close()


DRIVER = """
import time
from pathlib import Path
from bench.peers.processes import Process
process = Process({command!r}, Path({log!r}))
process.ask(do="load")
print(process._process.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_stopped_workers_end_with_their_driver(echo, tmp_path, how):
    code = DRIVER.format(command=echo, log=str(tmp_path / "log"))
    root = session.WORKERS.parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root) as driver:
        worker = int(driver.stdout.readline())
        assert state(worker) == "T"
        driver.send_signal(how)
        driver.wait(timeout=10)
        until = time.monotonic() + 10
        while state(worker) not in ("", "Z") and time.monotonic() < until:
            time.sleep(0.01)
        assert state(worker) in ("", "Z")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--formats", "FP4"], "expected --formats of MXFP4, BF16, FP8, INT4, GGUF Q2_K, GGUF Q3_K, GGUF Q4_K"),
        (["run", "--formats", "FP4"], "found 'FP4'"),
        (["run", "--points", "decode-3"], "nothing to measure: no point is of these names; there are decode-1, decode-4"),
        (["run", "--experts", "5"], "top_k: expected at most the 5 experts, found 6"),
        (["run", "--rounds", "0"], "expected --rounds and --seconds above 0, found 0 and 20"),
        (["show", "no such file"], "No such file or directory: 'no such file'"),
    ],
)
def test_what_cannot_be_done_is_said(capsys, words, message):
    assert peers.main(words) == 1
    assert message in capsys.readouterr().err


def test_a_picture_without_a_peer_is_not_drawn(result, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    alone = {**result, "participants": {result["base"]: result["participants"][result["base"]]}}
    saved = tmp_path / "result.json"
    saved.write_text(json.dumps(alone))
    assert peers.main(["plot", str(saved), "--into", str(tmp_path)]) == 0
    assert "not drawn: at no point were ktmoe and a peer measured" in capsys.readouterr().out
    assert not (tmp_path / "peers-mxfp4.png").exists()


def test_the_picture_is_drawn(result, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    saved = tmp_path / "result.json"
    saved.write_text(json.dumps(result))
    assert peers.main(["plot", str(saved), "--into", str(tmp_path / "img")]) == 0
    assert (tmp_path / "img" / "peers-mxfp4.png").read_bytes().startswith(b"\x89PNG")
