"""The synthetic checkpoint: true names, dtypes and sizes, readable by safetensors and by the loader."""

import itertools
import json
import math

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from ktmoe import synthetic
from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS
from ktmoe.formats import MXFP4
from ktmoe.loaders.base import choose
from ktmoe.loaders.checkpoint import INDEX_NAME, Checkpoint
from ktmoe.synthetic import write_deepseek_v4

SMALL = {"num_experts": 3, "hidden": 128, "intermediate": 96}
EXPERT_BYTES = 3 * (128 * 96 // 2 + 128 * 96 // 32)


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
    loader = choose(checkpoint)
    assert loader.layers(checkpoint) == [0, 1, "mtp.0"]
    weights = loader.load(checkpoint, "mtp.0")
    assert (weights.num_experts, weights.hidden, weights.intermediate) == (3, 128, 96)
    assert weights.nbytes == 3 * EXPERT_BYTES
    assert weights.activation.limit == 10.0
    assert checkpoint.config["num_experts_per_tok"] == 2
    assert checkpoint.config["n_routed_experts"] == 3
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(checkpoint.names())


def test_shards_hold_the_same_bytes_as_one_file(tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    write_deepseek_v4(one, **SMALL)
    write_deepseek_v4(many, **SMALL, shard_bytes=EXPERT_BYTES // 2)
    assert not (one / INDEX_NAME).exists()
    index = json.loads((many / INDEX_NAME).read_text())
    files = sorted(many.glob("*.safetensors"))
    sizes = [sum(Checkpoint(file).info(name).nbytes for name in Checkpoint(file).names()) for file in files]
    assert max(sizes) <= EXPERT_BYTES // 2
    assert all(first + second > EXPERT_BYTES // 2 for first, second in itertools.pairwise(sizes))
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == 3 * EXPERT_BYTES
    for file in files:
        with safe_open(file, "np") as reference:
            assert set(reference.keys()) == {name for name, where in index["weight_map"].items() if where == file.name}
    assert tensor_bytes(one) == tensor_bytes(many)


def test_seed(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_deepseek_v4(tmp_path / name, **SMALL, seed=seed)
    a, b, c = (tensor_bytes(tmp_path / name) for name in "abc")
    assert a == b
    assert all(a[name] != c[name] for name in a)
    assert len(set(a.values())) == len(a)


def test_values_are_realistic(tmp_path):
    """Every code and four scales occur; weights have a mean near 0 and a standard deviation near 1/sqrt(k)."""
    write_deepseek_v4(tmp_path, num_experts=1, hidden=1024, intermediate=256)
    checkpoint = Checkpoint(tmp_path)
    weights = choose(checkpoint).load(checkpoint, 0)
    for projection in PROJECTIONS:
        matrix = weights.matrix(0, projection)
        n, k = matrix.shape
        codes = np.stack([matrix.codes & 15, matrix.codes >> 4], -1).reshape(n, k)
        assert np.bincount(codes.ravel(), minlength=16).min() > n * k / 16 * 0.9
        scales = matrix.scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        assert len(np.unique(scales)) == 4
        values = np.array(MXFP4.codebook)[codes] * np.repeat(scales, 32, 1)
        assert 0.5 < values.std() * math.sqrt(k) < 2
        assert abs(values.mean()) < 0.05 * values.std()


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
    assert choose(checkpoint).load(checkpoint, 0).activation.limit == math.inf


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

    write = synthetic.serialize_file
    if when == "write":
        monkeypatch.setattr(synthetic, "serialize_file", fail)
    with pytest.raises(KeyboardInterrupt if when == "progress" else OSError):
        write_deepseek_v4(tmp_path, **SMALL, shard_bytes=EXPERT_BYTES // 2, progress=stop if when == "progress" else None)
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


def test_no_layers_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"layers: expected at least one layer or MTP layer, found 0 and 0"):
        write_deepseek_v4(tmp_path, **SMALL, layers=0)
