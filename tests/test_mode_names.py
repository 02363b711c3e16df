"""Names of activation modes wherever one is chosen: by each entrance the same mode, by its shortest name, and the same bits."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cached import batch, outputs, write_model
from helpers import same_bits

from ktmoe import MoELayer, MoEModel, backends, cli, load_experts, measuring
from ktmoe.config import config, show_config
from ktmoe.errors import UnavailableError
from ktmoe.modes import MODES

#: A long name and the short one.
NAMES = {
    "mxfp4:ceil/mxfp4": "mxfp4",
    "mxfp8:even/mxfp4:ceil": "mxfp8:even/mxfp4",
    "bf16/bf16": "bf16",
    "bf16/mxfp8": "bf16/mxfp8",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint of one layer, and its packed cache."""
    return write_model(tmp_path_factory.mktemp("modes"), layers=1)


@pytest.mark.parametrize(("name", "short"), NAMES.items())
def test_every_entrance(model, name, short):
    """A layer, a model and a mapped layer compute the same; another mode computes something else."""
    path, cache = model
    with (
        MoELayer.from_checkpoint(path, 0, activations=name) as layer,
        MoEModel.from_checkpoint(path, activations=name) as whole,
        MoELayer.from_checkpoint(path, 0, activations=name, cache=cache) as mapped,
        MoELayer.from_checkpoint(path, 0, activations="mxfp4:floor/bf16") as other,
    ):
        found = [layer, whole[0], mapped]
        assert [each.activations for each in found] == [short] * 3
        assert mapped.mapped
        y = outputs(layer)
        assert all(same_bits(outputs(each), y) for each in found)
        assert not same_bits(outputs(other), y)
        x, ids, weights = batch(layer.hidden, layer.num_experts)
        sample = measuring.MeasuredBatch(x.astype("bfloat16"), ids, weights, np.unique(ids), ids.size)
        assert 0 < measuring.check(load_experts(path, 0), layer, sample).error <= 1


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mxfp5", "'mxfp5'"),
        ("mxfp4/", "'mxfp4/'"),
        ("int8/bf16", "'int8/bf16'"),
        ("mxfp8:quark", "rules of mxfp8 are ceil, round, floor, even, compressed-tensors, found 'quark'"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "fp32_lut"])
def test_names_that_do_not_exist(model, capsys, name, found, backend):
    with pytest.raises(UnavailableError) as refused:
        MoELayer.from_checkpoint(model[0], 0, backend, name)
    assert found in str(refused.value)
    assert str(refused.value).count("activations ") == 1
    assert cli.main(["bench", str(model[0]), "--backend", backend, "--activations", name, "--top-k", "2"]) == 1
    assert found in capsys.readouterr().err


def test_config_lists_the_modes_of_each_backend(capsys):
    show_config()
    printed = capsys.readouterr().out
    rows = config()["backends"]
    assert cli.main(["config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backends"] == rows
    for name, row in rows.items():
        assert set(row["activations"]) == (set(backends.get(name).modes) & set(MODES) if row["available"] else set())
        assert not row["available"] or f"activations {', '.join(row['activations'])}\n" in printed
    assert rows["fp32_lut"]["activations"][0] == "bf16"
    assert {"mxfp8", "mxfp4"} <= set(rows["fp32_lut"]["activations"])


def test_bench_measures_the_mode_that_is_asked_for(model, capsys, monkeypatch):
    monkeypatch.setattr("ktmoe.measuring.meter.LEAST_SECONDS", 1e-4)
    monkeypatch.setattr(measuring, "settled", measuring.LimitMeter)
    monkeypatch.setattr("ktmoe.cli.bench.DECODE", (1,))
    monkeypatch.setattr("ktmoe.cli.bench.PREFILL", (3,))
    arguments = ["bench", str(model[0]), "--seconds", "0", "--top-k", "2", "--activations", "mxfp8:ceil/mxfp4:even"]
    assert cli.main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["layer"]["activations"] == "mxfp8/mxfp4:even"
    assert all(call["right"] for call in data["calls"])
    assert cli.main(arguments) == 0
    assert " mxfp8/mxfp4:even " in capsys.readouterr().out
