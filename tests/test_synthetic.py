"""The synthetic checkpoints: true names, dtypes and sizes, readable by safetensors and by the loaders."""

import itertools
import json
import math

import numpy as np
import pytest
from checkpoints import SCHEMES, numbers
from safetensors import safe_open

from ktmoe import loaders
from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import INDEX_NAME, Checkpoint
from ktmoe.synthetic import (
    PUBLISHED,
    deepseek_v4_experts,
    files,
    gpt_oss_experts,
    kimi_k2_experts,
    qwen3_experts,
    write_deepseek_v4,
    write_gpt_oss,
    write_kimi_k2,
    write_qwen3,
)
from ktmoe.weights.elements import INT4

SMALL = {"num_experts": 3, "hidden": 128, "intermediate": 96}
EXPERT_BYTES = 3 * (128 * 96 // 2 + 128 * 96 // 32)
#: by loader: what writes one, what makes its layer 0 in memory, bytes of codes, scales, biases and shapes of an expert
MODELS = {
    "deepseek_v4": (write_deepseek_v4, deepseek_v4_experts, EXPERT_BYTES),
    "gpt_oss": (write_gpt_oss, gpt_oss_experts, EXPERT_BYTES + 2 * (96 + 96 + 128)),
    "compressed_tensors": (write_kimi_k2, kimi_k2_experts, 3 * (128 * 96 // 2 + 2 * 128 * 96 // 32 + 8)),
    "bf16": (write_qwen3, qwen3_experts, 3 * 2 * 128 * 96),
}
SIZES = {"num_experts": 3, "hidden": 384, "intermediate": 256}


def tensor_bytes(folder):
    with Checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name).tobytes() for name in checkpoint.names()}


@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_dtypes_sizes(tmp_path, prefix):
    write_deepseek_v4(tmp_path, **SMALL, layers=2, mtp_layers=1, prefix=prefix, top_k=2)
    checkpoint = Checkpoint(tmp_path)
    assert len(checkpoint) == 3 * 3 * 6
    for base in ("layers.0", "layers.1", "mtp.0"):
        for stem, (n, k) in {"w1": (96, 128), "w3": (96, 128), "w2": (128, 96)}.items():
            name = f"{prefix}{base}.ffn.experts.2.{stem}"
            weight, scale = checkpoint.info(f"{name}.weight"), checkpoint.info(f"{name}.scale")
            assert (weight.dtype, weight.shape) == ("I8", (n, k // 2))
            assert (scale.dtype, scale.shape) == ("F8_E8M0", (n, k // 32))
    loader = find_loader(checkpoint)
    assert loader.layers(checkpoint) == [0, 1, "mtp.0"]
    weights = loader.load(checkpoint, "mtp.0")
    assert (weights.num_experts, weights.hidden, weights.intermediate) == (3, 128, 96)
    assert weights.nbytes == 3 * EXPERT_BYTES
    assert weights.activation.limit == 10.0
    assert checkpoint.config["num_experts_per_tok"] == 2
    assert checkpoint.config["n_routed_experts"] == 3
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(checkpoint.names())


# The other models' tensors, [n, k] = [96, 128] for gate: (suffix of the name, dtype, shape)
TRUE_NAMES = {
    "gpt_oss": [
        ("gate_up_proj_blocks", "U8", (3, 192, 4, 16)),
        ("gate_up_proj_scales", "U8", (3, 192, 4)),
        ("gate_up_proj_bias", "BF16", (3, 192)),
        ("down_proj_blocks", "U8", (3, 128, 3, 16)),
        ("down_proj_scales", "U8", (3, 128, 3)),
        ("down_proj_bias", "BF16", (3, 128)),
    ],
    "compressed_tensors": [
        ("2.up_proj.weight_packed", "I32", (96, 16)),
        ("2.up_proj.weight_scale", "BF16", (96, 4)),
        ("2.up_proj.weight_shape", "I32", (2,)),
        ("0.down_proj.weight_packed", "I32", (128, 12)),
        ("0.down_proj.weight_scale", "BF16", (128, 3)),
    ],
    "bf16": [("2.gate_proj.weight", "BF16", (96, 128)), ("1.down_proj.weight", "BF16", (128, 96))],
}


@pytest.mark.parametrize("name", TRUE_NAMES)
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_names_dtypes_sizes_of_the_others(tmp_path, name, prefix):
    MODELS[name][0](tmp_path, **SMALL, layers=2, prefix=prefix, top_k=2)
    checkpoint = Checkpoint(tmp_path)
    for suffix, dtype, shape in TRUE_NAMES[name]:
        info = checkpoint.info(f"{prefix}layers.1.mlp.experts.{suffix}")
        assert (info.dtype, info.shape) == (dtype, shape)
    assert checkpoint.config["num_experts_per_tok"] == 2
    assert 3 in (checkpoint.config.get(key) for key in ("num_local_experts", "n_routed_experts", "num_experts"))
    assert find_loader(checkpoint).layers(checkpoint) == [0, 1]
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(checkpoint.names())


@pytest.mark.parametrize("name", MODELS)
def test_shards_hold_the_same_bytes_as_one_file(tmp_path, name):
    one, many = tmp_path / "one", tmp_path / "many"
    write, _, expert_bytes = MODELS[name]
    most = 3 * expert_bytes // 2
    write(one, **SMALL)
    write(many, **SMALL, shard_bytes=most)
    assert not (one / INDEX_NAME).exists()
    index = json.loads((many / INDEX_NAME).read_text())
    found = sorted(many.glob("*.safetensors"))
    tensors = [[Checkpoint(file).info(name).nbytes for name in Checkpoint(file).names()] for file in found]
    sizes = list(map(sum, tensors))
    assert all(size <= most or len(alone) == 1 for size, alone in zip(sizes, tensors, strict=True))
    assert all(first + second > most for first, second in itertools.pairwise(sizes))
    assert found[0].name == f"model-00001-of-{len(found):05}.safetensors"
    assert set(index["weight_map"].values()) == {file.name for file in found}
    assert index["metadata"]["total_size"] == sum(sizes) == 3 * expert_bytes
    for file in found:
        with safe_open(file, "np") as reference:
            assert set(reference.keys()) == {name for name, where in index["weight_map"].items() if where == file.name}
    assert tensor_bytes(one) == tensor_bytes(many)


@pytest.mark.parametrize("name", MODELS)
def test_seed(tmp_path, name):
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        MODELS[name][0](tmp_path / folder, **SMALL, seed=seed)
    a, b, c = (tensor_bytes(tmp_path / folder) for folder in "abc")
    assert a == b
    made = {name for name in a if not name.endswith("weight_shape")}
    assert all(a[name] != c[name] for name in made)
    assert len({a[name] for name in made}) == len(made)


@pytest.mark.parametrize("name", MODELS)
def test_in_memory_it_is_what_loads(tmp_path, name):
    write, in_memory, _ = MODELS[name]
    write(tmp_path, **SMALL, seed=5)
    checkpoint = Checkpoint(tmp_path)
    loaded, made = find_loader(checkpoint, name).load(checkpoint, 0), in_memory(**SMALL, seed=5)
    assert (made.name, made.formats, made.activation) == (loaded.name, loaded.formats, loaded.activation)
    assert (made.num_experts, made.hidden, made.intermediate) == (3, 128, 96)
    different = set()
    for expert in (2, 0, 1):
        for projection in PROJECTIONS:
            expected, found = loaded.matrix(expert, projection), made.matrix(expert, projection)
            assert found.name == expected.name
            for kind in ("codes", "scales", "bias"):
                assert np.array_equal(getattr(found, kind), getattr(expected, kind))
            different.add(found.codes.tobytes())
    assert len(different) == 9


@pytest.mark.parametrize("name", MODELS)
def test_values_are_realistic(name):
    """Uniform codes; weights of a mean near 0 and a standard deviation near 1/sqrt(k); scales as they are said to be."""
    experts = MODELS[name][1](num_experts=1, hidden=1024, intermediate=256)
    for projection in PROJECTIONS:
        matrix = experts.matrix(0, projection)
        n, k = matrix.shape
        if matrix.format.family == "q4":
            codes = np.stack([matrix.codes.view(np.uint8) & 15, matrix.codes.view(np.uint8) >> 4], -1)
            assert np.bincount(codes.ravel(), minlength=16).min() > n * k / 16 * 0.9
        if matrix.format.scale and matrix.format.scale.kind == "ue8m0":
            assert len(np.unique(matrix.scales)) == 4
        elif matrix.format.scale and matrix.format.scale.kind != "e4m3":
            scales = matrix.scales.astype(np.float64)
            assert np.mean(np.frexp(scales)[0] == 0.5) < 0.02  # powers of two
            assert scales.min() > 0
        values = numbers(matrix)
        assert 0.5 < values.std() * math.sqrt(k) < 2
        lopsided = matrix.format.element is INT4  # -8 has no counterpart
        assert abs(values.mean()) < (0.15 if lopsided or matrix.format.offset else 0.05) * values.std()
        if matrix.bias is not None:
            assert 0.4 < matrix.bias.std() < 0.6


def headers_of(published):
    """A gate's endings, dtypes and numbers of dimensions in each of its loader's schemes; groups may be others."""
    for scheme in SCHEMES.values():
        name = f"layers.0.{scheme.module}.2.{published.stems['gate']}"
        tensors = scheme.layer("layers.0")
        if scheme.loader == published.loader and any(each.startswith(f"{name}.") for each in tensors):
            yield {each.removeprefix(name): (dtype, array.ndim) for each, (dtype, array) in tensors.items() if name in each}


@pytest.mark.parametrize("name", PUBLISHED)
def test_quantized(tmp_path, name):
    """True names, dtypes and shapes; in memory it is what loads; weights of the usual size."""
    published = PUBLISHED[name]
    published.write(tmp_path, **SIZES, layers=2, seed=3, top_k=2)
    checkpoint = Checkpoint(tmp_path)
    gate = f"{published.prefix}layers.1.{published.module}.2.{published.stems['gate']}"
    found = {each.removeprefix(gate): checkpoint.info(each) for each in checkpoint.names() if each.startswith(f"{gate}.")}
    headers = {ending: (info.dtype, len(info.shape)) for ending, info in found.items()}
    assert any(wanted.items() <= headers.items() for wanted in headers_of(published))
    assert checkpoint.config["num_experts_per_tok"] == 2
    loader = find_loader(checkpoint)
    assert loader is loaders.get(published.loader)
    assert loader.layers(checkpoint) == [0, 1]
    loaded, made = loader.load(checkpoint, 0), published.experts(**SIZES, seed=3)
    assert (made.name, made.formats, made.activation) == (loaded.name, loaded.formats, loaded.activation)
    assert set(made.formats.values()) == {published.format}
    for projection in PROJECTIONS:
        one, other = loaded.matrix(1, projection), made.matrix(1, projection)
        for label, array in one.stored.items():
            assert array.tobytes() == other.stored[label].tobytes()
        one.refuse()
        values = numbers(one)
        assert 0.5 < values.std() * math.sqrt(one.shape[1]) < 2
        assert abs(values.mean()) < 0.2 * values.std()


def test_progress(tmp_path):
    calls = []
    write_deepseek_v4(tmp_path, **SMALL, shard_bytes=EXPERT_BYTES, progress=lambda done, total: calls.append((done, total)))
    done, totals = zip(*calls, strict=True)
    assert set(totals) == {3 * EXPERT_BYTES}
    assert list(done) == sorted(set(done))
    assert done[-1] == 3 * EXPERT_BYTES
    assert len(done) == 3 * 6


def test_swiglu_limit_may_be_absent(tmp_path):
    write_deepseek_v4(tmp_path, **SMALL, swiglu_limit=None)
    checkpoint = Checkpoint(tmp_path)
    assert "swiglu_limit" not in checkpoint.config
    assert find_loader(checkpoint).load(checkpoint, 0).activation.limit == math.inf


@pytest.mark.parametrize("name", ["config.json", INDEX_NAME, "other.safetensors"])
def test_refuses_a_folder_that_holds_a_model(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(InputError) as caught:
        write_deepseek_v4(tmp_path, **SMALL)
    assert all(word in str(caught.value) for word in (str(tmp_path), "expected a folder without a model", f"found {name}"))
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "{}"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hidden", 100, "a positive multiple of 32"),
        ("hidden", 0, "a positive multiple of 32"),
        ("intermediate", -32, "a positive multiple of 32"),
        ("num_experts", 0, "a positive multiple of 1"),
        ("layers", -1, "at least 0"),
        ("mtp_layers", -1, "at least 0"),
        ("shard_bytes", 0, "at least 1"),
    ],
)
def test_bad_sizes(tmp_path, name, value, expected):
    with pytest.raises(InputError, match=f"^{name}: expected {expected}, found {value}$"):
        write_deepseek_v4(tmp_path / "new", **{**SMALL, name: value})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("write", "sizes", "message"),
    [
        (write_gpt_oss, {"hidden": 80}, "hidden: expected a positive multiple of 32, found 80"),
        (write_gpt_oss, {"layers": 0}, "layers: expected a positive multiple of 1, found 0"),
        (write_kimi_k2, {"intermediate": 80}, "intermediate: expected a positive multiple of 32, found 80"),
        (write_kimi_k2, {"hidden": 36, "group": 12}, "hidden: expected a positive multiple of 24, found 36"),
        (write_kimi_k2, {"group": 0}, "group: expected a positive multiple of 1, found 0"),
        (write_qwen3, {"num_experts": 0}, "num_experts: expected a positive multiple of 1, found 0"),
    ],
)
def test_bad_sizes_of_the_others(tmp_path, write, sizes, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        write(tmp_path / "new", **{**SMALL, **sizes})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("when", ["progress", "write"])
def test_interrupted_writing_leaves_nothing(tmp_path, monkeypatch, when):
    (tmp_path / "README.md").write_text("mine")
    written = []

    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    def fail(tensors, file, metadata):
        if len(written) == 2:
            file.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        written.append(file)
        write(tensors, file, metadata)

    write = files.serialize_file
    if when == "write":
        monkeypatch.setattr(files, "serialize_file", fail)
    with pytest.raises(KeyboardInterrupt if when == "progress" else OSError):
        write_deepseek_v4(tmp_path, **SMALL, shard_bytes=EXPERT_BYTES // 2, progress=stop if when == "progress" else None)
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


def test_no_layers_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"layers: expected at least one layer or MTP layer, found 0 and 0"):
        write_deepseek_v4(tmp_path, **SMALL, layers=0)
