"""bench/low_precision: what an error is, what its inputs are, and that docs/low-precision.md shows what was measured."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from helpers import same_bits

from bench.low_precision import document, layer, results
from bench.low_precision.layer import Error
from bench.results_file import ResultsError
from ktmoe import reference, synthetic
from ktmoe.modes import mode_of


def test_the_page_shows_the_file():
    text = document.PAGE.read_text()
    assert document.filled(text) == text
    assert document.PICTURE.exists()


def test_the_file_has_all_modes_and_data():
    found = {(error["activations"], error["data"]) for error in results.read()["layer"]["error"]}
    assert found == {(mode, data) for mode in layer.MODES for data in layer.DATA}
    assert all(mode_of(mode).name == mode for mode in layer.MODES)


def test_an_error():
    exact = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)
    scaled, turned = Error.of("m", "d", 1.5 * exact, exact), Error.of("m", "d", exact[:, ::-1], exact)
    assert (scaled.relative, scaled.cosine) == pytest.approx((0.5, 1.0))
    assert (turned.relative, turned.cosine) == pytest.approx((np.sqrt(2), 0.0))


@pytest.mark.parametrize("data", layer.DATA)
def test_inputs(data):
    x = layer.inputs(data, 512)
    assert x.shape == (layer.TOKENS, 512)
    assert same_bits(x, layer.inputs(data, 512))
    assert np.array_equal(x.astype(ml_dtypes.bfloat16), x)
    assert np.sqrt(np.mean(np.square(x), axis=1)) == pytest.approx(1, rel=0.01)
    # of a Gaussian token of 512 the largest is about 3
    largest = np.median(np.abs(x).max(axis=1))
    assert (largest < 4) == (data == "Gaussian")


def test_errors_are_those_of_the_reference(monkeypatch):
    """Of a small layer, where the reference computes all of it. Float32 sums are far below 1 %."""
    monkeypatch.setattr(layer, "TOKENS", 6)
    experts = synthetic.deepseek_v4_experts(num_experts=2, hidden=128, intermediate=64)
    called = []
    forward = layer.MoELayer.forward
    monkeypatch.setattr(layer.MoELayer, "forward", lambda *given: called.append(given[1:]) or forward(*given))
    found = [*layer.errors(("bf16", "mxfp4"), experts)]
    assert [error.data for error in found] == 2 * [*layer.DATA]
    assert all(error.relative == 0 for error in found[:3])
    for error, (x, ids, weights) in zip(found[3:], called, strict=False):
        y, exact = (
            reference.forward(experts, x, ids, weights, activations=mode, out_dtype="float32").y for mode in ("mxfp4", "bf16")
        )
        assert error.relative == pytest.approx(np.linalg.norm(y - exact) / np.linalg.norm(exact), rel=0.01)


def test_the_numbers_of_the_picture():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from bench.low_precision import plots

    found = plots.numbers()
    assert found["mxfp4"].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert found["mxfp8"][-4:].tolist() == [4.5, 5, 5.5, 6]
    assert len(found["int8"]) == 128
    assert found["int8"][-1] == pytest.approx(6)


def test_a_part_takes_the_place_of_the_files(tmp_path):
    path, data = tmp_path / "results.toml", results.read()
    results.renew("layer", data["layer"], path)
    assert results.read(path)["layer"] == data["layer"]
    with pytest.raises(ResultsError, match=r"layer: unknown fields \['more'\]"):
        results.renew("layer", data["layer"] | {"more": 1}, path)
    assert results.read(path)["layer"] == data["layer"]
