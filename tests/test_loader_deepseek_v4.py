"""The deepseek_v4 loader: names, dtypes, shapes, config, laziness, and its refusals."""

import gc
import json
import math
import os
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors import TensorSpec, serialize_file

from ktmoe.activation import SILU, GatedActivation
from ktmoe.errors import CheckpointError, ClosedError, FormatError, InputError, MissingTensorError, UnavailableError
from ktmoe.experts import PROJECTIONS
from ktmoe.formats import MXFP4
from ktmoe.loaders import registry
from ktmoe.loaders.base import choose
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.deepseek_v4 import DeepSeekV4

HIDDEN, INTERMEDIATE, EXPERTS = 96, 64, 3
STEMS = {"gate": "w1", "up": "w3", "down": "w2"}
CONFIG = {"n_routed_experts": EXPERTS, "swiglu_limit": 10.0}
# how safetensors' writer calls a dtype, and bytes per element of the shape that it is given
WRITER = {"I8": "int8", "U8": "uint8", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3": "float8_e4m3fn", "BF16": "bfloat16"}


def experts(base, count=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, seed=0):
    """Tensors of one layer: name -> [dtype, array of bytes whose shape is the header's]."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for expert in range(count):
        for stem in STEMS.values():
            n, k = (hidden, intermediate) if stem == "w2" else (intermediate, hidden)
            name = f"{base}.ffn.experts.{expert}.{stem}"
            tensors[f"{name}.weight"] = ["I8", rng.integers(0, 256, (n, k // 2), np.uint8)]
            tensors[f"{name}.scale"] = ["F8_E8M0", rng.integers(0, 256, (n, k // 32), np.uint8)]
    return tensors


def write(folder, tensors, config=CONFIG, file="model.safetensors"):
    specs = {}
    for name, (dtype, array) in tensors.items():
        writer = "float4_e2m1fn_x2" if dtype == "F4" else WRITER[dtype]
        size = {"shape": list(array.shape), "data_ptr": array.ctypes.data, "data_len": array.nbytes}
        if dtype == "BF16":
            size["shape"][-1] //= 2
        specs[name] = TensorSpec(dtype=writer, **size)
    serialize_file(specs, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint(folder)


def check_layer(checkpoint, layer, tensors, base):
    """Every matrix that comes out holds the very bytes that went in."""
    weights = choose(checkpoint).load(checkpoint, layer)
    assert (weights.num_experts, weights.hidden, weights.intermediate) == (EXPERTS, HIDDEN, INTERMEDIATE)
    assert weights.formats == dict.fromkeys(PROJECTIONS, MXFP4)
    assert weights.name == f"{base}.ffn.experts"
    for expert in range(EXPERTS):
        for projection, stem in STEMS.items():
            name = f"{base}.ffn.experts.{expert}.{stem}"
            matrix = weights.matrix(expert, projection)
            assert matrix.name == name
            assert matrix.codes.dtype == matrix.scales.dtype == np.uint8
            np.testing.assert_array_equal(matrix.codes, tensors[f"{name}.weight"][1])
            np.testing.assert_array_equal(matrix.scales, tensors[f"{name}.scale"][1])
    return weights


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_prefixes_and_mtp(tmp_path, prefix):
    layers = {layer: f"{prefix}layers.{layer}" for layer in (0, 1, 2, 10)} | {
        "mtp.0": f"{prefix}mtp.0",
        "mtp.1": f"{prefix}mtp.1",
    }
    tensors = {}
    for seed, base in enumerate(reversed(layers.values())):
        tensors |= experts(base, seed=seed)
    tensors[f"{prefix}layers.3.ffn.shared_experts.w1.weight"] = ["F8_E4M3", np.zeros((8, 8), np.uint8)]
    tensors[f"{prefix}embed.weight"] = ["BF16", np.zeros((8, 8), np.uint8)]
    checkpoint = write(tmp_path, tensors)
    loader = choose(checkpoint)
    assert isinstance(loader, DeepSeekV4)
    assert loader is registry.get("deepseek_v4")
    assert loader.layers(checkpoint) == [0, 1, 2, 10, "mtp.0", "mtp.1"]
    for layer, base in layers.items():
        check_layer(checkpoint, layer, tensors, base)
    check_layer(checkpoint, "10", tensors, layers[10])
    check_layer(checkpoint, np.int64(10), tensors, layers[10])


@pytest.mark.parametrize("weight_dtype", ["I8", "U8", "F4"])
@pytest.mark.parametrize("scale_dtype", ["F8_E8M0", "U8"])
def test_dtypes_that_hold_the_same_bytes(tmp_path, weight_dtype, scale_dtype):
    tensors = experts("layers.0")
    for name, tensor in tensors.items():
        tensor[0] = weight_dtype if name.endswith("weight") else scale_dtype
    checkpoint = write(tmp_path, tensors)
    if weight_dtype == "F4":
        assert checkpoint.info("layers.0.ffn.experts.0.w1.weight").shape == (INTERMEDIATE, HIDDEN)
    check_layer(checkpoint, 0, tensors, "layers.0")


def test_shards_that_split_an_expert(tmp_path):
    tensors = experts("layers.0")
    names = list(tensors)
    weight_map = {}
    for shard in range(5):
        weight_map |= dict.fromkeys(names[shard::5], f"{shard}.safetensors")
        write(tmp_path, {name: tensors[name] for name in names[shard::5]}, file=f"{shard}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weights = check_layer(Checkpoint(tmp_path), 0, tensors, "layers.0")
    with ThreadPoolExecutor(4) as pool:
        jobs = [(expert, projection) for expert in range(EXPERTS) for projection in PROJECTIONS] * 20
        for (expert, projection), matrix in zip(jobs, pool.map(lambda job: weights.matrix(*job), jobs), strict=True):
            name = f"layers.0.ffn.experts.{expert}.{STEMS[projection]}.weight"
            np.testing.assert_array_equal(matrix.codes, tensors[name][1])


def test_partial_download(tmp_path):
    bases = [f"layers.{layer}" for layer in range(3)]
    tensors = {base: experts(base, seed=seed) for seed, base in enumerate(bases)}
    write(tmp_path, tensors["layers.1"], file="1.safetensors")
    weight_map = {name: f"{base[-1]}.safetensors" for base in bases for name in tensors[base]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint(tmp_path)
    check_layer(checkpoint, 1, tensors["layers.1"], "layers.1")
    with pytest.raises(MissingTensorError, match=r"2.safetensors: expected .* 'layers.2.ffn.*', found no such file"):
        choose(checkpoint).load(checkpoint, 2)
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(MissingTensorError, match=r"0.safetensors: expected .* 'layers.0.ffn.*', found no such file"):
        choose(Checkpoint(tmp_path))


def test_reads_lazily_and_releases(tmp_path, monkeypatch):
    checkpoint = write(tmp_path, experts("layers.0"))
    reads = []
    read = Checkpoint.read

    def record(self, name, out=None, *, release=False):
        reads.append((name, release))
        return read(self, name, out, release=release)

    monkeypatch.setattr(Checkpoint, "read", record)
    weights = choose(checkpoint).load(checkpoint, 0)
    assert reads == []
    weights.matrix(1, "up")
    assert reads == [("layers.0.ffn.experts.1.w3.weight", True), ("layers.0.ffn.experts.1.w3.scale", True)]


def test_weights_keep_the_checkpoint_open_and_let_it_go(tmp_path):
    checkpoint = write(tmp_path, experts("layers.0"))
    gone = weakref.ref(checkpoint)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = choose(checkpoint).load(checkpoint, 0)
        del checkpoint
        gc.collect()
        weights.matrix(0, "gate")
        del weights
        gc.collect()
    assert gone() is None
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_after_close(tmp_path):
    checkpoint = write(tmp_path, experts("layers.0"))
    weights = choose(checkpoint).load(checkpoint, 0)
    checkpoint.close()
    with pytest.raises(ClosedError, match=r"'layers.0.ffn.experts.2.w2.weight' was asked for after close"):
        weights.matrix(2, "down")


def test_wrong_expert_or_projection(tmp_path):
    checkpoint = write(tmp_path, experts("layers.0"))
    weights = choose(checkpoint).load(checkpoint, 0)
    with pytest.raises(InputError, match=r"layers.0.ffn.experts: expert must be in \[0, 3\), found 3"):
        weights.matrix(3, "gate")
    with pytest.raises(InputError, match=r"projection must be one of .*, found 'w1'"):
        weights.matrix(0, "w1")


def test_truncated_while_loaded(tmp_path):
    checkpoint = write(tmp_path, experts("layers.0"))
    weights = choose(checkpoint).load(checkpoint, 0)
    info = checkpoint.info("layers.0.ffn.experts.1.w1.weight")
    os.truncate(info.file, info.offset + 7)
    with pytest.raises(CheckpointError, match=rf"truncated: tensor '{info.name}': expected {info.nbytes} bytes .* found 7"):
        weights.matrix(1, "gate")


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"swiglu_limit": 10.0}, GatedActivation(limit=10.0)),
        ({"swiglu_limit": 7}, GatedActivation(limit=7.0)),
        ({"text_config": {"swiglu_limit": 3.5}}, GatedActivation(limit=3.5)),
        ({"swiglu_limit": 10.0, "text_config": {"swiglu_limit": 3.5}}, GatedActivation(limit=10.0)),
        ({"text_config": None}, SILU),
        ({"swiglu_limit": 0}, SILU),
        ({"swiglu_limit": None}, SILU),
        ({}, SILU),
        (None, SILU),
    ],
)
def test_swiglu_limit(tmp_path, config, activation):
    checkpoint = write(tmp_path, experts("layers.0"), config)
    found = choose(checkpoint).load(checkpoint, 0).activation
    assert found == activation
    assert type(found.limit) is float


@pytest.mark.parametrize("limit", ["10", [10.0], {}, True, -1.0, math.nan, math.inf, -math.inf, 1e39, 10**400])
@pytest.mark.parametrize("nested", [False, True])
def test_bad_swiglu_limit(tmp_path, limit, nested):
    config = {"swiglu_limit": limit}
    checkpoint = write(tmp_path, experts("layers.0"), {"text_config": config} if nested else config)
    with pytest.raises(CheckpointError) as caught:
        choose(checkpoint).load(checkpoint, 0)
    words = (str(tmp_path), "swiglu_limit", "expected a float32 number, 0 or more", f"found {limit!r}"[:200])
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("stated", [EXPERTS - 1, EXPERTS + 1, str(EXPERTS), float(EXPERTS)])
@pytest.mark.parametrize("nested", [False, True])
def test_config_disagrees_on_the_number_of_experts(tmp_path, stated, nested):
    config = {"n_routed_experts": stated}
    checkpoint = write(tmp_path, experts("layers.0"), {"text_config": config} if nested else config)
    with pytest.raises(CheckpointError) as caught:
        choose(checkpoint).load(checkpoint, 0)
    words = ("layers.0.ffn.experts", f"expected {stated!r} by n_routed_experts", f"found {EXPERTS} experts")
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "layer", [3, 5, -1, "mtp.1", "4", "x", "-1", "", "\u0660", "mtp.0 ", "9" * 5000], ids=lambda layer: f"{layer!r:.20}"
)
def test_layer_that_does_not_exist(tmp_path, layer):
    tensors = {}
    for base in ("layers.0", "layers.1", "layers.2", "layers.6", "mtp.0"):
        tensors |= experts(base)
    tensors["layers.3.ffn.w1.weight"] = ["I8", np.zeros((2, 2), np.uint8)]  # a dense layer
    checkpoint = write(tmp_path, tensors)
    with pytest.raises(MissingTensorError) as caught:
        choose(checkpoint).load(checkpoint, layer)
    assert f"{tmp_path}: layer {layer!r}"[:200] in str(caught.value)
    assert str(caught.value).endswith("expected a layer that has routed experts, found layers 0-2, 6, mtp.0")


def test_no_layer_at_all(tmp_path):
    checkpoint = write(tmp_path, {"a": ["I8", np.zeros((2, 2), np.uint8)]})
    loader = registry.get("deepseek_v4")
    assert loader.detect(checkpoint) == 0
    assert loader.layers(checkpoint) == []
    with pytest.raises(MissingTensorError, match=r"layer 0: expected .*, found no layer with tensors of DeepSeek-V4's names"):
        loader.load(checkpoint, 0)
    with pytest.raises(UnavailableError, match=r"no loader recognises this checkpoint; tried .*deepseek_v4"):
        choose(checkpoint)


@pytest.mark.parametrize("expert", [0, 1, 2])
@pytest.mark.parametrize("suffix", [f"{stem}.{kind}" for stem in STEMS.values() for kind in ("weight", "scale")])
def test_missing_tensor(tmp_path, expert, suffix):
    tensors = experts("layers.0")
    name = f"layers.0.ffn.experts.{expert}.{suffix}"
    del tensors[name]
    checkpoint = write(tmp_path, tensors)
    with pytest.raises(MissingTensorError) as caught:
        registry.get("deepseek_v4").load(checkpoint, 0)
    assert all(word in str(caught.value) for word in (str(tmp_path), name, "expected", "experts 0-2", "found no such tensor"))


def test_missing_expert(tmp_path):
    tensors = {name: tensor for name, tensor in experts("layers.0", 5).items() if ".experts.3." not in name}
    checkpoint = write(tmp_path, tensors)
    with pytest.raises(MissingTensorError, match=r"layers.0.ffn.experts.3.w1.weight: expected with experts 0-4"):
        choose(checkpoint).load(checkpoint, 0)


def test_two_names_for_one_layer(tmp_path):
    checkpoint = write(tmp_path, experts("layers.0") | experts("model.layers.0"))
    with pytest.raises(CheckpointError, match=r"layer 0: expected one name, found layers.0.ffn.experts and model.layers.0.ffn"):
        choose(checkpoint).load(checkpoint, 0)


@pytest.mark.parametrize(
    "alias", ["layers.09", "layers.9x", "xlayers.9", "layers.1000000", "layers.\u0669", "foo.layers.9", "mtp.0."]
)
def test_names_that_only_look_alike_are_left_alone(tmp_path, alias):
    tensors = experts("layers.0")
    more = {f"{name}{end}": tensor for end in ("_inv", "\n") for name, tensor in experts("layers.9").items()}
    checkpoint = write(tmp_path, tensors | experts(alias) | more)
    assert choose(checkpoint).layers(checkpoint) == [0]
    check_layer(checkpoint, 0, tensors, "layers.0")


def test_weights_without_scales_are_another_format(tmp_path):
    checkpoint = write(tmp_path, {name: tensor for name, tensor in experts("layers.0").items() if name.endswith("weight")})
    assert registry.get("deepseek_v4").detect(checkpoint) == 0


def zeros(dtype, *shape):
    return [dtype, np.zeros(shape, np.uint8)]


# label: (tensor of expert 0, what it is instead, what the message must hold)
NOT_MXFP4 = {
    "FP8 weight": ("w1.weight", zeros("F8_E4M3", 64, 96), ["dtype", "expected I8 or U8 or F4", "F8_E4M3 [64, 96]"]),
    "BF16 weight": ("w3.weight", zeros("BF16", 64, 192), ["dtype", "expected I8 or U8 or F4", "BF16 [64, 96]"]),
    "BF16 scale": ("w2.scale", zeros("BF16", 96, 4), ["dtype", "expected F8_E8M0 or U8", "BF16 [96, 2]"]),
    "E4M3 scale": ("w1.scale", zeros("F8_E4M3", 64, 3), ["dtype", "expected F8_E8M0 or U8", "F8_E4M3 [64, 3]"]),
    "int8, not packed": ("w1.weight", zeros("I8", 64, 96), ["w1.scale", "[64, 6]", "one scale per 32", "[64, 3]"]),
    "group of 16": ("w1.scale", zeros("F8_E8M0", 64, 6), ["shape", "expected [64, 3]", "found [64, 6]"]),
    "blocks of 128": ("w2.scale", zeros("F8_E8M0", 1, 1), ["shape", "expected [96, 2]", "found [1, 1]"]),
    "flat scale": ("w2.scale", zeros("F8_E8M0", 192), ["shape", "expected [96, 2]", "found [192]"]),
    "flat weight": ("w1.weight", zeros("I8", 64 * 48), ["shape", "expected two dimensions", "found [3072]"]),
    "stacked weight": ("w1.weight", zeros("I8", 1, 64, 48), ["shape", "expected two dimensions", "found [1, 64, 48]"]),
    "no rows": ("w1.weight", zeros("I8", 0, 48), ["shape", "two dimensions above 0", "found [0, 48]"]),
}


@pytest.mark.parametrize("label", NOT_MXFP4)
def test_not_mxfp4(tmp_path, label):
    suffix, tensor, words = NOT_MXFP4[label]
    name = f"layers.0.ffn.experts.0.{suffix}"
    checkpoint = write(tmp_path, experts("layers.0") | {name: tensor})
    loader = registry.get("deepseek_v4")
    assert loader.detect(checkpoint) == 0
    with pytest.raises(FormatError) as caught:
        loader.load(checkpoint, 0)
    named = name.rsplit(".", 2)[0]
    assert all(word in str(caught.value) for word in [named, "expected", "found", *words]), str(caught.value)


def test_odd_f4_rows_would_share_a_byte(tmp_path):
    """64 x 95 codes fill whole bytes as a tensor, but not as rows."""
    header = {}
    for stem in STEMS.values():
        for kind, dtype, shape, nbytes in (("weight", "F4", [64, 95], 64 * 95 // 2), ("scale", "F8_E8M0", [64, 3], 64 * 3)):
            start = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
            entry = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + nbytes]}
            header[f"layers.0.ffn.experts.0.{stem}.{kind}"] = entry
    text, data = json.dumps(header).encode(), bytes(start + nbytes)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    checkpoint = Checkpoint(tmp_path)
    assert registry.get("deepseek_v4").detect(checkpoint) == 0
    with pytest.raises(FormatError, match=r"w1.weight: shape: expected an even number of F4 columns, found \[64, 95\]"):
        registry.get("deepseek_v4").load(checkpoint, 0)


def test_flash_base_is_not_mxfp4(tmp_path):
    """V4-Flash-Base has the same names and an FP8 config, and experts in E4M3 with one E8M0 scale per 128x128."""
    tensors = {}
    for name, (_, array) in experts("layers.0", hidden=256, intermediate=128).items():
        n, k = (256, 128) if ".w2." in name else (128, 256)
        assert array.shape[0] == n
        tensors[name] = zeros("F8_E4M3", n, k) if name.endswith("weight") else zeros("F8_E8M0", n // 128, k // 128)
    checkpoint = write(tmp_path, tensors, CONFIG | {"model_type": "deepseek_v4"})
    assert registry.get("deepseek_v4").detect(checkpoint) == 0
    with pytest.raises(UnavailableError, match="no loader recognises this checkpoint"):
        choose(checkpoint)
    with pytest.raises(FormatError, match=r"experts.0.w1.weight: dtype: expected I8 or U8 or F4, found F8_E4M3 \[128, 256\]"):
        choose(checkpoint, "deepseek_v4").load(checkpoint, 0)


def test_detection_needs_no_config(tmp_path):
    checkpoint = write(tmp_path, experts("layers.0"), {"model_type": "something_else"})
    assert registry.get("deepseek_v4").detect(checkpoint) > 0.5


@pytest.mark.parametrize(
    ("suffix", "tensor", "found"),
    [
        ("w1.weight", zeros("U8", 64, 48), "expected I8 [64, 48] as in expert 0, found U8 [64, 48]"),
        ("w3.scale", zeros("U8", 64, 3), "expected F8_E8M0 [64, 3] as in expert 0, found U8 [64, 3]"),
        ("w2.weight", zeros("I8", 48, 64), "expected I8 [96, 32] as in expert 0, found I8 [48, 64]"),
        ("w2.scale", zeros("F8_E8M0", 96, 1), "expected F8_E8M0 [96, 2] as in expert 0, found F8_E8M0 [96, 1]"),
    ],
)
@pytest.mark.parametrize("expert", [1, 2])
def test_expert_unlike_the_first(tmp_path, suffix, tensor, found, expert):
    name = f"layers.0.ffn.experts.{expert}.{suffix}"
    checkpoint = write(tmp_path, experts("layers.0") | {name: tensor})
    with pytest.raises(CheckpointError) as caught:
        choose(checkpoint).load(checkpoint, 0)
    assert str(caught.value) == f"{name}: {found}"


@pytest.mark.parametrize(
    ("stem", "n", "k", "words"),
    [
        ("w3", 64, 64, ["w3.weight", "expected [n, k] = [64, 96]", "found [64, 64]"]),
        ("w2", 64, 96, ["w2.weight", "expected [n, k] = [96, 64]", "found [64, 96]"]),
    ],
)
def test_projections_that_do_not_fit(tmp_path, stem, n, k, words):
    tensors = experts("layers.0")
    for expert in range(EXPERTS):
        tensors[f"layers.0.ffn.experts.{expert}.{stem}.weight"] = zeros("I8", n, k // 2)
        tensors[f"layers.0.ffn.experts.{expert}.{stem}.scale"] = zeros("F8_E8M0", n, k // 32)
    checkpoint = write(tmp_path, tensors)
    with pytest.raises(CheckpointError) as caught:
        choose(checkpoint).load(checkpoint, 0)
    assert all(word in str(caught.value) for word in ["layers.0.ffn.experts.0", *words]), str(caught.value)
