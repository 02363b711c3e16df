"""Whole models in bench/engines without torch: who takes part, turns, limits, tables, and what a results file keeps."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from bench import publish, readme, results_file
from bench.engines import __main__ as command
from bench.engines import page, session, whole, whole_report
from bench.engines.session import Call
from bench.engines.shapes import Engine, engines
from bench.engines.ways import INT8, LLAMA_BF16, LLAMA_GGUF, LLAMA_Q8_0, OURS_GGUF, PACKED, TORCH, WHOLE, whole_fits
from bench.models import Model
from bench.results_file import Results

GB = 10**9
SMALL = Engine(Model("small", "MXFP4", 128, 96, experts=8, top_k=2, layers=6), "gpt_oss", 6000, 1000)
OPTIONS = {"dense": None, "layers": 3, "rounds": 2, "prompts": [512], "contexts": [4096]}


def test_who_takes_part_and_how():
    """By turns while all fit beside each other, then one after the other, until one alone does not fit."""
    engine = engines()["gpt-oss-20b"]
    beside = sum(process.nbytes(engine, 4) for process in WHOLE)
    assert whole_fits(engine, "whole", beside) == (WHOLE, 4, True)
    assert whole_fits(engine, "whole", beside, 2) == (WHOLE, 2, True)
    assert whole_fits(engine, "whole", beside, 5) == (WHOLE, 5, False)
    assert whole_fits(engine, "whole", beside, 4, ["packed", "BF16"]) == ((PACKED, LLAMA_BF16), 4, True)
    with pytest.raises(ValueError, match=r"gpt-oss-20b, 24 layers: expected 1\d\.\d GB of memory for whole, one process after"):
        whole_fits(engine, "whole", 12 * GB, 24)
    assert whole_fits(engines()["V4-Flash"], "whole", 20 * GB, 1)[0] == (PACKED, INT8, TORCH)


def test_the_cache_that_a_step_reads():
    """A window of 128 tokens in every second layer of gpt-oss; all tokens in every layer of Qwen3."""
    assert engines()["gpt-oss-20b"].cache_bytes(3, 1000) == (2 * 128 + 1000) * 2 * 8 * 64 * 2
    assert engines()["gpt-oss-20b"].cache_bytes(2, 100) == 200 * 2 * 8 * 64 * 2
    assert engines()["Qwen3-30B-A3B"].cache_bytes(3, 1000) == 3000 * 2 * 4 * 128 * 2


# Rounds with workers made for this

WORKER = """
import sys
from pathlib import Path
import numpy as np
from bench.peers.workers.protocol import answer_all

module, folder = sys.argv[1], Path(sys.argv[2])
log = folder.parent / "asked"

def answer(message):
    global name
    match message["do"]:
        case "write":
            folder.mkdir()
            return {}
        case "write_gguf":
            (folder / message["into"]).touch()
            return {"experts": 10, "dense": 20, "embedding": 5}
        case "load":
            name = message.get("dense") or message.get("owner", message["file"])
            assert "file" not in message or (folder / message["file"]).exists()
            if name == "int8":
                raise ValueError("the moon is not full")
            held = {} if "file" in message else {"bytes": {"experts": 10, "dense": 30, "embedding": 5}}
            return {"seconds": 1.5, "resident": 50, "mapped": 20, **held}
        case "logits":
            np.save(folder / message["into"], {"Q8_0.gguf": 1.5}.get(name, 1.01) * np.ones((message["tokens"], 4)))
            return {}
    with log.open("a") as file:
        file.write(f"{name} {message['batch']} {message['prompt']} {message['seed']}\\n")
    seconds = {"packed": 1.0, "BF16.gguf": 3.0, "torch": 2.0, "ktmoe": 1.0, "model.gguf": 2.0}
    part = {"seconds": seconds[name] * (1 + message["seed"])}
    decode = part if name.endswith("gguf") else part | {"experts": {"seconds": 0.5, "experts": [1, 2, 1]}}
    return {"prefill": part, "decode": decode, "peak": 2}

answer_all(answer)
"""


def compared(folder: Path, monkeypatch, memory: int, comparison: str = "whole") -> tuple[dict, list[str]]:
    """A comparison of two rounds, as it is after a trip through JSON; and what was asked of the workers that were timed."""
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    start = session.processes.Process
    monkeypatch.setattr(
        session.processes,
        "Process",
        lambda words, log, environment: start([sys.executable, worker, *words[2:]], log, environment),
    )
    monkeypatch.setattr(session.machine, "usable_bytes", lambda share: memory)
    limits = Namespace(read=lambda seconds: 1000.0, streams=2)
    monkeypatch.setattr(session, "reading", lambda engine: contextlib.nullcontext(limits))
    made = whole.compare(
        SMALL, comparison, Namespace(**OPTIONS), lambda owner: Path(sys.executable), folder / "model", lambda text: None
    )
    return json.loads(json.dumps(made)), (folder / "asked").read_text().splitlines()


@pytest.fixture(scope="module")
def by_turns(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return compared(tmp_path_factory.mktemp("whole"), patch, 40 * GB)


RIGHT = {PACKED.name, LLAMA_BF16.name, TORCH.name}


def test_only_right_ways_are_timed(by_turns):
    made, _ = by_turns
    assert {way for way, about in made["ways"].items() if not about["failure"]} == RIGHT
    assert made["ways"][INT8.name]["failure"] == "ValueError: the moon is not full"
    assert made["ways"][LLAMA_Q8_0.name]["failure"].startswith("WRONG: the median token's logits differ by 48.51%")
    assert [set(row["ways"]) for row in made["rounds"]] == [RIGHT, RIGHT]
    assert (made["by_turns"], made["layers"], made["vocabulary"]) == (True, 3, SMALL.vocabulary_of(3))


def test_each_round_has_all_of_them_in_alternating_order(by_turns):
    _, asked = by_turns
    order = ["packed", "BF16.gguf", "torch"]
    calls = [session.WARM, *whole.CALLS, Call(1, 512, 1)]
    expected = [f"{way} {call.batch} {call.prompt} 0" for way in order for call in (session.WARM, whole.CALLS[0])]
    for number in (1, 2):
        expected += [f"{way} {c.batch} {c.prompt} {number}" for way in order[:: -1 if number % 2 else 1] for c in calls]
    assert asked == expected


def test_what_does_not_fit_beside_each_other_follows(tmp_path, monkeypatch):
    """Rounds of one number are compared with each other."""
    alone = max(process.nbytes(SMALL, 3) for process in WHOLE)
    made, asked = compared(tmp_path, monkeypatch, alone)
    assert not made["by_turns"]
    expected = [(number, {way}) for way in (PACKED.name, LLAMA_BF16.name, TORCH.name) for number in (1, 2)]
    assert [(row["number"], set(row["ways"])) for row in made["rounds"]] == expected
    names = [line.split()[0] for line in asked]
    assert list(dict.fromkeys(names)) == [name for name, _ in itertools.groupby(names)] == ["packed", "BF16.gguf", "torch"]
    assert whole_report.figures(made, PACKED.name)["prefill"][512]["ratio"] == 3
    assert not list(tmp_path.glob("**/*.gguf"))


def test_long_contexts_alone(tmp_path, monkeypatch):
    made, asked = compared(tmp_path, monkeypatch, 40 * GB, "contexts")
    assert {tuple(line.split()[1:3]) for line in asked} == {("1", "16"), ("1", "4096")}
    assert made["cache_bytes"] == {"4096": SMALL.cache_bytes(3, 4104)}
    assert list(whole_report.figures(made, TORCH.name)["decode"]) == [(1, 4096)]


def test_one_file_is_loaded_by_all(tmp_path, monkeypatch):
    """The limit is of the file's own bytes for both: each layer's experts have as many as their types say."""
    made, asked = compared(tmp_path, monkeypatch, 40 * GB, "gguf")
    assert list(dict.fromkeys(line.split()[0] for line in asked)) == ["ktmoe", "model.gguf"]
    expert = 3 * 128 * 96 * 17 // 32 + 4 * (96 + 96 + 128)  # MXFP4, and biases
    assert (made["file"], made["layers"]) == ("MXFP4", 3)
    for way, seconds in ((OURS_GGUF.name, 1.0), (LLAMA_GGUF.name, 2.0)):
        assert made["ways"][way]["expert_bytes"] == [expert] * 3
        found, held = whole_report.figures(made, way), made["ways"][way]["load"]["bytes"]
        assert held["experts"] == 3 * 8 * expert
        nbytes = 4 * expert + 32 * (held["dense"] + made["cache_bytes"]["128"])
        assert found["decode"][1, 128]["of_limit"] == pytest.approx(nbytes / 1000 / seconds * (1 / 2 + 1 / 3) / 2)
    assert whole_report.figures(made, OURS_GGUF.name)["prefill"][512]["ratio"] == 2
    result = saved(made)
    assert page.section(result, ("whole",)) is None
    section = publish.engines_alone(result, tmp_path).data["gguf"]
    heads, rows = page.table([Results({"cpu": result["cpu"], "gguf": section})], "gguf")
    assert [row[1:4] for row in rows] == [("small MXFP4", "3 of 6", name) for name in (OURS_GGUF.name, LLAMA_GGUF.name)]
    assert rows[0][heads.index("prefill, 512 tokens")].endswith("2.00 x llama.cpp")


def test_the_limit_is_what_the_bytes_of_the_steps_take(by_turns):
    """By hand: the experts that ktmoe counted, for all ways; of each step a way's own dense bytes and each text's cache."""
    made = copy.deepcopy(by_turns[0])
    made["cache_bytes"] = {"128": 7, "32": 3}
    for about in made["ways"].values():
        about["expert_bytes"] = [100, 50, 100]
    ours, theirs = (whole_report.figures(made, way) for way in (PACKED.name, LLAMA_BF16.name))
    seconds = (3 * 100 + 16 * (30 + 4 * 7)) / 1000  # rounds took 2 and 3 s
    assert ours["decode"][4, 128]["of_limit"] == pytest.approx((seconds / 2 + seconds / 3) / 2)
    seconds = (3 * 100 + 16 * (20 + 16 * 3)) / 1000
    assert theirs["decode"][16, 32]["of_limit"] == pytest.approx((seconds / 6 + seconds / 9) / 2)
    assert ours["decode"][4, 128]["rate"] == pytest.approx(4 * 16 / 2.5)
    assert (ours["decode"][1, 128]["ratio"], theirs["decode"][1, 128]["ratio"]) == (3, None)
    assert (ours["prefill"][512], ours["packed"], ours["resident"]) == ({"rate": 512 / 2.5, "ratio": 3}, 45, 50)


def saved(comparison: dict) -> dict:
    cpu = {"name": "AMD EPYC 9754 128-Core Processor", "family": 25, "model": 160, "threads": 8}
    return {"date": "2026-11-23", "commit": "012345678", "ktmoe": "0.1.0", "cpu": cpu, "comparisons": [comparison]}


def test_the_table_has_all_of_them(by_turns):
    console = Console(width=240, record=True)
    with console.capture() as capture:
        whole_report.show(saved(by_turns[0]), console)
    text = capture.get()
    for word in (
        "small, 3 of 6 layers",
        "(3.00x)",
        "out: ktmoe MXFP4, dense int8: ValueError: the moon",
        "decode 4 x 128: 2.00x",
    ):
        assert word in text
    assert text.count("Q8_0") == 1  # out


def test_what_becomes_of_it(by_turns, tmp_path):
    """A section of its own: that of other comparisons stays. README has both libraries with the most layers."""
    result = saved(by_turns[0])
    made = publish.engines_alone(result, tmp_path)
    assert results_file.read(publish.write(made, tmp_path)) == made
    assert "engines" not in made.data
    ours = made.data["whole"]["comparison"][0]["way"][0]
    assert ours["decode"][0]["tokens_s"] == 12.8
    assert ours["prefill"] == [{"tokens": 512, "tokens_s": 204.8, "ratio": 3.0}]
    heads, rows = page.table([made])
    assert heads[4:8] == (
        "decode, 1 text after 128 tokens",
        "decode, 4 texts after 128 tokens",
        "decode, 16 texts after 32 tokens",
        "prefill, 512 tokens",
    )
    assert [row[3] for row in rows] == [PACKED.name, LLAMA_BF16.name, TORCH.name]
    assert rows[0][7] == "205 tokens/s, 3.00 x llama.cpp"
    fewer, after = copy.deepcopy(by_turns[0]), copy.deepcopy(by_turns[0])
    fewer["layers"], after["layers"] = 2, 4
    for row in after["rounds"]:
        row["ways"] = {way: calls[:1] for way, calls in row["ways"].items()}
    both = page.section(result | {"comparisons": [fewer, by_turns[0], after]}, ("whole",))
    heads, rows = readme.text([Results({"cpu": result["cpu"], "whole": both})])
    assert heads == ("small, 3 of 6 layers, on AMD EPYC 9754 25-160, 8 threads", "ktmoe in transformers", "llama.cpp", "ratio")
    assert rows[0][0] == "1 text after 128 tokens"
    assert [row for row in rows if row[0] == "a prompt of 512 tokens"] == [
        ("a prompt of 512 tokens", "205 tokens/s", "68.3 tokens/s", "3.00 x")
    ]
    assert rows[-1][0] == "memory after loading"
    assert readme.text([Results({"cpu": result["cpu"]})])[1] == []


def test_results_are_added_to_those_of_the_same_commit(tmp_path, by_turns):
    file = tmp_path / "saved.json"
    file.write_text(json.dumps(saved(by_turns[0])))
    options = Namespace(add=True, save=file, models=["other"], comparisons=["whole"])
    here = {name: saved({})[name] for name in ("cpu", "commit")}
    assert command._others(options, here) == [by_turns[0]]
    options.models = ["small"]
    assert command._others(options, here) == []
    with pytest.raises(ValueError, match="expected results of this commit to add to, found another: 012345678"):
        command._others(options, here | {"commit": "x"})
