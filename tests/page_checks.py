"""What blocks of pages must have computed: functions that get the names after each Python block, in the page's process."""

from __future__ import annotations

import numpy as np
from helpers import BF16, same_bits

import ktmoe


def readme(after: list[dict]) -> None:
    """README: the first layer's outputs are numbers, in x's shape."""
    names = next(names for names in after if "y" in names)
    assert names["y"].shape == names["x"].shape
    assert np.isfinite(names["y"].astype(np.float32)).all()


def fine_tuning(after: list[dict]) -> None:
    """docs/fine-tuning.md: what was trained is not zero, what is trained is the adapters, and all gradients are there."""
    first, with_peft, of_a_layer, without_torch = after
    adapters = first["adapters"]
    layers = list(adapters)
    assert layers == list(range(len(layers))) != []
    assert all(array.any() for lora in adapters.values() for pair in lora.pairs.values() for array in pair)
    trained = [name for name, parameter in with_peft["model"].named_parameters() if parameter.requires_grad]
    assert len(trained) == len(layers) * (2 * 2 + 3 * 2)  # of q_proj and v_proj, and of gate, up and down
    names = of_a_layer
    if names["hidden_states"].grad is None:  # else the page did it
        names["y"].sum().backward()
    given = names["hidden_states"], names["top_k_weights"], *names["experts"].parameters()
    assert all(tensor.grad is not None for tensor in given)
    assert set(without_torch["gradients"].lora) == {"gate", "up", "down"}


def linear(after: list[dict]) -> None:
    """docs/linear.md: each block has the numbers of the checkpoint, read by hand."""
    from ktmoe.loaders.checkpoint import Checkpoint

    first, group, own, head, *modules = after
    with Checkpoint("model") as checkpoint:
        arrays = {name: checkpoint.read(name).view(BF16).reshape(checkpoint.info(name).shape) for name in checkpoint.names()}
    x, q = first["x"], first["y"]
    with ktmoe.Linear(ktmoe.Matrix("q", ktmoe.BF16, (70, 64), arrays["model.layers.0.self_attn.q_proj.weight"])) as one:
        assert same_bits(one.forward(x), q)
    assert same_bits(group["q"], q)
    assert [group[name].shape for name in "kv"] == [(2, 32)] * 2
    for i, wanted in enumerate((x, 2 * x)):
        rows = np.ascontiguousarray(arrays["layers.0.attn.wo_a.weight"][40 * i : 40 * (i + 1)])
        with ktmoe.Linear(ktmoe.Matrix("rows", ktmoe.BF16, (40, 64), rows)) as one:
            assert same_bits(np.ascontiguousarray(own["y"][:, i]), one.forward(wanted))
    assert same_bits(head["rows"], arrays["model.embed_tokens.weight"][[3, 1, 3]])
    assert head["logits"].shape == (2, 100)
    for names in modules:  # where torch is
        ones = np.ones((2, 64), BF16)
        for name in "qkv":
            found = names[name].view(names["torch"].int16).numpy().view(BF16)
            assert same_bits(found, names[f"{name}_proj"].linear.forward(ones))


def two_stage(after: list[dict]) -> None:
    """docs/two-stage.md: y is that of the layer, and the difference of equal numbers is 0."""
    names = after[-1]
    with names["layer"] as layer:
        assert layer.activations == "mxfp4"
        assert same_bits(names["y"], layer.forward(names["x"], names["topk_ids"], names["topk_weights"]))
    assert names["difference"](names["y"], names["y"]) == 0
    assert names["difference"](names["y"], -names["y"]) == 2
