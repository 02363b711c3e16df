"""docs/linear.md: its examples run one after another, on a checkpoint of those names."""

import re

import numpy as np
from checkpoints import write
from environments import ROOT
from helpers import BF16, same_bits

import ktmoe

BASE = "model.layers.0.self_attn"


def test_the_examples_run(tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    shapes = {"q_proj": (70, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_a_proj.0": (40, 64), "o_a_proj.1": (40, 64)}
    arrays = {name: rng.standard_normal(shape).astype(BF16) for name, shape in shapes.items()}
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", {f"{BASE}.{name}.weight": ["BF16", array] for name, array in arrays.items()}).close()
    monkeypatch.chdir(tmp_path)
    names = {}
    first, group, own = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "linear.md").read_text(), re.DOTALL)
    exec(first, names)
    q, x = names["y"], names["x"]
    with ktmoe.Linear(ktmoe.Matrix("q", ktmoe.BF16, (70, 64), arrays["q_proj"])) as linear:
        assert same_bits(linear.forward(x), q)
    exec(group, names)
    assert same_bits(names["q"], q)
    assert [names[name].shape for name in "kv"] == [(2, 32)] * 2
    exec(own, names)
    for i in range(2):
        with ktmoe.Linear.from_checkpoint("model", f"{BASE}.o_a_proj.{i}") as linear:
            assert same_bits(np.ascontiguousarray(names["y"][:, i]), linear.forward(x))
