"""The bench's GGUF files, and the time to the first token: what is measured, figures, tables, what a results file keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from bench import publish, reading, results_file
from bench.engines import cold, cold_report, published_gguf
from bench.engines.shapes import Engine, engines
from bench.models import Model
from ktmoe.loaders.checkpoint import Checkpoint

SMALL = Engine(Model("small", "BF16", 256, 256, experts=8, top_k=2, layers=6), "qwen3_moe", 1000, 0)
NAMES = [start.name for start in cold.STARTS]


@pytest.mark.parametrize(("name", "nbytes"), [("gpt-oss-20b", 12_109_566_560), ("Qwen3-30B-A3B", 18_556_689_568)])
def test_files_are_as_large_as_published_ones(name, nbytes):
    """Those of ggml-org and of unsloth; what is left are vocabularies and templates."""
    engine = engines()[name]
    assert 0.998 < published_gguf.nbytes(engine, engine.experts.layers) / nbytes < 1


def test_which_tensors_get_more_bits(tmp_path):
    """Of 48 layers the first and last 6 and every third between, by their own numbers; and the file says so."""
    found = published_gguf.expert_bytes(engines()["Qwen3-30B-A3B"], 48)
    weights = 2048 * 768
    plain, more = 3 * weights * 144 // 256, weights * (2 * 144 + 210) // 256
    assert [layer for layer, nbytes in enumerate(found) if nbytes == more] == [*range(6), *range(8, 42, 3), *range(42, 48)]
    assert set(found) == {plain, more}
    published_gguf.write(SMALL, 3, tmp_path / "model.gguf")
    with Checkpoint(tmp_path / "model.gguf") as checkpoint:
        dtypes = {name: checkpoint.info(name).dtype for name in checkpoint.names()}
    assert [dtypes[f"blk.{layer}.ffn_down_exps.weight"] for layer in range(3)] == ["Q4_K", "Q4_K", "Q6_K"]
    assert [dtypes[f"{name}.weight"] for name in ("token_embd", "output", "blk.2.attn_v", "blk.2.attn_k")] == [
        "Q4_K",
        "Q6_K",
        "Q6_K",
        "Q4_K",
    ]


def test_what_is_in_the_page_cache(tmp_path):
    (tmp_path / "model.gguf").write_bytes(bytes(10 * 4096 + 1))
    reading.forget(tmp_path)
    share = reading.cached_share(tmp_path)
    reading.read(tmp_path, 1)
    assert reading.cached_share(tmp_path) == 1
    assert share == 0 or share == 1  # tmpfs is the page cache itself


# Rounds with processes made for this

STARTED = """
import json, sys, time
now, owner, how = time.monotonic(), sys.argv[3], sys.argv[6]
if how == "no mmap":
    sys.exit("llama.cpp: no memory")
load = 2.0 if owner == "ktmoe" else 1.0
print(json.dumps({"began": now, "imported": now + 3, "loaded": now + 3 + load, "token": now + 4 + load, "chosen": 7}))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A comparison of two rounds, as it is after a trip through JSON; the disk reads at the file's size a second."""
    run = subprocess.run

    def started(words, **options):
        fake = words[2] == "bench.engines.first_token"
        return run([sys.executable, "-c", STARTED, *map(str, words[1:])] if fake else words, **options)

    folder = tmp_path_factory.mktemp("cold") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold.subprocess, "run", started)
        patch.setattr(cold.reading, "read", lambda *_: 1.0)
        patch.setattr(cold.reading, "cached_share", lambda folder: 0.0)
        options = Namespace(layers=2, rounds=2)
        found = cold.compare(SMALL, options, lambda owner: Path(sys.executable), folder, lambda text: None)
    return json.loads(json.dumps(found))


def test_figures(made):
    assert made["ways"][NAMES[3]]["failure"] == "llama.cpp: no memory"
    assert made["cache_bytes"] > made["file_bytes"] * 0.9
    found = cold_report.figures(made, NAMES[0], "cold")
    assert (found["load"], found["token"], found["of_disk"]) == pytest.approx((2, 1, 1 / 3))
    assert found["before"] == pytest.approx(3, abs=1)
    assert found["total"] == pytest.approx(found["before"] + 3)
    assert found["ratio_after"] == pytest.approx(2 / 3)
    assert found["ratio"] == pytest.approx(5 / 6, abs=0.1)
    llama = cold_report.figures(made, NAMES[2], "warm")
    assert (llama["of_disk"], llama["ratio"], llama["ratio_after"]) == (None, None, None)
    assert cold_report.figures(made, NAMES[3], "cold") is None


def test_what_becomes_of_it(made, tmp_path):
    cpu = {"name": "AMD EPYC 9754 128-Core Processor", "family": 25, "model": 160, "threads": 8}
    result = {"date": "2026-11-27", "commit": "012345678", "ktmoe": "0.1.0", "cpu": cpu, "comparisons": [made]}
    published = publish.engines_alone(result, tmp_path)
    assert results_file.read(publish.write(published, tmp_path)) == published
    assert set(published.data) & {"engines", "whole", "gguf", "cold"} == {"cold"}
    heads, rows = cold_report.page_table([published])
    assert {len(row) for row in rows} == {len(heads)}
    assert [row[4:6] for row in rows] == [(name, state) for state in ("from the disk", "page cache") for name in NAMES[:3]]
    assert rows[0][1] == "small Q4_K_M"
    assert "33 % of the disk, 0.67 x" in rows[0][heads.index("loading and token")]
    console = Console(width=200, record=True)
    with console.capture() as capture:
        cold_report.show(result, console)
    assert "out: llama.cpp, no mmap: llama.cpp: no memory" in capture.get()


def test_files_that_stay_in_the_page_cache_are_not_cold(tmp_path, monkeypatch):
    monkeypatch.setattr(cold.reading, "cached_share", lambda folder: 0.5)
    made = cold.compare(SMALL, Namespace(layers=1, rounds=1), lambda owner: Path(sys.executable), tmp_path / "model", print)
    failures = {about["failure"] for about in made["ways"].values()}
    assert failures == {"expected files that are not in the page cache, found 50.0% of one there"}


def test_no_more_layers_than_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(cold.machine, "usable_bytes", lambda share: 0)
    with pytest.raises(ValueError, match="small: expected memory for 6 layers, found enough for 0"):
        cold.compare(SMALL, Namespace(layers="all", rounds=1), lambda owner: Path(), tmp_path / "model", print)
