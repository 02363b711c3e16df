"""bench/training with peers made for this: a step of each is timed if its outputs are right, and only then."""

import json
import sys
from pathlib import Path

import pytest

from bench.models import Model
from bench.peers import environments
from bench.peers.peers import Peer
from bench.peers.session import WORKERS
from bench.training import report, session

MODEL = Model("tiny", "MXFP4", hidden=128, intermediate=64, experts=6, top_k=2)
TOKENS = (1, 40)

WORKER = """
import sys

sys.path.insert(0, {workers!r})
import numpy as np
from training import TrainingWorker, serve
from worker_ktmoe_training import KtmoeSteps, KtmoeTraining


class Fake(KtmoeTraining):
    def __init__(self, way, model, threads, rank):
        if way == "does not load":
            raise ValueError("the moon is not full")
        super().__init__("fp32_lut", model, threads, rank)
        self.way = way

    def settings(self, tokens):
        return ["slow", "fast"]

    def prepare(self, inputs):
        return FakeSteps(self, inputs)


class FakeSteps(KtmoeSteps):
    def forward(self, setting):
        for _ in range(20 if setting == "slow" else 1):
            super().forward(setting)

    def outputs(self, expert):
        found = super().outputs(expert)
        if self.worker.way != "right":
            found[self.worker.way] = found[self.worker.way] * np.float32(0.85)
        return found


serve(Fake)
"""
WAYS = ("right", "grad_x", "grad_weights", "down_a", "does not load")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A result as it is after a trip through JSON."""
    folder = tmp_path_factory.mktemp("training")
    worker = folder / "worker_fake.py"
    worker.write_text(WORKER.format(workers=str(WORKERS)))
    fake, absent = Peer("fake", "fake", ()), Peer("absent", "absent", ())

    def interpreter(peer, progress):
        if peer is absent:
            raise environments.SetUpError("no such package")
        return Path(sys.executable)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "PEERS", (fake, absent))
        patch.setattr(session, "PEER_WAYS", {"fake": (str(worker), WAYS), "absent": (str(worker), ("way",))})
        patch.setattr(environments, "python", interpreter)
        options = {
            "tokens": [*TOKENS],
            "rank": 4,
            "rounds": 2,
            "patterns": ["fake *", "absent *"],
            "progress": lambda text: None,
        }
        return json.loads(json.dumps(session.measure_all(MODEL, folder, **options)))


def test_only_right_steps_are_timed(result):
    ours = next(iter(result["participants"]))
    assert ours.startswith("ktmoe ")
    for point, tokens in zip(result["points"], TOKENS, strict=True):
        assert point["flops"] == 2 * 3 * 128 * 64 * 2 * tokens
        assert [set(row) for row in point["rounds"]] == 2 * [{ours, "fake right"}]
        for row in point["rounds"]:
            assert all(value > 0 for entry in row.values() for value in entry.values())
        assert point["participants"]["fake right"]["best"] == "fast"


def test_who_is_out_is_told_why(result):
    failures = {key: entry["failure"] for key, entry in result["participants"].items()}
    for way in WAYS[1:-1]:
        assert failures.pop(f"fake {way}").startswith(f"WRONG: {way} is off by 1")
    assert failures.pop("fake does not load") == "ValueError: the moon is not full"
    assert failures.pop("absent way") == "no such package"
    assert set(failures.values()) == {None}


def test_the_table_has_a_line_for_each_step(result):
    rows = report.rows(result)
    assert [row[0] for row in rows] == ["1", "1", "40", "40"]
    assert [row[7] for row in rows[::2]] == ["1.00 x", "1.00 x"]
    assert all(len(row) == len(report.HEAD) for row in rows)
    figures = session.figures(result, result["points"][1], "fake right")
    first = next(iter(result["participants"]))
    ratios = [
        (row["fake right"]["forward"] + row["fake right"]["backward"]) / (row[first]["forward"] + row[first]["backward"])
        for row in result["points"][1]["rounds"]
    ]
    assert figures["ratio"] == pytest.approx(sum(ratios) / 2)
