"""What a user meets first: the example of help(ktmoe), what dir(ktmoe) lists, and what a repr() says."""

import inspect
import re
import textwrap

import numpy as np
import pytest
from helpers import random_experts

import ktmoe
from ktmoe import BF16, MXFP4, ExpertWeights, Matrix, MoELayer
from ktmoe.machine import numa
from ktmoe.synthetic import write_deepseek_v4

EXAMPLES = {
    "help(ktmoe)": lambda: re.search(r"\n\n(?=    )(.*?)\n\n(?! )", inspect.getdoc(ktmoe), re.DOTALL)[1],
}


@pytest.mark.parametrize("where", EXAMPLES)
def test_the_first_example_runs(where, tmp_path, monkeypatch):
    """On a checkpoint of that name; layer 3, with at least as many experts as a token takes."""
    write_deepseek_v4(tmp_path / "DeepSeek-V4-Flash", hidden=64, intermediate=64, num_experts=6, layers=4)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(textwrap.dedent(EXAMPLES[where]()), names)
    assert names["y"].shape == names["x"].shape
    assert np.isfinite(names["y"].astype(np.float32)).all()


def test_dir_lists_what_is_public():
    listed = dir(ktmoe)
    assert [name for name in listed if not name.startswith("__")] == sorted(set(ktmoe.__all__) - {"__version__"})
    assert {"__version__", "__doc__", "__all__"} <= set(listed)


def test_a_layers_repr():
    """While it lives, after close(), and where it was not finished."""
    experts = random_experts(np.random.default_rng(1), 3, 64, 96)
    about = f"MoELayer({experts.name!r}, 3 experts, hidden=64, intermediate=96, {MXFP4.description}, fp32_lut, bf16 activations"
    with MoELayer(experts, "fp32_lut", "bf16") as layer:
        layer.placement = numa.Placement((1, 0), (frozenset({2}), frozenset({1})))
        assert repr(layer) == f"{about}, NUMA nodes (1, 0))"
        layer.placement = numa.UNBOUND
        assert repr(layer) == f"{about}, no NUMA binding)"
    assert repr(layer) == f"{about}, no NUMA binding, closed)"
    assert repr(MoELayer.__new__(MoELayer)) == "MoELayer(not packed)"


def test_what_goes_into_a_layer_has_a_repr_of_one_line():
    """Without its numbers; formats by projection where they differ."""
    bias = np.zeros(96, np.float32)
    matrix = Matrix("a", BF16, (96, 64), np.zeros((96, 64), ktmoe.arrays.BF16), bias=bias)
    assert repr(matrix) == "Matrix('a', BF16 [96, 64], with a bias)"
    formats = {"gate": BF16, "up": BF16, "down": MXFP4}
    experts = ExpertWeights(3, 64, 96, lambda expert, projection: matrix, formats, name="b")
    assert repr(experts) == (
        f"ExpertWeights('b', 3 experts, hidden=64, intermediate=96, gate BF16, up BF16, down {MXFP4.description})"
    )
