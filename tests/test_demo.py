"""`ktmoe demo` at small sizes; and that a wrong result, or none, shows in the exit status."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

import ktmoe
from ktmoe import cli, measuring, synthetic
from ktmoe.cli import demo, measurements
from ktmoe.errors import MissingTensorError, OutOfSpaceError
from ktmoe.layer import MoELayer

SMALL = {"experts": 8, "hidden": 64, "intermediate": 96}
PREFILL_TOKENS = 12


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, limits_at_once):
    """Where temporary folders go; a test may look whether something was left behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "PHASES", (("decode", 1, 1), ("prefill", PREFILL_TOKENS, 2)))
    return tmp_path


def left_behind(folder) -> list:
    return list(folder.glob("ktmoe-demo-*"))


def run_demo(*arguments, **options) -> tuple[int, str]:
    """(exit status, what was printed)."""
    output = io.StringIO()
    status = demo.run(*arguments, seconds=0.01, console=Console(file=output, width=80), **options)
    return status, output.getvalue()


def test_table(folder):
    status, output = run_demo(**SMALL)
    assert status == 0
    assert left_behind(folder) == []
    assert re.search(r"^backend +tokens +ms +tokens/s +GB/s +read +GFLOP/s +peak +of bound$", output, re.MULTILINE)
    measured = [name for name in ktmoe.backends.available() if name in output]
    assert measured == ktmoe.backends.available()
    for name in measured:
        for tokens in (1, PREFILL_TOKENS):
            (row,) = re.findall(rf"^{name}(?: int16)? +{tokens} +(.*)$", output, re.MULTILINE)
            milliseconds, rate, *_, error = row.split()
            assert float(rate) == pytest.approx(tokens / float(milliseconds) * 1e3, rel=0.2)
            assert 0 <= float(error.rstrip("%")) <= 100
    for name in set(ktmoe.backends.names()) - set(measured):
        assert f"not measured: {name}: this CPU lacks" in output
    assert "8 experts of 64 x 96, E2M1 with ue8m0 scales per 1x32" in output


def test_each_backend_reads_by_the_streams_that_are_fastest_for_it(monkeypatch):
    settled, of_rows = [], []

    def settle(layer, table):
        settled.append((layer.backend, table.name))
        return measuring.LimitMeter(layer, table, streams=4)

    table = measurements.table
    monkeypatch.setattr(measuring, "settled", settle)
    monkeypatch.setattr(measurements, "table", lambda rows: of_rows.extend(rows) or table(rows))
    assert run_demo(**SMALL)[0] == 0
    assert settled == list(dict.fromkeys((row.backend, row.isa) for row in of_rows))
    assert {row.result.streams for row in of_rows} == {4}


def test_a_checkpoint_of_the_users(tmp_path):
    model = tmp_path / "model"
    synthetic.write_deepseek_v4(model, num_experts=7, hidden=64, intermediate=32, layers=2, mtp_layers=1)
    before = sorted(model.iterdir())
    for layer, name in ((1, "layers.1"), ("mtp.0", "mtp.0"), (None, "layers.0")):
        status, output = run_demo(model, layer)
        assert status == 0
        assert f"{name}.ffn.experts: 7 experts of 64 x 32" in output
    assert sorted(model.iterdir()) == before
    with pytest.raises(MissingTensorError, match=r"layer 2: expected .* layers 0-1, mtp\.0"):
        run_demo(model, 2)


@pytest.mark.parametrize("rows", [1, PREFILL_TOKENS])
@pytest.mark.parametrize("dtypes", [(np.float32, ml_dtypes.bfloat16), (ml_dtypes.bfloat16,)])
def test_a_wrong_result_fails(monkeypatch, rows, dtypes):
    right = MoELayer.forward

    def wrong(layer, x, ids, weights, out=None):
        y = right(layer, x, ids, weights, out)
        return (y * 1.01).astype(y.dtype) if len(x) == rows and y.dtype in dtypes else y

    monkeypatch.setattr(MoELayer, "forward", wrong)
    status, output = run_demo(**SMALL)
    assert status == 1
    phase, other = ("decode", "prefill") if rows == 1 else ("prefill", "decode")
    assert re.search(
        rf"^WRONG: fp32_lut {phase}: {rows} tokens?: an output is off by \S+ times its bound", output, re.MULTILINE
    )
    assert f"WRONG: fp32_lut {other}" not in output
    assert re.search(rf"^fp32_lut +{rows} .* WRONG$", output, re.MULTILINE)


def test_a_nan_fails(monkeypatch):
    monkeypatch.setattr(MoELayer, "forward", lambda layer, x, *rest: np.full_like(x, np.nan))
    status, output = run_demo(**SMALL)
    assert status == 1
    assert "WRONG: fp32_lut decode" in output


def test_command(folder, monkeypatch, capsys):
    monkeypatch.setattr(demo, "run", lambda *arguments, **options: print(arguments, options) or 0)
    assert cli.main(["demo", "--model", "~/m", "--layer", "3", "--experts", "8", "--seconds", "0.5"]) == 0
    assert capsys.readouterr().out == "('~/m', 3, None) {'experts': 8, 'seconds': 0.5}\n"
    assert cli.main(["demo", "--layer", "mtp.0"]) == 0
    assert capsys.readouterr().out == "(None, 'mtp.0', None) {'experts': 32, 'seconds': 2.0}\n"


def test_too_little_space(folder, monkeypatch, capsys):
    found = shutil.disk_usage(folder)._replace(free=100 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: found)
    with pytest.raises(OutOfSpaceError, match=r"needs 0\.495 GB of free space, found 0\.105 GB; .* TMPDIR"):
        demo.run(experts=32)
    assert cli.main(["demo"]) == 1
    assert f"ktmoe: {folder}: the demo's checkpoint needs" in capsys.readouterr().err
    assert left_behind(folder) == []


def test_interrupted(folder, monkeypatch, capsys):
    def interrupt(*arguments):
        assert left_behind(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(measurements, "open_layer", interrupt)
    monkeypatch.setattr(synthetic, "write_deepseek_v4", lambda path, **options: None)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err.endswith("ktmoe: interrupted\n")
    assert left_behind(folder) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_remove_the_checkpoint(folder, number, status):
    process = subprocess.Popen(
        [sys.executable, "-m", "ktmoe.cli", "demo", "--experts", "8"],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a background shell hands SIGINT down ignored
    )
    try:
        while not any(any(path.iterdir()) for path in left_behind(folder)):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == status
    assert left_behind(folder) == []
