"""Names that checkpoints fuse and split: the same numbers by either, in every scheme; and load_mlp(), which needs both."""

import numpy as np
import pytest
from checkpoints import BF16, HIDDEN, PROJ, SCHEMES, W, check_matrix, write, zeros
from gguf_files import F32, f32, metadata
from gguf_files import write as write_gguf
from helpers import assert_right, random_batch

from ktmoe import MoELayer, load_matrix, load_mlp
from ktmoe.dequantization import dequantize
from ktmoe.errors import CheckpointError, FormatError, MissingTensorError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.dense import find_matrix
from ktmoe.weights.activation import SILU, GatedActivation
from ktmoe.weights.formats import BF16 as BF16_FORMAT
from ktmoe.weights.formats import FP8_PER_ROW

ALONE = [name for name, scheme in SCHEMES.items() if not scheme.stacked]
ATTENTION = "model.layers.0.self_attn"
#: One head each of 128 rows.
HEADS = {"num_attention_heads": 1, "head_dim": 128}
BITS = {"config_groups": {"a": {"weights": {"num_bits": 4}}}}


def matrices(name, names, rows) -> tuple[dict, list[np.ndarray]]:
    """Matrices [rows, HIDDEN] of a scheme by these names: their tensors, and what they mean."""
    scheme = SCHEMES[name]
    stored = scheme.layer("layers.0", intermediate=rows)
    base = f"layers.0.{scheme.module}"
    stem = next(stems["gate"] for stems in (PROJ, W) if any(f".{stems['gate']}." in each for each in stored))
    tensors = {
        new + each.removeprefix(f"{base}.{expert}.{stem}"): tensor
        for expert, new in enumerate(names)
        for each, tensor in stored.items()
        if each.startswith(f"{base}.{expert}.{stem}.")
    }
    return tensors, [scheme.meaning(stored, base, expert, "gate")[0] for expert in range(len(names))]


def config_of(name) -> dict:
    return HEADS | ({"quantization_config": BITS} if name == "int4 per row" else {})


@pytest.mark.parametrize("name", ALONE)
def test_joined(tmp_path, name):
    """q, k and v are stored, all of them are asked for."""
    tensors, meanings = matrices(name, [f"{ATTENTION}.{stem}_proj" for stem in "qkv"], 128)
    bias = np.arange(128, dtype=np.float32)
    checkpoint = write(tmp_path, tensors | {f"{ATTENTION}.k_proj.bias": ["F32", bias]}, config_of(name))
    found = find_matrix(checkpoint, f"{ATTENTION}.qkv_proj")
    matrix = found.read()
    assert (found.name, found.format, found.shape) == (matrix.name, matrix.format, matrix.shape)
    assert found.has_bias
    check_matrix(matrix, np.concatenate(meanings), np.concatenate([np.zeros(128), bias, np.zeros(128)]))


@pytest.mark.parametrize("name", ALONE)
def test_some_rows(tmp_path, name):
    """All of q, k and v are stored, each is asked for."""
    tensors, (meaning,) = matrices(name, [f"{ATTENTION}.qkv_proj"], 384)
    bias = np.arange(384, dtype=np.float32)
    checkpoint = write(tmp_path, tensors | {f"{ATTENTION}.qkv_proj.bias": ["F32", bias]}, config_of(name))
    for index, stem in enumerate("qkv"):
        rows = slice(128 * index, 128 * (index + 1))
        found = find_matrix(checkpoint, f"{ATTENTION}.{stem}_proj")
        matrix = found.read()
        assert (found.name, found.format, found.shape) == (matrix.name, matrix.format, matrix.shape)
        check_matrix(matrix, meaning[rows], bias[rows])


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}, (32, 16, 16)),
        ({"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}, (32, 16, 16)),
        ({"text_config": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}}, (32, 16, 16)),
    ],
)
def test_rows_by_config(tmp_path, config, rows):
    weights = np.random.default_rng(0).standard_normal((64, 4)).astype(BF16)
    checkpoint = write(tmp_path, {"a.qkv_proj.weight": ["BF16", weights]}, config)
    first = 0
    for stem, count in zip("qkv", rows, strict=True):
        check_matrix(load_matrix(checkpoint, f"a.{stem}_proj"), weights[first : first + count].astype(float), None)
        first += count


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"num_attention_heads of config.json: expected a count, to know the rows of qkv_proj, found None"),
        ({"num_attention_heads": 0}, r"num_attention_heads of config.json: expected a count, .* found 0"),
        ({"num_attention_heads": True}, r"num_attention_heads of config.json: expected a count, .* found True"),
        ({"num_attention_heads": 3}, r"hidden_size of config.json: expected a count"),
        ({"num_attention_heads": 4, "head_dim": "8"}, r"head_dim of config.json: expected a count, .* found '8'"),
        (
            {"num_attention_heads": 4, "head_dim": 8},
            r"a.qkv_proj: expected 32 \+ 32 \+ 32 rows for q_proj, k_proj, v_proj, found 64",
        ),
    ],
)
def test_rows_that_config_does_not_say(tmp_path, config, message):
    checkpoint = write(tmp_path, {"a.qkv_proj.weight": zeros("BF16", 64, 4)}, config)
    with pytest.raises(CheckpointError, match=message):
        find_matrix(checkpoint, "a.q_proj")


def test_rows_within_a_scales_block(tmp_path):
    tensors, _ = matrices("fp8", ["a.gate_up_proj"], 128)
    checkpoint = write(tmp_path, tensors)
    with pytest.raises(FormatError, match=r"^a.gate_up_proj: .* expected rows in multiples of 128, found 64 to 128 of 128$"):
        find_matrix(checkpoint, "a.up_proj")
    tensors, _ = matrices("fp8", ["b.gate_proj", "b.up_proj"], 64)
    checkpoint = write(tmp_path, tensors)
    with pytest.raises(FormatError, match=r"^b.gate_proj: .* expected a multiple of 128 rows to join others to, found 64$"):
        find_matrix(checkpoint, "b.gate_up_proj")


def test_both_names(tmp_path):
    """Nobody knows which of them the model means."""
    names = ("a.gate_proj", "a.up_proj", "a.gate_up_proj")
    checkpoint = write(tmp_path, {f"{name}.weight": zeros("BF16", 4, 4) for name in names})
    for name, other in (("a.up_proj", "a.gate_up_proj"), ("a.gate_up_proj", "a.gate_proj")):
        with pytest.raises(CheckpointError, match=rf"expected {name} or {other}, found both$"):
            find_matrix(checkpoint, name)


def test_some_of_the_matrices(tmp_path):
    tensors = {f"a.{stem}_proj.weight": zeros("BF16", 4, 4) for stem in "qv"}
    with pytest.raises(
        MissingTensorError, match=r"matrix 'a.k_proj': expected tensors of this name, found 'q_proj', 'v_proj' in 'a'"
    ):
        load_matrix(write(tmp_path, tensors), "a.qkv_proj")


def test_matrices_of_different_formats(tmp_path):
    tensors = {
        "a.q_proj.weight": zeros("BF16", 4, 4),
        "a.k_proj.weight": zeros("F16", 4, 4),
        "a.v_proj.weight": zeros("BF16", 4, 4),
    }
    with pytest.raises(FormatError, match=r"^a.k_proj: expected BF16 with k = 4 as a.q_proj is, .* found FP16 with k = 4$"):
        load_matrix(write(tmp_path, tensors), "a.qkv_proj")


# MLPs


SILU_CONFIG = {"hidden_act": "silu"}


def mlp(name, base="model.layers.0.mlp") -> tuple[dict, list[np.ndarray]]:
    """The tensors of one MLP of a scheme, and what gate, up and down mean."""
    scheme = SCHEMES[name]
    stored = scheme.layer("layers.0")
    old = f"layers.0.{scheme.module}"
    tensors = {base + each.removeprefix(f"{old}.1"): tensor for each, tensor in stored.items() if each.startswith(f"{old}.1.")}
    return tensors, [scheme.meaning(stored, old, 1, projection)[0] for projection in PROJECTIONS]


@pytest.mark.parametrize("name", ALONE)
def test_an_mlp(tmp_path, name):
    """As experts of a layer that has one, by either model's names of the matrices."""
    tensors, meanings = mlp(name)
    write(tmp_path, tensors, config_of(name) | SILU_CONFIG)
    experts = load_mlp(tmp_path, "model.layers.0.mlp")
    assert (experts.num_experts, experts.hidden, experts.intermediate, experts.activation) == (1, HIDDEN, 64, SILU)
    for projection, meaning in zip(PROJECTIONS, meanings, strict=True):
        check_matrix(experts.matrix(0, projection), meaning, None)


def test_an_mlp_is_computed(tmp_path):
    """gate_up_proj and biases; one expert of a layer, whose router weight is 1, as the reference has it."""
    rng = np.random.default_rng(3)
    made = {name: rng.standard_normal(shape).astype(BF16) for name, shape in (("gate_up", (128, 96)), ("down", (96, 64)))}
    tensors = {f"a.{name}_proj.weight": ["BF16", array] for name, array in made.items()}
    tensors |= {f"a.{name}_proj.bias": ["BF16", rng.standard_normal(len(array)).astype(BF16)] for name, array in made.items()}
    experts = load_mlp(write(tmp_path, tensors, {"hidden_act": "silu"}), "a")
    bias = tensors["a.gate_up_proj.bias"][1].astype(np.float32)
    check_matrix(experts.matrix(0, "gate"), made["gate_up"][:64].astype(float), bias[:64])
    check_matrix(experts.matrix(0, "up"), made["gate_up"][64:].astype(float), bias[64:])
    x, ids, _ = random_batch(rng, experts, 3, 1)
    with MoELayer(experts, "fp32_lut") as layer:
        assert_right(layer, experts, x, ids, np.ones((3, 1), np.float32))


def test_gate_and_up_of_one_tensor_are_read_once(tmp_path, monkeypatch):
    """If they are asked for in turn; then again, as whoever packs twice does."""
    stored = {"a.gate_up_proj.weight": zeros("BF16", 16, 4), "a.down_proj.weight": zeros("BF16", 4, 8)}
    experts, read, names = load_mlp(write(tmp_path, stored, SILU_CONFIG), "a"), Checkpoint.read, []
    monkeypatch.setattr(Checkpoint, "read", lambda self, name, **other: names.append(name) or read(self, name, **other))
    for _ in range(2):
        assert [experts.matrix(0, projection).name for projection in PROJECTIONS] == ["a.gate_proj", "a.up_proj", "a.down_proj"]
    assert names == ["a.gate_up_proj.weight", "a.down_proj.weight"] * 2


def test_projections_may_have_formats_of_their_own(tmp_path):
    """As where config.json leaves some layers as they are."""
    tensors, _ = mlp("fp8 per row")
    for each in [each for each in tensors if ".down_proj." in each]:
        del tensors[each]
    tensors["model.layers.0.mlp.down_proj.weight"] = zeros("BF16", HIDDEN, 64)
    experts = load_mlp(write(tmp_path, tensors, SILU_CONFIG), "model.layers.0.mlp")
    assert experts.formats == {"gate": FP8_PER_ROW, "up": FP8_PER_ROW, "down": BF16_FORMAT}
    assert experts.matrix(0, "down").format == BF16_FORMAT


def test_an_mlps_activation(tmp_path):
    """As the model has it for such MLPs, or as it is given: Hunyuan's next model clamps its experts alone."""
    tensors = {f"a.{stem}.weight": zeros("BF16", 4, 4) for stem in PROJ.values()}
    clamped = write(tmp_path, tensors, {"model_type": "deepseek_v4", "swiglu_limit": 10})
    assert load_mlp(clamped, "a").activation == GatedActivation(limit=10.0)
    alone = write(tmp_path, tensors, {"model_type": "hy_v4", "hidden_act": "silu", "swiglu_limit": 10})
    assert load_mlp(alone, "a").activation == SILU
    for config, words in (
        ({}, "expected hidden_act or hidden_activation, to know what MLPs compute, found neither: pass activation="),
        ({"hidden_act": "silu", "swiglu_limits": [0, 7]}, "swiglu_limits of config.json: .*: pass activation="),
    ):
        with pytest.raises(FormatError, match=words):
            load_mlp(write(tmp_path, tensors, config), "a")
    gelu = write(tmp_path, tensors, {"hidden_act": "gelu"})
    with pytest.raises(FormatError, match=r"hidden_act of config.json: expected 'silu', found 'gelu'"):
        load_mlp(gelu, "a")
    assert load_mlp(gelu, "a", activation=SILU).activation == SILU


@pytest.mark.parametrize(
    ("tensors", "kind", "message"),
    [
        ({}, MissingTensorError, r"MLP 'a': expected tensors of a.down_proj or a.w2, found none"),
        ({"a.down_proj": (4, 8), "a.w2": (4, 8)}, CheckpointError, r"expected a.down_proj or a.w2, found both"),
        ({"a.down_proj": (4, 8), "a.gate_proj": (8, 4)}, MissingTensorError, r"matrix 'a.up_proj': expected"),
        (
            {"a.down_proj": (4, 8), "a.gate_proj": (8, 4), "a.up_proj": (7, 4)},
            CheckpointError,
            r"a.up_proj: expected \[n, k\] = \[8, 4\], as a.gate_proj is \[8, 4\], found \[7, 4\]",
        ),
        (
            {"a.down_proj": (4, 7), "a.gate_up_proj": (16, 4)},
            CheckpointError,
            r"a.down_proj: expected \[n, k\] = \[4, 8\], as a.gate_proj is \[8, 4\], found \[4, 7\]",
        ),
        (
            {"a.down_proj": (4, 7), "a.gate_up_proj": (15, 4)},
            CheckpointError,
            r"a.gate_up_proj: expected 7 \+ 7 rows .* found 15",
        ),
    ],
)
def test_what_is_no_mlp(tmp_path, tensors, kind, message):
    stored = {f"{name}.weight": zeros("BF16", *shape) for name, shape in tensors.items()} | {"b": zeros("BF16", 1)}
    with pytest.raises(kind, match=message):
        load_mlp(write(tmp_path, stored), "a")


def gguf(folder, end="", architecture="qwen2moe", **keys) -> Checkpoint:
    rng = np.random.default_rng(0)
    shapes = {"gate": (64, 32), "up": (64, 32), "down": (32, 64)}
    tensors = {
        f"blk.1.ffn_{projection}{end}.weight": (F32, shape, rng.standard_normal(shape).astype(np.float32).tobytes())
        for projection, shape in shapes.items()
    }
    keys = {f"{architecture}.{key}": value for key, value in keys.items()}
    return Checkpoint(write_gguf(folder / "m.gguf", metadata(architecture) | keys, tensors))


@pytest.mark.parametrize(
    ("end", "base", "architecture"),
    [("", "blk.1.ffn", "qwen2moe"), ("_shexp", "blk.1.ffn_shexp", "qwen2moe"), ("", "blk.1.ffn", "qwen3")],
)
def test_mlps_of_gguf(tmp_path, end, base, architecture):
    checkpoint = gguf(tmp_path, end, architecture)
    experts = load_mlp(checkpoint, base)
    assert experts.activation == SILU
    for projection in PROJECTIONS:
        name = f"blk.1.ffn_{projection}{end}"
        expected = checkpoint.read(f"{name}.weight").view(np.float32).reshape(experts.shape(projection))
        np.testing.assert_array_equal(dequantize(experts.matrix(0, projection)), expected)


@pytest.mark.parametrize(
    ("architecture", "keys", "found"),
    [
        ("gpt-oss", {}, "'gpt-oss': pass activation="),
        ("step35", {"swiglu_clamp_shexp": f32(7)}, "'step35': pass activation="),
        ("deepseek4", {}, "'deepseek4': pass activation="),
        ("gemma4", {}, "'gemma4': pass activation="),
        ("gemma3", {}, "'gemma3': pass activation="),
        ("qwen3", {"swiglu_clamp_shexp": f32(7)}, "'qwen3': pass activation="),
    ],
)
def test_an_activation_of_gguf_that_is_not_known(tmp_path, architecture, keys, found):
    checkpoint = gguf(tmp_path, "", architecture, **keys)
    with pytest.raises(FormatError, match=rf"general.architecture: expected .*, found {found}"):
        load_mlp(checkpoint, "blk.1.ffn")
    assert load_mlp(checkpoint, "blk.1.ffn", activation=SILU).activation == SILU
