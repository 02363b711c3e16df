"""bench/engines on GGUF files, with the engines themselves: ktmoe and llama.cpp on one file, in tiny sizes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from conftest import ENVIRONMENTS

from bench.engines import cold, cold_report, session, whole, whole_report
from bench.engines.shapes import Engine
from bench.engines.ways import LLAMA_GGUF, OURS_GGUF
from bench.models import Model

#: Records of K-quants have 256 weights; a layer more than the two whose logits are compared has other types.
SIZES = {"gpt_oss": ("MXFP4", 64, 64), "qwen3_moe": ("BF16", 256, 256)}


def small(kind: str) -> Engine:
    weights, hidden, intermediate = SIZES[kind]
    return Engine(Model(kind, weights, hidden, intermediate, experts=8, top_k=2, layers=3), kind, 640, 0)


def python(owner: str) -> Path:
    return Path(ENVIRONMENTS, {"ktmoe": "engines"}.get(owner, "llama"), "bin", "python")


@pytest.fixture(autouse=True)
def installed():
    for environment in ("llama", "engines"):
        if not Path(ENVIRONMENTS or "none", environment, "installed").exists():
            pytest.skip(f"{environment} is not installed: make test-writers")


@pytest.mark.smoke("one")
@pytest.mark.parametrize("kind", SIZES)
def test_both_engines_write_with_one_file(tmp_path, monkeypatch, kind):
    """Their logits agree, as the comparison itself sees to; every call has its time, its limit and its ratio."""
    monkeypatch.setattr(whole, "CALLS", (session.Call(1, 8, 3), session.Call(2, 4, 3)))
    monkeypatch.setattr(whole, "WARM_CALLS", ())
    options = Namespace(dense=None, layers=3, rounds=1, prompts=[32], contexts=[])
    made = whole.compare(small(kind), "gguf", options, python, tmp_path / "model", lambda text: None)
    assert {way: about["failure"] for way, about in made["ways"].items()} == {OURS_GGUF.name: None, LLAMA_GGUF.name: None}
    assert 0 < made["ways"][LLAMA_GGUF.name]["error"] < session.MOST_ERROR
    logits = np.load(tmp_path / "checked" / "logits.npy")
    assert np.isfinite(logits).all()
    assert len(set(logits.argmax(axis=1))) > len(logits) / 2  # text goes on in many ways
    figures = [whole_report.figures(made, way) for way in made["ways"]]
    assert all(found["decode"][2, 4]["of_limit"] > 0 and found["prefill"][32]["rate"] > 0 for found in figures)
    assert figures[0]["decode"][1, 8]["ratio"] > 0


def test_all_ways_to_start(tmp_path):
    options = Namespace(layers=2, rounds=1)
    made = cold.compare(small("qwen3_moe"), options, python, tmp_path / "model", lambda text: None)
    assert {about["failure"] for about in made["ways"].values()} == {None}
    for states in made["rounds"][0]["ways"].values():
        assert (states["cold"]["cached"], states["warm"]["cached"]) == (0, 1)
    for way in made["ways"]:
        found = cold_report.figures(made, way, "cold")
        assert found["total"] > found["before"] + found["token"] > found["before"] > 0
