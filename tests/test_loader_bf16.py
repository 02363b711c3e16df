"""The bf16 loader beyond what tests/test_loader_schemes.py asks of all: fused tensors, and what only looks like them."""

import itertools
import math

import numpy as np
import pytest
from checkpoints import BF16 as BFLOAT16
from checkpoints import EXPERTS, HIDDEN, INTERMEDIATE, SCHEMES, check_matrix, write, zeros
from helpers import assert_right, random_batch, same_bits

from ktmoe import MoELayer, MoEModel, loaders, reference
from ktmoe.errors import CheckpointError, FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.weights.activation import SILU, GatedActivation
from ktmoe.weights.formats import BF16

BASE = "model.layers.0.mlp.experts"
ROWS = 2 * INTERMEDIATE


def load(folder, tensors, config=None):
    checkpoint = write(folder, tensors, config)
    loader = find_loader(checkpoint)
    assert loader is loaders.get("bf16")
    return loader.load(checkpoint, 0)


@pytest.mark.parametrize("name", ["bf16", "bf16 fused"])
def test_layout(tmp_path, name):
    tensors = SCHEMES[name].layer("model.layers.0")
    weights = load(tmp_path, tensors, {"hidden_act": "silu", "swiglu_limit": None})
    assert weights.formats == dict.fromkeys(PROJECTIONS, BF16)
    assert weights.activation == SILU
    for projection in PROJECTIONS:
        matrix = weights.matrix(1, projection)
        fused = f"{BASE}.down_proj[1]" if projection == "down" else f"{BASE}.gate_up_proj[1] {projection}"
        assert matrix.name == (fused if name == "bf16 fused" else f"{BASE}.1.{projection}_proj")
        assert matrix.codes.dtype == BFLOAT16
        assert matrix.codes.flags.c_contiguous


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("F16", np.float16), ("F32", np.float32)])
@pytest.mark.parametrize("name", ["bf16", "bf16 fused", "bf16 transposed"])
def test_other_floats_are_themselves(tmp_path, name, dtype, numpy_dtype):
    """Numbers that no bfloat16 is, as they stand in the tensors."""
    rng, scheme = np.random.default_rng(3), SCHEMES[name]
    shapes = {tensor: np.shape(array) for tensor, (_, array) in scheme.layer("model.layers.0").items()}
    tensors = {tensor: [dtype, rng.uniform(-1, 1, shape).astype(numpy_dtype)] for tensor, shape in shapes.items()}
    experts = load(tmp_path, tensors)
    assert {weight_format.element.name for weight_format in experts.formats.values()} == {{"F16": "FP16", "F32": "FP32"}[dtype]}
    for projection in PROJECTIONS:
        found = reference.dequantize(experts.matrix(1, projection))
        if name == "bf16":
            expected = tensors[f"{BASE}.1.{projection}_proj.weight"][1]
        else:
            stored = tensors[f"{BASE}.{'down' if projection == 'down' else 'gate_up'}_proj"][1][1]
            rows = stored.T if name == "bf16 transposed" else stored
            halves = {"gate": slice(INTERMEDIATE), "up": slice(INTERMEDIATE, ROWS), "down": slice(None)}
            expected = rows[halves[projection]]
        assert np.array_equal(found, expected.astype(np.float64))
    with MoELayer(experts) as layer:
        assert_right(layer, experts, *random_batch(rng, experts, 3, 2, np.float32))


def test_fused_gate_rows_come_first(tmp_path):
    gate_up = np.arange(EXPERTS * ROWS, dtype=np.float32).reshape(EXPERTS, ROWS, 1).repeat(HIDDEN, 2)
    tensors = {
        f"{BASE}.gate_up_proj": ["BF16", gate_up.astype(BFLOAT16)],
        f"{BASE}.down_proj": zeros("BF16", EXPERTS, HIDDEN, INTERMEDIATE),
    }
    weights = load(tmp_path, tensors)
    assert weights.matrix(0, "gate").codes[:, 0].astype(int).tolist() == list(range(INTERMEDIATE))
    assert weights.matrix(0, "up").codes[:, 0].astype(int).tolist() == list(range(INTERMEDIATE, ROWS))


@pytest.mark.parametrize("name", ["bf16 fused", "bf16 transposed"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (7, 3), (96, 48), (48, 96), (64, 32), (64, 64)])
def test_shapes_tell_transposed_tensors_from_others(tmp_path, name, hidden, intermediate):
    """Also where a dimension of one is a dimension of the other."""
    scheme = SCHEMES[name]
    tensors = scheme.layer("model.layers.0", hidden=hidden, intermediate=intermediate)
    weights = load(tmp_path, tensors)
    assert (weights.num_experts, weights.hidden, weights.intermediate) == (EXPERTS, hidden, intermediate)
    for projection in PROJECTIONS:
        check_matrix(weights.matrix(1, projection), *scheme.meaning(tensors, BASE, 1, projection))


def test_no_shape_is_both_transposed_and_not():
    """gate_up [a, b] and down [c, d]: (2I, H) and (H, I) are never (H', 2I') and (I', H')."""
    sizes = list(itertools.product(range(1, 40), repeat=2))
    straight = {((2 * i, h), (h, i)) for h, i in sizes}
    assert straight.isdisjoint({((h, 2 * i), (i, h)) for h, i in sizes})


@pytest.mark.usefixtures("three_nodes")
def test_transposed_weights_are_what_the_checkpoint_has(tmp_path):
    """Through a layer on two nodes, and back: gate's and up's columns, and down's rows cut for tensor parallelism."""
    tensors = SCHEMES["bf16 transposed"].layer("model.layers.0", hidden=40, intermediate=192)
    gate_up, down = (tensors[f"{BASE}.{stem}"][1][2] for stem in ("gate_up_proj", "down_proj"))
    with MoELayer(load(tmp_path, tensors), numa_nodes=[1, 0]) as layer:
        for part, own in zip(layer.export_expert(2, parts=3), (slice(0, 64), slice(64, 128), slice(128, 192)), strict=True):
            np.testing.assert_array_equal(part["gate"].codes, gate_up[:, :192][:, own])
            np.testing.assert_array_equal(part["up"].codes, gate_up[:, 192:][:, own])
            np.testing.assert_array_equal(part["down"].codes, down[own])


LLAMA4 = {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}


@pytest.mark.parametrize(
    ("name", "config", "beside", "expected"),
    [
        ("llama4", LLAMA4, None, "expert_input"),
        ("llama4 fp8", LLAMA4, None, "expert_input"),
        ("bf16", LLAMA4["text_config"], None, "expert_input"),
        ("llama4", None, "feed_forward.shared_expert.down_proj.weight", "expert_input"),
        ("llama4", {"model_type": "lfm2_moe"}, "feed_forward.shared_expert.down_proj.weight", "down_output"),
        ("llama4", {}, "feed_forward.shared_experts.down_proj.weight", "down_output"),
        ("bf16", None, "mlp.shared_expert.down_proj.weight", "down_output"),
        ("bf16 transposed", {"model_type": "qwen3_vl_moe"}, None, "down_output"),
    ],
)
def test_the_router_weight_of_llama4_is_the_experts_inputs(tmp_path, name, config, beside, expected):
    """By the model's type; without one, by the shared expert beside the others."""
    tensors = SCHEMES[name].layer("model.layers.0")
    if beside:
        tensors |= {f"model.layers.0.{beside}": zeros("BF16", 8, 8)}
    checkpoint = write(tmp_path, tensors, config)
    experts = find_loader(checkpoint).load(checkpoint, 0)
    assert experts.router_weight == expected
    assert experts.take([1, 0]).router_weight == experts.with_activation(SILU).router_weight == expected
    with MoELayer(experts) as layer:
        assert layer.router_weight == expected
        rng = np.random.default_rng(1)
        x, ids, weights = random_batch(rng, experts, 3, 2, np.float32)
        assert_right(layer, experts, x, ids, weights)
        y = layer.forward(x, ids, weights)
    with MoELayer(experts, router_weight="down_output") as layer:
        assert layer.router_weight == "down_output"
        assert same_bits(layer.forward(x, ids, weights), y) == (expected == "down_output")
    with MoEModel.from_checkpoint(tmp_path) as model:
        assert model[0].router_weight == expected


FUSED, PER_EXPERT = SCHEMES["bf16 fused"].layer("model.layers.0"), SCHEMES["bf16"].layer("model.layers.0")
GATE, UP, DOWN = (f"{BASE}.0.{projection}_proj.weight" for projection in PROJECTIONS)
GATE_UP, ALL_DOWN = f"{BASE}.gate_up_proj", f"{BASE}.down_proj"
# label: (tensors, the one that is changed, what it is instead, error, what the message must hold)
REFUSED = {
    "F16 up": (PER_EXPERT, UP, zeros("F16", 64, 96), FormatError, ["dtype: expected BF16, found F16 [64, 96]"]),
    "F32 down": (PER_EXPERT, DOWN, zeros("F32", 96, 64), FormatError, ["dtype: expected BF16, found F32 [96, 64]"]),
    "flat": (PER_EXPERT, GATE, zeros("BF16", 64 * 96), FormatError, ["expected two dimensions above 0, found [6144]"]),
    "no rows": (PER_EXPERT, GATE, zeros("BF16", 0, 96), FormatError, ["expected two dimensions above 0, found [0, 96]"]),
    "bias": (PER_EXPERT, f"{BASE}.2.up_proj.bias", zeros("BF16", 64), FormatError, ["found one: biases"]),
    "scale": (PER_EXPERT, f"{BASE}.1.up_proj.weight_scale_inv", zeros("F32", 1, 1), FormatError, ["found one: scales"]),
    "fused F32 down": (FUSED, ALL_DOWN, zeros("F32", EXPERTS, 96, 64), FormatError, ["dtype: expected BF16, found F32"]),
    "fused bias": (FUSED, f"{GATE_UP}_bias", zeros("BF16", EXPERTS, ROWS), FormatError, ["found one: biases"]),
    "two dimensions": (FUSED, GATE_UP, zeros("BF16", ROWS, 96), FormatError, ["three dimensions above 0", "[128, 96]"]),
    "no experts": (FUSED, ALL_DOWN, zeros("BF16", 0, 96, 64), FormatError, ["three dimensions above 0", "[0, 96, 64]"]),
    "fewer experts": (FUSED, ALL_DOWN, zeros("BF16", 2, 96, 64), CheckpointError, ["= [3, 96, 64]", "found [2, 96, 64]"]),
    "odd rows": (FUSED, GATE_UP, zeros("BF16", EXPERTS, 127, 96), CheckpointError, ["even number of rows", "[3, 127, 96]"]),
    "only down transposed": (
        FUSED,
        ALL_DOWN,
        zeros("BF16", EXPERTS, 64, 96),
        CheckpointError,
        ["= [3, 96, 64]", "found [3, 64, 96]"],
    ),
}


@pytest.mark.parametrize("label", REFUSED)
def test_refused(tmp_path, label):
    tensors, name, tensor, error, words = REFUSED[label]
    with pytest.raises(error) as caught:
        load(tmp_path, tensors | {name: tensor})
    assert all(word in str(caught.value) for word in [f"{name}: ", "expected", *words]), str(caught.value)


@pytest.mark.parametrize(
    ("projection", "n", "k", "words"),
    [
        ("up", 64, 64, ["up_proj.weight: expected [n, k] = [64, 96]", "found [64, 64]"]),
        ("down", 64, 96, ["down_proj.weight: expected [n, k] = [96, 64]", "found [64, 96]"]),
    ],
)
def test_projections_that_do_not_fit(tmp_path, projection, n, k, words):
    changed = {f"{BASE}.{expert}.{projection}_proj.weight": zeros("BF16", n, k) for expert in range(EXPERTS)}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, PER_EXPERT | changed)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu_pytorch_tanh"),
        ("hidden_activation", "gelu"),
        ("swiglu_limit", 7.0),
        ("swiglu_alpha", 1.702),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_another_activation(tmp_path, key, value, nested):
    config = {"text_config": {key: value}} if nested else {key: value}
    with pytest.raises(FormatError, match=rf"{key} of config.json: expected .*, found {value!r}"):
        load(tmp_path, PER_EXPERT, config)


OAI = {"hidden_act": "swigluoai"}


@pytest.mark.parametrize(
    ("config", "alpha", "limit"),
    [
        (OAI, 1.702, 7.0),
        (OAI | {"swiglu_alpha": 1.5, "swiglu_limit": 10}, 1.5, 10.0),
        ({"text_config": OAI | {"swiglu_limit": 3.0}}, 1.702, 3.0),
        ({"model_type": "minimax_m3_vl", "text_config": {"hidden_act": "silu", "swiglu_limit": 3.0}}, 1.702, 3.0),
    ],
)
def test_the_activation_of_minimax_m3(tmp_path, config, alpha, limit):
    assert load(tmp_path, PER_EXPERT, config).activation == GatedActivation(alpha, limit, 1.0)


@pytest.mark.parametrize("key", ["swiglu_alpha", "swiglu_limit"])
@pytest.mark.parametrize("value", [0, -1.0, "7", True, math.inf, math.nan, 1e39])
def test_a_bad_activation_of_minimax_m3(tmp_path, key, value):
    with pytest.raises(CheckpointError, match=rf"{key} of config.json: expected a float32 number above 0, found"):
        load(tmp_path, PER_EXPERT, OAI | {key: value})


def test_fused_tensors_with_the_activation_of_gpt_oss_may_be_interleaved(tmp_path):
    with pytest.raises(FormatError, match=r"hidden_act of config.json: expected 'silu', found 'swigluoai'"):
        load(tmp_path, FUSED, OAI)


def test_quantized_experts_of_the_same_names_are_no_business_of_this_loader(tmp_path):
    """FP8 as DeepSeek-V3 has it."""
    tensors = {}
    for name in PER_EXPERT:
        tensors |= {name: zeros("F8_E4M3", 128, 128), f"{name}_scale_inv": zeros("F32", 1, 1)}
    checkpoint = write(tmp_path, tensors)
    assert loaders.get("bf16").detect(checkpoint) == 0
    with pytest.raises(FormatError, match=rf"{BASE}.0.down_proj.weight_scale_inv: expected none .*: scales mean quantized"):
        loaders.get("bf16").load(checkpoint, 0)


def test_two_spellings_in_one_layer(tmp_path):
    with pytest.raises(CheckpointError, match=rf"expected one name, found {BASE} \(gate_proj\) and {BASE} \(gate_up_proj\)"):
        load(tmp_path, PER_EXPERT | FUSED)


CLAMP = {"swiglu_limit": 10.0, "hidden_act": "silu"}


@pytest.mark.parametrize(
    ("name", "config", "limit"),
    [
        ("deepseek_v4 bf16", CLAMP, 10.0),
        ("deepseek_v4 bf16", {"model_type": "deepseek_v41", "text_config": CLAMP}, 10.0),
        ("deepseek_v4 bf16", {}, math.inf),
        ("bf16", CLAMP | {"model_type": "glm5_next"}, 10.0),
        ("bf16", CLAMP | {"model_type": "hy_v4", "swiglu_limit": None}, math.inf),
        ("bf16 fused", CLAMP | {"model_type": "deepseek_v4"}, 10.0),
    ],
)
def test_the_clamp_of_deepseek_v4(tmp_path, name, config, limit):
    """By its own module's name, and by the type of the models that have the same."""
    checkpoint = write(tmp_path, SCHEMES[name].layer("layers.0"), config)
    assert find_loader(checkpoint).load(checkpoint, 0).activation == GatedActivation(limit=limit)


def test_a_clamp_for_each_layer_is_refused(tmp_path):
    """Step-3.7 clamps after SiLU, and some layers only."""
    with pytest.raises(FormatError, match=r"swiglu_limits of config.json: expected none for this scheme, found \[0.0, 7.0\]"):
        load(tmp_path, SCHEMES["step3"].layer("layers.0"), {"swiglu_limits": [0.0, 7.0]})
