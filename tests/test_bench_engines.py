"""bench/engines without torch: what fits, who is measured, the figures, the tables, and what becomes of a saved result."""

from __future__ import annotations

import copy
import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bench import full_tables, publish, results_file
from bench.engines import __main__ as command
from bench.engines import published as of_experts
from bench.engines import report, session
from bench.engines.session import CALLS
from bench.engines.shapes import Engine, engines
from bench.engines.ways import OTHERS, OURS, THEIRS, Process, layers_that_fit, who_fits
from bench.models import Model
from bench.results_file import Results
from ktmoe import measuring

GB = 10**9
SMALL = Engine(Model("small", "MXFP4", 128, 96, experts=8, top_k=2, layers=6), "gpt_oss", 6000, 1000)


def test_experts_take_what_their_formats_take():
    """4 bits and an eighth of a byte for each group of 32, or 16 bits a weight."""
    for engine in engines().values():
        weights = 3 * engine.experts.hidden * engine.experts.intermediate
        assert engine.expert_bytes("MXFP4") == weights * 17 // 32
        assert engine.expert_bytes("BF16") == weights * 2


def test_the_vocabulary_is_cut_as_the_layers_are():
    for engine in engines().values():
        layers = engine.experts.layers
        assert engine.vocabulary - 64 < engine.vocabulary_of(layers) <= engine.vocabulary
        assert abs(engine.vocabulary_of(1) * layers / engine.vocabulary - 1) < 64 * layers / engine.vocabulary
        for count in (1, 3):
            config = engine.config(count)
            assert config["vocab_size"] == engine.vocabulary_of(count)
            assert config["num_hidden_layers"] == count
            assert all(len(config[name]) == count for name in ("layer_types", "mlp_layer_types") if name in config)


def test_as_many_layers_as_fit():
    engine = engines()["gpt-oss-20b"]
    needed = sum(process.nbytes(engine, 3) for process in (OURS, THEIRS))
    assert layers_that_fit(engine, (OURS, THEIRS), needed) == 3
    assert layers_that_fit(engine, (OURS, THEIRS), needed - 1) == 2
    assert layers_that_fit(engine, (OURS,), 10**15) == engine.experts.layers
    assert layers_that_fit(engine, (OURS,), GB) == 0


def test_who_takes_part():
    """The others only where there is memory for them, too; asked for more layers than fit, it is refused."""
    engine = engines()["V4-Flash"]
    must = sum(process.nbytes(engine, 1) for process in (OURS, THEIRS))
    assert who_fits(engine, "beside", must) == ((OURS, THEIRS), 1)
    assert who_fits(engine, "beside", must + OTHERS[0].nbytes(engine, 1)) == ((OURS, THEIRS, *OTHERS), 1)
    everyone, layers = who_fits(engine, "beside", 200 * GB)
    assert everyone == (OURS, THEIRS, *OTHERS)
    assert layers > 1
    assert who_fits(engine, "beside", 200 * GB, 1) == (everyone, 1)
    assert who_fits(engine, "alone", must)[0] == (OURS,)
    with pytest.raises(ValueError, match=r"V4-Flash, 1 layers: expected 1\d\.\d GB of memory for beside, found 15\.0 GB"):
        who_fits(engine, "beside", 15 * GB)
    with pytest.raises(ValueError, match="V4-Flash, 9 layers"):
        who_fits(engine, "beside", must, 9)


def test_an_error_is_the_median_tokens():
    """So one token whose router chose otherwise does not count, and an error of most tokens does."""
    random = np.random.default_rng(0)
    expected = random.standard_normal((5, 40))
    flipped = expected.copy()
    flipped[0] *= -1
    assert session.median_error(flipped, expected) == 0
    assert session.median_error(expected * 1.1, expected) == pytest.approx(0.1)


# Rounds with workers made for this

WORKER = """
import sys
from pathlib import Path
import numpy as np
from bench.peers.workers.protocol import answer_all

folder, log = Path(sys.argv[1]), Path(sys.argv[1]).with_suffix(".asked")

def answer(message):
    global owner, weights
    match message["do"]:
        case "write":
            folder.mkdir()
            return {}
        case "load":
            owner, weights = message["owner"], message["weights"]
            if (owner, weights) == ("ktmoe", "BF16"):
                raise ValueError("the moon is not full")
            return {"seconds": 1.5, "peak": 100, "about": {}}
        case "logits":
            wrong = {"eager": 1, "grouped_mm": 1.5, "ktmoe": 1.01}[message["implementation"]]
            np.save(folder / message["into"], wrong * np.ones((message["tokens"], 4)))
            return {}
    with log.open("a") as file:
        file.write(f"{message['implementation']} {message['batch']} {message['prompt']} {message['seed']}\\n")
    seconds = {"eager": 3.0, "ktmoe": 1.0}[message["implementation"]] * (1 + message["seed"])
    experts = {"seconds": seconds / 2, "experts": [1, 3]}
    part = {"seconds": seconds, "experts": experts}
    return {"prefill": part, "decode": part, "peak": 2 * 10**9}

answer_all(answer)
"""


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A comparison of two rounds, as it is after a trip through JSON; and what was asked of the workers that were timed."""
    folder = tmp_path_factory.mktemp("engines")
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    start = session.processes.Process

    def process(command, log, environment):
        assert command[1:3] == ["-m", "bench.engines.worker"]
        return start([sys.executable, worker, *command[3:]], log, environment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.processes, "Process", process)
        patch.setattr(session.machine, "usable_bytes", lambda share: 40 * GB)
        options = Namespace(layers=2, rounds=2)
        made = session.compare(SMALL, "beside", options, Path(sys.executable), folder / "model", lambda text: None)
    return json.loads(json.dumps(made)), (folder / "model.asked").read_text().splitlines()


def test_only_right_ways_are_timed(comparison):
    made, _ = comparison
    ways = made["ways"]
    assert ways["transformers grouped_mm, BF16"]["failure"].startswith("WRONG: the median token's logits differ by 50.00%")
    assert ways["ktmoe BF16"]["failure"] == "ValueError: the moon is not full"
    assert ways["ktmoe MXFP4"]["error"] == pytest.approx(0.01)
    right = {"ktmoe MXFP4", "transformers eager, BF16"}
    assert {way for way, about in ways.items() if not about["failure"]} == right
    assert [set(row["ways"]) for row in made["rounds"]] == [right, right]
    assert {row["read_streams"] for row in made["rounds"]} <= set(measuring.STREAMS)
    assert (made["layers"], made["of_layers"], made["vocabulary"]) == (2, 6, 1984)
    assert report.wrong({"comparisons": [made]}) == ["small: transformers grouped_mm, BF16"]


def test_each_round_asks_for_all_calls_in_alternating_order(comparison):
    """Round 0 is for warming up, and so is a short call before the others."""
    _, asked = comparison
    calls = [f"{call.batch} {call.prompt}" for call in (session.WARM, *CALLS)]
    expected = []
    for number in range(3):
        order = ["ktmoe", "eager"][:: -1 if number % 2 else 1]
        expected += [f"{who} {call} {number}" for who in order for call in calls]
    assert asked == expected


def test_figures(comparison):
    """Medians of rounds that took twice and three times a second's worth."""
    made, _ = comparison
    ours, theirs = (report.figures(made, way) for way in ("ktmoe MXFP4", "transformers eager, BF16"))
    assert ours["prefill"][512] == {"rate": 512 / 2.5, "lead": None, "share": 0.5}
    assert theirs["prefill"][512] == {"rate": 512 / 7.5, "lead": 3.0, "share": 0.5}
    decode = ours["decode"][4]
    assert decode["rate"] == pytest.approx(4 * (CALLS[1].new - 1) / 2.5)
    experts = [4 * SMALL.expert_bytes("MXFP4") / seconds for seconds in (1.0, 1.5)]
    assert decode["read"] == pytest.approx(sum(experts) / 2)
    shares = [rate / row["read"] for rate, row in zip(experts, made["rounds"], strict=True)]
    assert decode["of_read"] == pytest.approx(sum(shares) / 2)
    assert (ours["peak"], ours["load"]["seconds"]) == (2 * GB, 1.5)
    assert report.figures(made, "ktmoe BF16") is None


def saved(comparison: dict) -> dict:
    cpu = {"name": "AMD EPYC 9754 128-Core Processor", "family": 25, "model": 160, "threads": 8}
    return {"date": "2026-11-23", "commit": "012345678", "ktmoe": "0.1.0", "cpu": cpu, "comparisons": [comparison]}


def test_the_table_has_all_of_them(comparison):
    console = Console(width=200, record=True)
    with console.capture() as capture:
        report.show(saved(comparison[0]), console)
    text = capture.get()
    for word in ("small, 2 of 6 layers", "transformers eager, BF16", "(3.00x)", "out: ktmoe BF16: ValueError: the moon", "AMD"):
        assert word in text
    assert text.count("grouped_mm") == 1  # out


def test_what_becomes_of_it(comparison, tmp_path, monkeypatch):
    """A file of its own, or a section of the file that the CPU has; and the page's table."""
    result = saved(comparison[0])
    made = publish.engines_alone(result, tmp_path)
    path = publish.write(made, tmp_path)
    assert path.name == "amd-epyc-9754-25-160-8-threads.toml"
    assert results_file.read(path) == made
    ours, theirs = made.data["engines"]["comparison"][0]["way"]
    assert (ours["load_s"], ours["peak_gb"], ours["environment"]) == (1.5, 2.0, dict(OURS.environment))
    assert "load_s" not in theirs
    assert theirs["prefill"][1] == {"tokens": 512, "tokens_s": 68.27, "lead": 3.0, "experts": 0.5}
    assert "environment" not in theirs
    heads, rows = full_tables.engines([made])
    assert heads[:6] == ("CPU", "model", "layers", "way", "prefill, 128 tokens", "prefill, 512 tokens")
    assert [row[3] for row in rows] == [ours["name"], theirs["name"]]
    assert rows[1][4:6] == ("17.1 tokens/s, 3.0 x", "68.3 tokens/s, 3.0 x")
    assert rows[0][-2:] == ("2 GB", "1.5 s")
    assert rows[1][-1] == "-"

    cost = [{"isa": "avx2", "activations": "int16", "decode_ns": 1.0, "efficiency": 0.5, "overlap": 0.5}]
    publish.write(Results(made.data | {"cost": cost}), tmp_path)
    later = copy.deepcopy(result) | {"commit": "876543210"}
    found = publish.engines_alone(later, tmp_path).data
    assert (found["commit"], found["engines"]["commit"], found["cost"]) == ("012345678", "876543210", cost)

    monkeypatch.chdir(tmp_path)
    fresh = Results({name: value for name, value in made.data.items() if name != "engines"})
    assert publish.with_others(fresh, tmp_path).data["engines"] == made.data["engines"]
    publish.ENGINES.parent.mkdir()
    publish.ENGINES.write_text(json.dumps(later))
    assert publish.with_others(fresh, tmp_path).data["engines"]["commit"] == "876543210"
    publish.ENGINES.write_text(json.dumps(later | {"cpu": {**later["cpu"], "threads": 4}}))
    assert publish.with_others(fresh, tmp_path).data["engines"]["commit"] == "012345678"


@pytest.mark.parametrize(("streams", "words"), [({}, "% of 1 stream"), ({"read_streams": 4}, "% of read")])
def test_a_share_says_what_reading_was_measured_with(comparison, streams, words):
    """Saved rounds of before tried one stream alone, and do not say so."""
    made = copy.deepcopy(comparison[0])
    made["rounds"] = [{"read": row["read"], "ways": row["ways"], **streams} for row in made["rounds"]]
    found = of_experts.section(saved(made))
    assert found.get("read_streams") == streams.get("read_streams")
    cpu = saved(made)["cpu"]
    heads, rows = full_tables.engines([Results({"cpu": cpu, "engines": found})])
    assert rows[0][heads.index("experts in decode")].endswith(words)


def test_without_results_the_table_is_empty():
    cpu = {"name": "x", "family": 1, "model": 2, "threads": 1}
    _, rows = full_tables.engines([Results({"date": None, "commit": "", "source": "", "cpu": cpu})])
    assert rows == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--rounds", "0"], "expected --rounds and --layers above 0, found 0 and None"),
        (["run", "--layers", "0"], "expected --rounds and --layers above 0, found 5 and 0"),
        (["show", "no such file"], "No such file or directory: 'no such file'"),
    ],
)
def test_what_cannot_be_done_is_said(capsys, words, message):
    assert command.main(words) == 1
    assert message in capsys.readouterr().err


def test_a_process_of_transformers_measures_several_ways():
    """One copy of the weights serves all of them."""
    assert THEIRS.ways == {"transformers eager, BF16": "eager", "transformers grouped_mm, BF16": "grouped_mm"}
    assert Process("ktmoe", "MXFP4", note="x").ways == {"ktmoe MXFP4, x": "ktmoe"}
