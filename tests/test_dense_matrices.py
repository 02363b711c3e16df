"""load_matrix() and find_matrix(): dense matrices of every scheme that experts have, with biases; and what is refused."""

import ml_dtypes
import numpy as np
import pytest
from checkpoints import BF16, HIDDEN, INTERMEDIATE, PROJ, SCHEMES, W, check_matrix, e4m3, write, write_index, zeros
from ggml_records import random_codes
from gguf_files import BF16 as GGUF_BF16
from gguf_files import F32, NVFP4, Q1_0, Q8_0, metadata, records
from gguf_files import write as write_gguf

from ktmoe import load_matrix, load_mlp
from ktmoe.errors import CheckpointError, FormatError, InputError, MissingTensorError, UnavailableError, UnknownNameError
from ktmoe.loaders import registry
from ktmoe.loaders.base import Loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.dense import find_matrix
from ktmoe.weights.formats import BF16 as BF16_FORMAT
from ktmoe.weights.formats import F32 as F32_FORMAT
from ktmoe.weights.formats import MXFP8, fp8
from ktmoe.weights.ggml import GGML, TYPES
from ktmoe.weights.scales import Factor

NAME = "model.layers.3.self_attn.q_proj"
#: Schemes of which each matrix has tensors of its own.
ALONE = [name for name, scheme in SCHEMES.items() if not scheme.stacked]
#: What config.json must say where neither shapes nor tensors say how many bits a code has.
BITS = {"int4 per row": 4}


def weights_config(**weights) -> dict:
    """A config.json of compressed-tensors with these words on weights."""
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}}}


def dense(name, projection="gate") -> tuple[dict, np.ndarray, dict]:
    """One matrix of a scheme: its tensors, what they mean, and config.json."""
    scheme = SCHEMES[name]
    of_experts = scheme.layer("layers.0")
    weights, _ = scheme.meaning(of_experts, f"layers.0.{scheme.module}", 1, projection)
    old = [f"layers.0.{scheme.module}.1.{stems[projection]}" for stems in (PROJ, W)]
    tensors = {
        NAME + each.removeprefix(prefix): tensor
        for each, tensor in of_experts.items()
        for prefix in old
        if each.startswith(f"{prefix}.")
    }
    return tensors, weights, weights_config(num_bits=BITS[name]) if name in BITS else {}


@pytest.mark.parametrize("projection", ["gate", "down"])
@pytest.mark.parametrize("name", ALONE)
def test_every_scheme(tmp_path, name, projection):
    """Beside an unquantized one, with a bias."""
    tensors, weights, config = dense(name, projection)
    bias = np.random.default_rng(1).standard_normal(len(weights)).astype(BF16)
    tensors[f"{NAME}.bias"] = ["BF16", bias]
    tensors["lm_head.weight"] = zeros("BF16", 8, 8)
    checkpoint = write(tmp_path, tensors, config)
    found = find_matrix(checkpoint, NAME)
    matrix = found.read()
    check_matrix(matrix, weights, bias.astype(np.float32))
    assert (found.name, found.format, found.shape) == (matrix.name, matrix.format, matrix.shape)
    assert (matrix.name, matrix.shape) == (NAME, weights.shape)
    assert found.has_bias
    assert found.nbytes == sum(array.nbytes for array in matrix.stored.values())
    by_name = load_matrix(tmp_path, NAME, scheme=SCHEMES[name].loader)
    assert by_name.format == matrix.format
    check_matrix(load_matrix(tmp_path, "lm_head"), np.zeros((8, 8)), None)


@pytest.mark.parametrize(("dtype", "number"), [("BF16", BF16), ("F16", np.float16), ("F32", np.float32)])
def test_a_bias_is_float32_exactly(tmp_path, dtype, number):
    bias = np.random.default_rng(0).standard_normal(8).astype(number)
    write(tmp_path, {"a.weight": zeros("F32", 8, 4), "a.bias": [dtype, bias]})
    matrix = load_matrix(tmp_path, "a")
    assert matrix.format == F32_FORMAT
    assert matrix.bias.dtype == np.float32
    np.testing.assert_array_equal(matrix.bias, bias.astype(np.float32))


def test_finding_reads_no_tensor(tmp_path, monkeypatch):
    tensors, _, _ = dense("gptq")
    checkpoint = write(tmp_path, tensors)
    monkeypatch.setattr(Checkpoint, "read", None)
    assert find_matrix(checkpoint, NAME).shape == (INTERMEDIATE, HIDDEN)


# GGUF


@pytest.mark.parametrize("kind", GGML)
def test_every_type_of_gguf(tmp_path, kind):
    weight_format, n, k = GGML[kind], 6, 512
    number = next(number for number, of in TYPES.items() if of.name == kind)
    stored = random_codes(np.random.default_rng(5), weight_format, 1, n, k)[0]
    bias = np.arange(n, dtype=np.float32)
    tensors = {
        "blk.0.attn_q.weight": (number, (n, k), stored.tobytes()),
        "blk.0.attn_q.bias": (F32, (n,), bias.tobytes()),
        "output.weight": (number, (n, k), stored.tobytes()),
    }
    write_gguf(tmp_path / "m.gguf", metadata("qwen3"), tensors)
    for name, expected in (("blk.0.attn_q", bias), ("output", None)):
        matrix = load_matrix(tmp_path, name)
        assert (matrix.format, matrix.shape) == (weight_format, (n, k))
        assert matrix.codes.tobytes() == stored.tobytes()
        assert (matrix.bias is None) == (expected is None)
        assert expected is None or (matrix.bias == expected).all()
        if weight_format.factor:
            assert matrix.factor.tolist() == [1]


def test_a_scale_of_gguf_is_a_factor(tmp_path):
    """Of NVFP4, which has one anyway, and of a type that has none."""
    scale = (F32, (1,), np.float32(0.375).tobytes())
    tensors = {
        "a.weight": (NVFP4, (2, 64), bytes(72)),
        "a.scale": scale,
        "b.weight": (Q8_0, (2, 32), records(0, Q8_0, (2, 32))),
        "b.scale": scale,
        "b.input_scale": scale,
    }
    write_gguf(tmp_path / "m.gguf", metadata(), tensors)
    for name, weight_format in (("a", GGML["NVFP4"]), ("b", GGML["Q8_0"])):
        matrix = load_matrix(tmp_path, name)
        assert matrix.format.element == weight_format.element
        assert matrix.format.factor == Factor(per_row=False)
        assert matrix.factor.tolist() == [0.375]


def test_a_matrix_of_one_row_in_gguf(tmp_path):
    """ggml leaves a first dimension of 1 out."""
    row = np.arange(4, dtype=np.float32).astype(BF16)
    write_gguf(tmp_path / "m.gguf", metadata(), {"blk.1.ffn_gate_inp_shexp.weight": (GGUF_BF16, (4,), row.tobytes())})
    matrix = load_matrix(tmp_path / "m.gguf", "blk.1.ffn_gate_inp_shexp")
    assert matrix.format == BF16_FORMAT
    np.testing.assert_array_equal(matrix.codes, row[None])


def test_a_type_of_gguf_that_is_not_computed(tmp_path):
    write_gguf(tmp_path / "m.gguf", metadata(), {"output.weight": (Q1_0, (2, 256), bytes(72))})
    with pytest.raises(FormatError, match=r"output.weight: type: expected one of .*Q4_K.*, found Q1_0 \[2, 256\]"):
        load_matrix(tmp_path, "output")


# What says how many bits compressed-tensors' codes have


def packed(rows, items, groups):
    return {"a.weight_packed": zeros("I32", rows, items), "a.weight_scale": zeros("BF16", rows, groups)}


@pytest.mark.parametrize(
    ("config", "groups", "bits"),
    [
        (weights_config(num_bits=8), 3, 8),
        (weights_config(num_bits=4), 3, 4),
        (weights_config(group_size=32), 4, 8),
        (weights_config(group_size=32), 8, 4),
        (weights_config(num_bits=4, strategy="channel"), 1, 4),
    ],
)
def test_bits_by_config(tmp_path, config, groups, bits):
    write(tmp_path, packed(2, 32 if groups != 3 else 24, groups), config)
    matrix = load_matrix(tmp_path, "a")
    assert matrix.shape == (2, (32 if groups != 3 else 24) * 32 // bits)


def test_bits_by_weight_shape_in_spite_of_config(tmp_path):
    """A config has several groups of layers, and may be of others."""
    tensors = packed(2, 32, 4) | {"a.weight_shape": ["I64", np.array([2, 128])]}
    write(tmp_path, tensors, weights_config(num_bits=4))
    assert load_matrix(tmp_path, "a").shape == (2, 128)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({}, {}, r"a.weight_packed: expected weight_shape, or num_bits .* 4 or 8 bits, found 32 items a row"),
        ({"a.weight_shape": ["I64", np.array([2, 77])]}, {}, r"a.weight_packed: expected weight_shape, or num_bits"),
        ({"a.weight_shape": ["I64", np.array([2, -(2**63)])]}, {}, r"a.weight_packed: expected weight_shape, or num_bits"),
        ({"a.weight_shape": ["I32", np.array([2, 8, 1], np.int32)]}, {}, r"a.weight_shape: shape: expected \[2\] \(n and k\)"),
        ({"a.weight_shape": zeros("F32", 2)}, {}, r"a.weight_shape: dtype: expected I32 or I64, found F32 \[2\]"),
        ({}, weights_config(num_bits=3), r"num_bits: expected 4 or 8, found 3"),
    ],
)
def test_bits_that_nothing_says(tmp_path, change, config, message):
    write(tmp_path, packed(2, 32, 4) | change, config)
    with pytest.raises(FormatError, match=message):
        load_matrix(tmp_path, "a")


# What is refused


FP8 = {"a.weight": zeros("F8_E4M3", 256, 128)}


@pytest.mark.parametrize(
    ("tensors", "kind", "message"),
    [
        (FP8, MissingTensorError, r"a.weight_scale_inv: expected beside weight, found no such tensor"),
        ({"a.qweight": zeros("I32", 8, 8)}, MissingTensorError, r"a.scales: expected beside qweight, found no such tensor"),
        ({"a.packed": zeros("U8", 3, 5)}, UnavailableError, r"'a': no scheme knows such tensors. Found a.packed U8 \[3, 5\]"),
        (
            FP8 | {"a.weight_scale_inv": zeros("F32", 2, 2)},
            FormatError,
            r"a.weight_scale_inv: shape: expected \[2, 1\] \(one scale per 128x128\), found \[2, 2\]",
        ),
        (FP8 | {"a.weight_scale_inv": zeros("I16", 2, 1)}, FormatError, r"expected F32 or BF16 or F8_E8M0, found I16 \[2, 1\]"),
        (FP8 | {"a.scale": zeros("F32", 2, 1)}, FormatError, r"a.scale: dtype: expected F8_E8M0 or U8, found F32 \[2, 1\]"),
        (
            {"a.weight": zeros("BF16", 2, 2, 2)},
            FormatError,
            r"a.weight: shape: expected two dimensions above 0, found \[2, 2, 2\]",
        ),
        ({"a.weight": zeros("BF16", 2)}, FormatError, r"a.weight: shape: expected two dimensions above 0, found \[2\]"),
        ({"a.weight": zeros("I16", 2, 2)}, FormatError, r"a.weight: dtype: expected BF16 or F16 or F32, found I16 \[2, 2\]"),
        (
            {"a.weight": zeros("BF16", 2, 2), "a.bias": zeros("BF16", 3)},
            FormatError,
            r"a.bias: shape: expected \[2\] \(one bias per row\), found \[3\]",
        ),
        (
            {"a.weight": zeros("BF16", 2, 2), "a.bias": zeros("I32", 2)},
            FormatError,
            r"a.bias: dtype: expected F32 or BF16 or F16, found I32 \[2\]",
        ),
        (
            {"a.weight": zeros("BF16", 2, 2), "a.lora_A.weight": zeros("BF16", 1, 2)},
            FormatError,
            r"a.lora_A.weight: expected none beside weight, found one: its meaning is not known",
        ),
        (
            {"a.weight": zeros("I8", 2, 32), "a.weight_scale": zeros("F32", 2, 1), "a.weight_zero_point": zeros("I8", 2, 1)},
            FormatError,
            r"a.weight_zero_point: expected none .*: asymmetric quantization to 8 bits is not supported",
        ),
    ],
)
def test_refused(tmp_path, tensors, kind, message):
    write(tmp_path, tensors)
    with pytest.raises(kind, match=message):
        load_matrix(tmp_path, "a")


def test_a_name_that_there_is_not(tmp_path):
    """The message says what is there: the tensor of that name, or the names beside it."""
    checkpoint = write(tmp_path, {f"m.attn.{stem}.weight": zeros("BF16", 2, 2) for stem in ("q", "o")})
    for name, found in (
        ("m.attn.q.weight", "one tensor that is called so: the matrix is 'm.attn.q'"),
        ("m.attn.k", "'o', 'q' in 'm.attn'"),
        ("x", "2 others"),
        ("m.attn.q\n", "'o', 'q' in 'm.attn'"),
    ):
        with pytest.raises(MissingTensorError) as caught:
            load_matrix(checkpoint, name)
        assert str(caught.value) == f"{tmp_path}: matrix {name!r}: expected tensors of this name, found {found}"


def test_a_name_is_no_other_ones_beginning(tmp_path):
    write(tmp_path, {"a.q.weight": zeros("BF16", 2, 2), "a.q_norm.weight": zeros("BF16", 4), "a.q-x.weight": zeros("U8", 1)})
    assert load_matrix(tmp_path, "a.q").shape == (2, 2)


def test_scales_of_the_cache_and_of_inputs_say_nothing_of_weights(tmp_path):
    tensors = {"a.k_proj.weight": zeros("BF16", 2, 2)}
    tensors |= {f"a.k_proj.{ending}": zeros("F32", 1) for ending in ("k_scale", "output_scale", "input_scale")}
    write(tmp_path, tensors)
    assert load_matrix(tmp_path, "a.k_proj").format == BF16_FORMAT


def test_two_meanings(tmp_path):
    """One scale for 1 x 32 weights may be a block's or a row's."""
    codes = e4m3(np.random.default_rng(0), 1, 32)
    checkpoint = write(tmp_path, {"a.weight": ["F8_E4M3", codes], "a.weight_scale_inv": zeros("F8_E8M0", 1, 1)})
    with pytest.raises(
        FormatError, match=r"a: expected tensors of one meaning, found .* \(fp8\) or .* \(mxfp8\): pass scheme="
    ):
        load_matrix(checkpoint, "a")
    assert load_matrix(checkpoint, "a", scheme="mxfp8").format == MXFP8
    assert load_matrix(checkpoint, "a", scheme="fp8").format == fp8("ue8m0")


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_one_scale_is_a_blocks(tmp_path, dtype):
    """[1, 1]: a factor of the matrix, which would be the same number, has [] or [1]."""
    scale = np.full((1, 1), 0.375, np.float32 if dtype == "F32" else BF16)
    codes = e4m3(np.random.default_rng(0), 96, 128)
    checkpoint = write(tmp_path, {"a.weight": ["F8_E4M3", codes], "a.weight_scale": [dtype, scale]})
    weights = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 0.375
    matrix = load_matrix(checkpoint, "a")
    assert matrix.format == fp8({"F32": "fp32", "BF16": "bf16"}[dtype])
    check_matrix(matrix, weights, None)


@pytest.mark.parametrize("name", ["layers.3.ffn.gate", "model.layers.3.ffn.gate", "mtp.0.ffn.gate"])
def test_a_routers_bias_of_deepseeks_names(tmp_path, name):
    router = {f"{name}.weight": zeros("BF16", 4, 8), f"{name}.bias": zeros("F32", 4)}
    with pytest.raises(FormatError, match=rf"{name}.bias: expected none .* corrects the choice of experts alone"):
        load_matrix(write(tmp_path, router), name)


def test_an_output_layer_that_is_the_embedding(tmp_path):
    tensors = {"model.embed_tokens.weight": zeros("BF16", 8, 4)}
    with pytest.raises(MissingTensorError, match=r"1 others: .* the output layer, too: ask for 'model.embed_tokens'"):
        load_matrix(write(tmp_path, tensors, {"tie_word_embeddings": True}), "lm_head")
    with pytest.raises(MissingTensorError, match=r"found 1 others$"):
        load_matrix(write(tmp_path, tensors, {"tie_word_embeddings": False}), "lm_head")


@pytest.mark.parametrize("name", [None, 3, b"a"])
def test_a_name_that_is_no_str(tmp_path, name):
    checkpoint = write(tmp_path, {"a.weight": zeros("BF16", 2, 2)})
    with pytest.raises(InputError, match="name must be a str, found"):
        load_matrix(checkpoint, name)
    with pytest.raises(InputError, match="base must be a str, found"):
        load_mlp(checkpoint, name)


def test_a_plugins_scheme_that_is_none(tmp_path):
    """Its attribute may be called so for reasons of its own."""
    methods = {"scheme": "https", "detect": lambda *_: 0, "layers": lambda *_: [], "load": None}
    registry.register("strange", type("Strange", (Loader,), methods)())
    try:
        checkpoint = write(tmp_path, {"a.weight": zeros("BF16", 2, 2)})
        assert load_matrix(checkpoint, "a").format == BF16_FORMAT
        with pytest.raises(UnavailableError, match="no scheme of loader 'strange'"):
            load_matrix(checkpoint, "a", scheme="strange")
    finally:
        registry.unregister("strange")


def test_a_scheme_that_does_not_read_it(tmp_path):
    checkpoint = write(tmp_path, {"a.weight": zeros("BF16", 2, 2)})
    with pytest.raises(MissingTensorError, match=r"a.weight_scale_inv: expected beside weight"):
        load_matrix(checkpoint, "a", scheme="fp8")
    with pytest.raises(
        UnavailableError, match=r"'a': no scheme of loader 'gptq' knows such tensors. Found a.weight BF16 \[2, 2\]"
    ):
        load_matrix(checkpoint, "a", scheme="gptq")
    with pytest.raises(UnknownNameError, match="unknown loader 'x'"):
        load_matrix(checkpoint, "a", scheme="x")


def test_what_config_says_is_not_supported(tmp_path):
    """But a matrix that the config leaves as it is has nothing to do with it."""
    tensors, *_ = dense("awq")
    tensors["b.weight"] = zeros("BF16", 2, 2)
    write(tmp_path, tensors, {"quantization_config": {"quant_method": "awq", "bits": 3, "modules_to_not_convert": ["b"]}})
    with pytest.raises(FormatError, match=r"quantization_config.bits: expected 4, found 3"):
        load_matrix(tmp_path, NAME)
    assert load_matrix(tmp_path, "b").format == BF16_FORMAT


@pytest.mark.parametrize(
    ("layer", "rotated"),
    [("*.self_attn.q_proj", True), (NAME, True), ("q_proj", True), ("*.down_proj", False), ("proj", False)],
)
def test_rotated_inputs(tmp_path, layer, rotated):
    algorithm = {"online_config": {"online_rotation_layers": [layer]}}
    write(tmp_path, {f"{NAME}.weight": zeros("BF16", 2, 2)}, {"quantization_config": {"algo_config": [algorithm]}})
    if rotated:
        with pytest.raises(FormatError, match=rf"expected none of {NAME}, found .*: inputs would have to be rotated"):
            load_matrix(tmp_path, NAME)
    else:
        assert load_matrix(tmp_path, NAME).shape == (2, 2)


def test_a_file_that_is_not_there(tmp_path):
    write_index(tmp_path, {"a.weight": "1.safetensors"})
    with pytest.raises(MissingTensorError, match=r"1.safetensors: expected .* tensor 'a.weight', found no such file"):
        load_matrix(tmp_path, "a")


def test_a_file_that_is_truncated_after_its_header_was_read(tmp_path):
    checkpoint = write(tmp_path, {"a.weight": zeros("BF16", 64, 64)})
    found = find_matrix(checkpoint, "a")
    info = checkpoint.info("a.weight")
    with info.file.open("r+b") as file:
        file.truncate(info.offset + 100)
    with pytest.raises(CheckpointError, match=r"truncated: tensor 'a.weight': expected 8192 bytes"):
        found.read()


def test_numbers_of_v4s_dense_matrices(tmp_path):
    """FP8 with UE8M0 scales of 128x128 blocks, by DeepSeek-V4's names."""
    codes = e4m3(np.random.default_rng(0), 160, 256)
    scales = np.array([[120, 127], [130, 128]], np.uint8)
    write(tmp_path, {"layers.0.attn.wq_a.weight": ["F8_E4M3", codes], "layers.0.attn.wq_a.scale": ["F8_E8M0", scales]})
    blocks = np.ldexp(1.0, scales.astype(int) - 127).repeat(128, 0)[:160].repeat(128, 1)
    weights = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * blocks
    check_matrix(load_matrix(tmp_path, "layers.0.attn.wq_a"), weights, None)
