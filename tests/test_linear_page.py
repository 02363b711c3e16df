"""docs/linear.md: its examples run one after another, on a checkpoint of those names."""

import re

import numpy as np
import pytest
from checkpoints import write
from environments import ROOT
from helpers import BF16, same_bits

import ktmoe

BASE = "model.layers.0.self_attn"


def test_the_examples_run(tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    shapes = {
        f"{BASE}.q_proj": (70, 64),
        f"{BASE}.k_proj": (32, 64),
        f"{BASE}.v_proj": (32, 64),
        "layers.0.attn.wo_a": (80, 64),
        "model.embed_tokens": (100, 64),
    }
    arrays = {name: rng.standard_normal(shape).astype(BF16) for name, shape in shapes.items()}
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", {f"{name}.weight": ["BF16", array] for name, array in arrays.items()}).close()
    monkeypatch.chdir(tmp_path)
    names = {}
    first, group, own, head, modules = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "linear.md").read_text(), re.DOTALL)
    exec(first, names)
    q, x = names["y"], names["x"]
    with ktmoe.Linear(ktmoe.Matrix("q", ktmoe.BF16, (70, 64), arrays[f"{BASE}.q_proj"])) as linear:
        assert same_bits(linear.forward(x), q)
    exec(group, names)
    assert same_bits(names["q"], q)
    assert [names[name].shape for name in "kv"] == [(2, 32)] * 2
    exec(own, names)
    for i, wanted in enumerate((x, 2 * x)):
        rows = np.ascontiguousarray(arrays["layers.0.attn.wo_a"][40 * i : 40 * (i + 1)])
        with ktmoe.Linear(ktmoe.Matrix("rows", ktmoe.BF16, (40, 64), rows)) as linear:
            assert same_bits(np.ascontiguousarray(names["y"][:, i]), linear.forward(wanted))
    exec(head, names)
    assert same_bits(names["rows"], arrays["model.embed_tokens"][[3, 1, 3]])
    assert names["logits"].shape == (2, 100)
    pytest.importorskip("torch", reason="torch is not installed")
    exec(modules, names)
    ones = np.ones((2, 64), BF16)
    for name in "qkv":
        assert same_bits(names[name].view(names["torch"].int16).numpy().view(BF16), names[f"{name}_proj"].linear.forward(ones))
