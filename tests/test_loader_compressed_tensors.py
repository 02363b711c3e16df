"""The compressed_tensors loader beyond what tests/test_loader_schemes.py asks of all: groups, configs."""

import numpy as np
import pytest
from checkpoints import EXPERTS, PROJ, SCHEMES, Scheme, int4, int4_meaning, write, zeros

from ktmoe import loaders
from ktmoe.errors import CheckpointError, FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders import config_groups
from ktmoe.loaders.base import find_loader
from ktmoe.weights import formats
from ktmoe.weights.activation import SILU
from ktmoe.weights.elements import INT4, INT8_PLUS_128
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.scales import Factor

SCHEME = SCHEMES["int4"]
EXPERT = "model.layers.0.mlp.experts.0"
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}


@pytest.fixture
def tensors():
    return SCHEME.layer("model.layers.0")


def config(**changes):
    """config.json, of which config_groups.group_0.weights is changed."""
    weights = {key: value for key, value in {**WEIGHTS, **changes}.items() if value != "absent"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}}


def load(folder, tensors, config=None):
    checkpoint = write(folder, tensors, config)
    loader = find_loader(checkpoint)
    assert loader is loaders.get("compressed_tensors")
    return loader.load(checkpoint, 0)


def test_codes_are_the_tensors_bytes(tmp_path, tensors):
    weights = load(tmp_path, tensors)
    matrix = weights.matrix(0, "down")
    assert matrix.name == f"{EXPERT}.down_proj"
    assert matrix.codes.tobytes() == tensors[f"{EXPERT}.down_proj.weight_packed"][1].tobytes()
    assert weights.activation == SILU
    one = np.zeros_like(tensors[f"{EXPERT}.gate_proj.weight_packed"][1])
    one[0, 0] = 0x76543210  # q + 8 = 0 to 7 for k = 0 to 7
    tensors[f"{EXPERT}.gate_proj.weight_packed"][1] = one
    (tmp_path / "one").mkdir()
    matrix = load(tmp_path / "one", tensors).matrix(0, "gate")
    values = np.array(matrix.format.element.values)[np.stack([matrix.codes[0, :4] & 15, matrix.codes[0, :4] >> 4], 1).ravel()]
    assert values.tolist() == [-8, -7, -6, -5, -4, -3, -2, -1]


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("shape_dtype", ["I32", "I64"])
def test_group_sizes(tmp_path, group, stated, shape_dtype):
    hidden, intermediate = 512, 256  # at 256, gate_proj tells that down_proj's one scale per row is one per group
    scheme = Scheme(
        "compressed_tensors", "mlp.experts", "num_experts", int4(PROJ, group, shape_dtype), int4_meaning(PROJ, group)
    )
    tensors = scheme.layer("model.layers.0", hidden=hidden, intermediate=intermediate)
    weights = load(tmp_path, tensors, config(group_size=group) if stated else None)
    assert (weights.hidden, weights.intermediate) == (hidden, intermediate)
    assert {weights.formats[projection].scale.extent for projection in PROJECTIONS} == {(1, group)}
    for projection in PROJECTIONS:
        found = weights.matrix(1, projection)
        expected, _ = scheme.meaning(tensors, weights.name, 1, projection)
        codes = np.stack([found.codes & 15, found.codes >> 4], -1).reshape(found.shape).astype(np.float64) - 8
        np.testing.assert_array_equal(codes * np.repeat(found.scales.astype(np.float64), group, 1), expected)


def test_a_last_group_that_is_cut_short_needs_the_config(tmp_path):
    """k = 96 in groups of 64: two scales a row, which by themselves would mean groups of 48."""
    scheme = Scheme("compressed_tensors", "mlp.experts", "num_experts", int4(PROJ, 64), int4_meaning(PROJ, 64))
    tensors = scheme.layer("model.layers.0")
    scheme.check(load(tmp_path, tensors, config(group_size=64)), tensors, "model.layers.0")
    (tmp_path / "unstated").mkdir()
    with pytest.raises(FormatError, match=rf"{EXPERT}.down_proj.weight_scale: shape: expected \[96, 2\] .*48 along k = 64"):
        load(tmp_path / "unstated", tensors)


def test_without_weight_shape(tmp_path, tensors):
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("weight_shape")}
    SCHEME.check(load(tmp_path, tensors), tensors, "model.layers.0")


@pytest.mark.parametrize("stated", [[64, 95], [96, 64], [-64, 96]])
def test_weight_shape_disagrees(tmp_path, tensors, stated):
    name = f"{EXPERT}.up_proj.weight_shape"
    weights = load(tmp_path, tensors | {name: ["I32", np.array(stated, np.int32)]})
    with pytest.raises(CheckpointError) as caught:
        weights.matrix(0, "up")
    assert str(caught.value) == f"{name}: expected [64, 96] by weight_packed, found {stated}"


@pytest.mark.parametrize(
    "stated",
    [
        config(),
        config(actorder="weight"),
        config(actorder="static"),
        config(actorder="absent", type="absent", strategy=None),
        {"text_config": config()},
        config() | {"hidden_act": "swish"},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"quantization_config": {"config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": WEIGHTS}}}},
        {"quantization_config": {"config_groups": {"a": {"weights": None}, "b": None}}},
    ],
)
def test_configs_that_agree(tmp_path, tensors, stated):
    SCHEME.check(load(tmp_path, tensors, stated), tensors, "model.layers.0")


WHERE = "quantization_config.config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_bits": 3}, [f"{WHERE}.num_bits", "expected 4 or 8", "found 3"]),
        ({"num_bits": True}, [f"{WHERE}.num_bits", "found True"]),
        ({"type": "float"}, [f"{WHERE}.type", "expected 'int'", "found 'float'"]),
        ({"symmetric": "no"}, [f"{WHERE}.symmetric", "expected True or False", "found 'no'"]),
        ({"strategy": "block"}, [f"{WHERE}.strategy", "expected 'group' or 'channel'", "found 'block'"]),
        ({"strategy": "tensor_group"}, [f"{WHERE}.strategy", "found 'tensor_group'"]),
        ({"actorder": "group"}, [f"{WHERE}.actorder", "'weight'", "found 'group'"]),
        ({"actorder": True}, [f"{WHERE}.actorder", "found True"]),
        ({"group_size": -2}, [f"{WHERE}.group_size", "expected a count", "found -2"]),
        ({"group_size": "32"}, [f"{WHERE}.group_size", "expected a count", "found '32'"]),
        ({"group_size": 64}, [f"{EXPERT}.gate_proj.weight_scale", "expected [64, 2]", "per 64 along k = 96", "found [64, 3]"]),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_configs_that_are_refused(tmp_path, tensors, changes, words, nested):
    stated = {"text_config": config(**changes)} if nested else config(**changes)
    with pytest.raises(FormatError) as caught:
        load(tmp_path, tensors, stated)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("stated", "error", "words"),
    [
        ({"quantization_config": [1]}, CheckpointError, ["quantization_config: expected an object", "[1]"]),
        ({"quantization_config": {"config_groups": 3}}, CheckpointError, ["config_groups: expected an object", "3"]),
        ({"hidden_act": "gelu"}, FormatError, ["hidden_act of config.json: expected 'silu', found 'gelu'"]),
        ({"text_config": {"hidden_act": "relu2"}}, FormatError, ["hidden_act of config.json", "found 'relu2'"]),
        ({"hidden_act": ["silu"]}, FormatError, ["hidden_act of config.json", "found ['silu']"]),
        ({"swiglu_limit": 7.0}, FormatError, ["swiglu_limit of config.json", "found 7.0"]),
    ],
)
def test_other_configs_that_are_refused(tmp_path, tensors, stated, error, words):
    with pytest.raises(error) as caught:
        load(tmp_path, tensors, stated)
    assert all(word in str(caught.value) for word in [str(tmp_path), *words]), str(caught.value)


@pytest.mark.parametrize(
    ("projection", "n", "k", "words"),
    [
        ("up", 64, 64, ["up_proj.weight_packed: expected [n, k] = [64, 96]", "found [64, 64]"]),
        ("down", 64, 96, ["down_proj.weight_packed: expected [n, k] = [96, 64]", "found [64, 96]"]),
    ],
)
def test_projections_that_do_not_fit(tmp_path, tensors, projection, n, k, words):
    for expert in range(EXPERTS):
        name = f"model.layers.0.mlp.experts.{expert}.{projection}_proj"
        tensors |= {f"{name}.weight_packed": zeros("I32", n, k // 8), f"{name}.weight_scale": zeros("BF16", n, k // 32)}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, tensors)
    assert all(word in str(caught.value) for word in [EXPERT, *words]), str(caught.value)


def test_scales_in_float16(tmp_path, tensors):
    for name in tensors:
        if name.endswith("scale"):
            tensors[name] = ["F16", tensors[name][1].astype(np.float16)]
    weights = load(tmp_path, tensors, config())
    assert weights.formats["up"] == formats.int4(32, "fp16")
    SCHEME.check(weights, tensors, "model.layers.0")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int4 zero points", formats.uint4(32, "bf16")),
        ("int4 per row", WeightFormat(INT4, factor=Factor(per_row=True))),
        ("int8 packed", formats.int8(32, "bf16", INT8_PLUS_128)),
        ("int8 packed per row", formats.int8(None, element=INT8_PLUS_128)),
    ],
)
@pytest.mark.parametrize("stated", [False, True])
def test_formats(tmp_path, name, expected, stated):
    """Told by shapes; what llm-compressor writes into the config changes nothing."""
    per_row = "row" in name
    said = config(
        num_bits=8 if "int8" in name else 4,
        symmetric="zero" not in name,
        strategy="channel" if per_row else "group",
        group_size=-1 if per_row else 32,
    )
    tensors = SCHEMES[name].layer("model.layers.0")
    weights = load(tmp_path, tensors, said if stated else None)
    assert weights.formats == dict.fromkeys(PROJECTIONS, expected)
    SCHEMES[name].check(weights, tensors, "model.layers.0")


def test_zero_points_are_of_their_rows(tmp_path):
    tensors = SCHEMES["int4 zero points"].layer("model.layers.0")
    matrix = load(tmp_path, tensors, config(symmetric=False)).matrix(2, "up")
    stored = tensors[f"{EXPERT[:-1]}2.up_proj.weight_zero_point"][1]
    assert (matrix.offsets.shape, stored.shape) == ((64, 3), (8, 3))
    for n, group in ((0, 0), (7, 1), (8, 2), (63, 0)):
        assert matrix.offsets[n, group] == int(stored[n // 8, group]) >> 4 * (n % 8) & 15


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("int8 packed", {"weight_zero_point": zeros("I32", 24, 3)}, ["zero points of 4 bits in groups", "found 8 bits"]),
        ("int4 per row", {"weight_zero_point": zeros("I32", 12, 1)}, ["zero points of 4 bits", "found one per row (channel)"]),
        ("int4 zero points", {"weight_zero_point": zeros("I8", 96, 3)}, ["dtype: expected I32", "found I8 [96, 3]"]),
        ("int4 zero points", {"weight_zero_point": zeros("I32", 96, 3)}, ["shape: expected [12, 3]", "found [96, 3]"]),
    ],
)
def test_zero_points_that_are_refused(tmp_path, name, changes, words):
    tensors = SCHEMES[name].layer("model.layers.0", hidden=96, intermediate=96)
    with pytest.raises(FormatError) as caught:
        load(tmp_path, tensors | per_expert(**changes))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}}, ["transform_config: expected none", "R4"]),
        (
            {"algo_config": [{"name": "rotation", "online_config": {"online_rotation_layers": [f"{EXPERT}.down_proj"]}}]},
            ["algo_config: online_rotation_layers: expected none of experts", EXPERT],
        ),
    ],
)
def test_weights_for_rotated_inputs_are_refused(tmp_path, tensors, stated, words):
    with pytest.raises(FormatError) as caught:
        load(tmp_path, tensors, {"quantization_config": stated})
    assert all(word in str(caught.value) for word in [*words, "inputs would have to be rotated"]), str(caught.value)


@pytest.mark.parametrize(
    "stated",
    [
        {"transform_config": None},
        {"transform_config": {"config_groups": {}}},
        {"algo_config": None},
        {"algo_config": [None, {"online_config": None}, {"online_config": {"online_rotation_layers": ["x.self_attn.o_proj"]}}]},
    ],
)
def test_rotations_that_are_none_of_experts(tmp_path, tensors, stated):
    SCHEME.check(load(tmp_path, tensors, {"quantization_config": stated}), tensors, "model.layers.0")


def per_expert(**tensors):
    return {
        f"model.layers.0.mlp.experts.{expert}.{stem}.{label}": tensor
        for expert in range(EXPERTS)
        for stem in PROJ.values()
        for label, tensor in tensors.items()
    }


def test_other_formats_of_compressed_tensors(tmp_path):
    """FP8 has other names; FP4 has these, and is refused by its dtype."""
    fp8 = per_expert(weight=zeros("F8_E4M3", 96, 96), weight_scale=zeros("BF16", 96, 1))
    checkpoint = write(tmp_path, fp8)
    assert loaders.get("compressed_tensors").detect(checkpoint) == 0
    (tmp_path / "nvfp4").mkdir()
    fp4 = per_expert(weight_packed=zeros("U8", 96, 48), weight_scale=zeros("F8_E4M3", 96, 6))
    checkpoint = write(tmp_path / "nvfp4", fp4 | per_expert(weight_global_scale=zeros("F32", 1)))
    assert loaders.get("compressed_tensors").detect(checkpoint) == 0
    assert find_loader(checkpoint) is loaders.get("nvfp4")
    with pytest.raises(FormatError, match=r"weight_global_scale: expected none .*: FP4"):
        loaders.get("compressed_tensors").load(checkpoint, 0)


def test_the_config_is_looked_through_once(tmp_path, monkeypatch):
    """However many layers there are; a hostile one has groups without end."""
    tensors = SCHEME.layer("model.layers.0") | SCHEME.layer("model.layers.1", 1)
    looked, read = [], config_groups.read
    monkeypatch.setattr(config_groups, "read", lambda checkpoint: looked.append(checkpoint) or read(checkpoint))
    with write(tmp_path, tensors) as checkpoint:
        loader = find_loader(checkpoint)
        for layer in (0, 1, 0):
            loader.load(checkpoint, layer)
        assert looked == [checkpoint]
