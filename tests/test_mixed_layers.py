"""Checkpoints whose layers are quantized differently: each layer's loader goes by its own tensors."""

import pytest
from checkpoints import SCHEMES, write, write_index

import ktmoe
from ktmoe import loaders
from ktmoe.errors import FormatError, MissingTensorError
from ktmoe.loaders.base import find_layers, find_loader, load_experts
from ktmoe.loaders.checkpoint import Checkpoint

#: The layers by name: the same names of tensors, other names, an extra layer that is not quantized.
LAYERS = {
    "model.layers.1": "fp8 per row",
    "model.layers.2": "mxfp8 weight_scale",
    "model.layers.3": "nvfp4",
    "mtp.layers.0": "bf16",
}
NUMBERS = dict(zip((1, 2, 3, "mtp.0"), LAYERS.items(), strict=True))


@pytest.fixture
def mixed(tmp_path):
    """(folder, tensors)"""
    tensors = {}
    for seed, (layer, name) in enumerate(LAYERS.items()):
        tensors |= SCHEMES[name].layer(layer, seed)
    write(tmp_path, tensors).close()
    return tmp_path, tensors


def test_each_layer_has_its_loader(mixed):
    folder, tensors = mixed
    with Checkpoint(folder) as checkpoint:
        assert find_layers(checkpoint) == list(NUMBERS)
        for number, (layer, name) in NUMBERS.items():
            assert find_loader(checkpoint, layer=number) is loaders.get(SCHEMES[name].loader)
            SCHEMES[name].check(load_experts(folder, number), tensors, layer)


def test_a_model_has_all_of_them(mixed):
    with ktmoe.MoEModel.from_checkpoint(mixed[0], backend="fp32_lut") as model:
        assert list(model) == list(NUMBERS)
    with ktmoe.MoELayer.from_checkpoint(mixed[0], "mtp.0", "fp32_lut") as layer:
        assert layer.name == "mtp.layers.0.mlp.experts"


def test_a_loader_by_name_is_not_replaced(mixed):
    """It lists the layers that have some of its names, and says what is wrong with those that it does not read."""
    with Checkpoint(mixed[0]) as checkpoint:
        assert find_layers(checkpoint, "gptq") == []
        nvfp4 = find_loader(checkpoint, "nvfp4", 1)
        assert nvfp4 is loaders.get("nvfp4")
        with pytest.raises(MissingTensorError, match=r"layers.1.mlp.experts.0.gate_proj.weight_scale_2: expected with"):
            nvfp4.load(checkpoint, 1)
        with pytest.raises(MissingTensorError, match=r"layer 4: expected a layer that has routed experts"):
            find_loader(checkpoint, layer=4).load(checkpoint, 4)


def test_a_layer_that_is_refused(mixed):
    """By the loader that is surest of the others; a model of all layers says how to take these."""
    folder, tensors = mixed
    more = SCHEMES["fp8 per row"].layer("model.layers.4")
    more |= {name: ["F32", tensor[1].repeat(3, 1).astype("f4")] for name, tensor in more.items() if name.endswith("scale")}
    with write(folder, tensors | more) as checkpoint:
        assert find_layers(checkpoint) == [1, 2, 3, 4, "mtp.0"]  # fp8_per_row, which is surest of the first, has its names
        with pytest.raises(FormatError, match=r"layers.4.*weight_scale: shape: expected \[64\] or \[64, 1\], found \[64, 3\]"):
            find_loader(checkpoint, layer=4).load(checkpoint, 4)
    words = r"layers.4.*weight_scale: shape: .*; the other layers can be read: pass layers=, or --layers 1-3,mtp.0"
    with pytest.raises(FormatError, match=words):
        ktmoe.MoEModel.from_checkpoint(folder, backend="fp32_lut")


def test_layers_that_have_not_been_downloaded(tmp_path):
    """The ones that are there decide; the others are asked for when they are loaded."""
    parts = {name: SCHEMES[scheme].layer(name) for name, scheme in LAYERS.items()}
    write_index(tmp_path, {tensor: f"{name}.safetensors" for name, tensors in parts.items() for tensor in tensors})
    write(tmp_path, parts["model.layers.3"], file="model.layers.3.safetensors").close()
    with Checkpoint(tmp_path) as checkpoint:
        assert find_loader(checkpoint, layer=3) is loaders.get("nvfp4")
        SCHEMES["nvfp4"].check(load_experts(tmp_path, 3), parts["model.layers.3"], "model.layers.3")
        with pytest.raises(MissingTensorError, match=r"layers.1"):
            find_loader(checkpoint, layer=1).load(checkpoint, 1)
