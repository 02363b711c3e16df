"""bench/peers/loading.py: what a worker reports, what is seen of it from outside, and the table."""

import os
import sys

import pytest

from bench.peers import loading
from ktmoe import synthetic


def test_a_worker(tmp_path):
    synthetic.write_deepseek_v4(tmp_path / "model", num_experts=16, hidden=1024, intermediate=512)
    size = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    report = loading._run(sys.executable, "ktmoe", tmp_path / "model")
    assert min(report["import"], report["load"]) > 0
    assert size <= report["after"] - report["before"] < 3 * size
    assert report["most"] > report["before"] > 0


def test_a_worker_that_dies(tmp_path):
    with pytest.raises(RuntimeError, match="ktmoe: ended with 1"):
        loading._run(sys.executable, "ktmoe", tmp_path / "nothing")


def test_memory_of_processes():
    assert loading.anonymous_bytes(os.getpid()) > 2**20
    assert loading.anonymous_bytes(2**30) == 0  # there is none


def test_the_table(capsys):
    ours, theirs = ({"import": s, "load": 2 * s, "before": 10, "after": 10 + 100 * s, "most": 10 + 200 * s} for s in (1, 3))
    loading._show([{"ktmoe": ours, "kt-kernel": theirs}] * 3, 100, "title")
    out = capsys.readouterr().out
    for figures in (("import, s", "1.00", "3.00", "3.00"), ("load, s", "2.00", "6.00", "3.00"), ("afterwards", "1.00", "3.00")):
        assert any(all(figure in line for figure in figures) for line in out.splitlines()), figures
