"""The gpt_oss loader beyond what tests/test_loader_schemes.py asks of all: interleaved rows, biases, slabs, its refusals."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoints import EXPERTS, HIDDEN, INTERMEDIATE, SCHEMES, check_matrix, write, zeros
from helpers import assert_right, random_batch

from ktmoe import MoELayer, loaders
from ktmoe.errors import CheckpointError, FormatError, MissingTensorError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.weights.activation import GatedActivation
from ktmoe.weights.formats import MXFP4

SCHEME = SCHEMES["gpt_oss"]
BASE = "model.layers.0.mlp.experts"


@pytest.fixture
def tensors():
    return SCHEME.layer("model.layers.0")


@pytest.fixture
def reads(monkeypatch):
    """(name, byte_range) of every read."""
    reads = []
    read = Checkpoint.read

    def record(self, name, out=None, *, byte_range=None, release=False):
        reads.append((name, byte_range))
        return read(self, name, out, byte_range=byte_range, release=release)

    monkeypatch.setattr(Checkpoint, "read", record)
    return reads


def load(folder, tensors, config=None):
    checkpoint = write(folder, tensors, config)
    return find_loader(checkpoint).load(checkpoint, 0)


def test_rows_are_interleaved_and_messages_say_which_expert(tmp_path, tensors):
    """By bytes: gate has the even rows, up the odd ones."""
    weights = load(tmp_path, tensors)
    assert weights.formats == dict.fromkeys(PROJECTIONS, MXFP4)
    blocks = tensors[f"{BASE}.gate_up_proj_blocks"][1]
    for first, projection in enumerate(("gate", "up")):
        matrix = weights.matrix(2, projection)
        assert matrix.name == f"{BASE}.gate_up_proj[2] {projection}"
        np.testing.assert_array_equal(matrix.codes, blocks[2, first::2].reshape(INTERMEDIATE, HIDDEN // 2))
    assert weights.matrix(1, "down").name == f"{BASE}.down_proj[1]"


def test_f32_biases_and_ue8m0_scales(tmp_path, tensors):
    """Dtypes that hold the same numbers; float32 biases keep all their bits."""
    for name, tensor in tensors.items():
        if name.endswith("_bias"):
            tensor[:] = ["F32", tensor[1].astype(np.float32) * np.float32(1.001)]
        if name.endswith("_scales"):
            tensor[0] = "F8_E8M0"
    SCHEME.check(load(tmp_path, tensors), tensors, "model.layers.0")


def test_without_biases(tmp_path, tensors):
    """gpt-oss's experts without them would be other ones."""
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("_bias")}
    with pytest.raises(MissingTensorError, match=r"expected .*gate_up_proj_bias and .*down_proj_bias, found neither"):
        load(tmp_path, tensors)


@pytest.mark.parametrize(
    ("config", "alpha", "limit"),
    [
        (None, 1.702, 7.0),
        ({"swiglu_limit": None, "swiglu_alpha": None}, 1.702, 7.0),
        ({"swiglu_limit": 7}, 1.702, 7.0),
        ({"swiglu_limit": 3.5, "hidden_act": "silu"}, 1.702, 3.5),
        ({"text_config": {"swiglu_limit": 2.0, "swiglu_alpha": 1.5}}, 1.5, 2.0),
    ],
)
@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss bf16"])
def test_activation(tmp_path, name, config, alpha, limit):
    weights = load(tmp_path, SCHEMES[name].layer("model.layers.0"), config)
    assert weights.activation == GatedActivation(alpha=alpha, limit=limit, up_offset=1.0)


@pytest.mark.parametrize("key", ["swiglu_limit", "swiglu_alpha"])
@pytest.mark.parametrize("value", [-1, "7", True, 0])
def test_bad_activation(tmp_path, tensors, key, value):
    with pytest.raises(CheckpointError, match=rf"{key} of config.json: expected a float32 number above 0, found {value!r}"):
        load(tmp_path, tensors, {key: value})


def test_gate_and_up_are_read_once(tmp_path, tensors, reads):
    weights = load(tmp_path, tensors)
    for projection in ("up", "gate"):
        weights.matrix(1, projection)
    assert [name for name, _ in reads] == [f"{BASE}.gate_up_proj_{label}" for label in ("blocks", "scales", "bias")]
    weights.matrix(1, "gate")
    assert len(reads) == 6  # what was handed over is not kept


def test_few_halves_are_kept(tmp_path, monkeypatch, reads):
    """All gates before any up: the oldest halves are read again, and all are right."""
    monkeypatch.setattr("checkpoints.EXPERTS", 12)
    tensors = SCHEME.layer("model.layers.0")
    weights = load(tmp_path, tensors)
    for projection in ("gate", "up"):
        for expert in range(12):
            check_matrix(weights.matrix(expert, projection), *SCHEME.meaning(tensors, BASE, expert, projection))
    blocks = [byte_range for name, byte_range in reads if name.endswith("blocks")]
    assert 12 < len(blocks) <= 24


def test_two_threads_share_one_read(tmp_path, tensors, monkeypatch):
    """Gate and up asked for at once: the second waits for the first one's read."""
    weights = load(tmp_path, tensors)
    count, started, go = [], threading.Event(), threading.Event()
    read = Checkpoint.read

    def slow(self, name, out=None, **options):
        count.append(name)
        started.set()
        assert go.wait(30)
        return read(self, name, out, **options)

    monkeypatch.setattr(Checkpoint, "read", slow)
    with ThreadPoolExecutor(2) as pool:
        gate = pool.submit(weights.matrix, 0, "gate")
        assert started.wait(30)
        up = pool.submit(weights.matrix, 0, "up")
        go.set()
        for projection, job in (("gate", gate), ("up", up)):
            check_matrix(job.result(30), *SCHEME.meaning(tensors, BASE, 0, projection))
    assert len(count) == 3


def test_a_failed_read_is_tried_again(tmp_path, tensors, monkeypatch):
    """By whoever asks for the other half, too."""
    weights = load(tmp_path, tensors)

    def fail(*_, **__):
        raise CheckpointError("unplugged")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "read", fail)
        with pytest.raises(CheckpointError, match="unplugged"):
            weights.matrix(0, "gate")
    for projection in ("up", "gate"):
        check_matrix(weights.matrix(0, projection), *SCHEME.meaning(tensors, BASE, 0, projection))


ROWS = 2 * INTERMEDIATE
# label: (tensor, what it is instead, error, what the message must hold)
MALFORMED = {
    "BF16 blocks": (
        "gate_up_proj_blocks",
        zeros("BF16", EXPERTS, ROWS, 3, 16),
        FormatError,
        ["expected I8 or U8 or F4", "BF16 [3, 128"],
    ),
    "flat blocks": ("gate_up_proj_blocks", zeros("U8", EXPERTS, ROWS, 48), FormatError, ["four dimensions", "[3, 128, 48]"]),
    "blocks of 8": ("down_proj_blocks", zeros("U8", EXPERTS, 96, 2, 8), FormatError, ["[3, 96, 2, 16]", "16 bytes", "2, 8]"]),
    "no rows": ("down_proj_blocks", zeros("U8", EXPERTS, 0, 2, 16), FormatError, ["above 0", "[3, 0, 2, 16]"]),
    "BF16 scales": (
        "down_proj_scales",
        zeros("BF16", EXPERTS, 96, 2),
        FormatError,
        ["expected F8_E8M0 or U8", "BF16 [3, 96, 2]"],
    ),
    "groups of 16": ("down_proj_scales", zeros("U8", EXPERTS, 96, 4), FormatError, ["[3, 96, 2]", "per 32", "[3, 96, 4]"]),
    "I32 bias": ("down_proj_bias", zeros("I32", EXPERTS, 96), FormatError, ["expected F32 or BF16 or F16", "I32 [3, 96]"]),
    "bias per gate": ("gate_up_proj_bias", zeros("BF16", EXPERTS, 64), FormatError, ["[3, 128]", "one bias", "[3, 64]"]),
}


@pytest.mark.parametrize("label", MALFORMED)
def test_malformed(tmp_path, tensors, label):
    suffix, tensor, error, words = MALFORMED[label]
    checkpoint = write(tmp_path, tensors | {f"{BASE}.{suffix}": tensor})
    assert find_loader(checkpoint) is loaders.get("gpt_oss")  # whose load says why not
    with pytest.raises(error) as caught:
        find_loader(checkpoint).load(checkpoint, 0)
    assert all(word in str(caught.value) for word in [f"{BASE}.{suffix}: ", "expected", "found", *words]), str(caught.value)


@pytest.mark.parametrize(
    ("gate_up", "down", "words"),
    [
        ((3, 127, 96), (3, 96, 64), ["gate_up_proj_blocks: expected an even number of rows", "[3, 127, 96]"]),
        ((3, 128, 96), (3, 64, 96), ["down_proj_blocks: expected [E, n, k] = [3, 96, 64]", "found [3, 64, 96]"]),
        ((3, 128, 96), (2, 96, 64), ["down_proj_blocks: expected [E, n, k] = [3, 96, 64]", "found [2, 96, 64]"]),
    ],
)
def test_projections_that_do_not_fit(tmp_path, gate_up, down, words):
    tensors = {}
    for stem, (count, n, k) in (("gate_up_proj", gate_up), ("down_proj", down)):
        tensors[f"{BASE}.{stem}_blocks"] = zeros("U8", count, n, k // 32, 16)
        tensors[f"{BASE}.{stem}_scales"] = zeros("U8", count, n, k // 32)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, tensors)
    assert all(word in str(caught.value) for word in words), str(caught.value)


BF16_NAME = "gpt_oss bf16"


def test_bfloat16_columns_are_interleaved_and_read_once(tmp_path, reads):
    """By their numbers: gate has the even columns, up the odd ones, with their biases; an expert's bytes alone are read."""
    tensors = SCHEMES[BF16_NAME].layer("model.layers.0")
    weights = load(tmp_path, tensors)
    gate_up, biases = tensors[f"{BASE}.gate_up_proj"][1], tensors[f"{BASE}.gate_up_proj_bias"][1]
    for first, projection in enumerate(("gate", "up")):
        matrix = weights.matrix(2, projection)
        assert matrix.shape == (INTERMEDIATE, HIDDEN)
        np.testing.assert_array_equal(matrix.codes, gate_up[2, :, first::2])
        np.testing.assert_array_equal(matrix.bias, biases[2, first::2].astype(np.float32))
    size = gate_up[0].nbytes
    assert reads == [(f"{BASE}.gate_up_proj", (2 * size, 3 * size)), (f"{BASE}.gate_up_proj_bias", (512, 768))]


@pytest.mark.usefixtures("three_nodes")
def test_bfloat16_computes(tmp_path):
    """Transposed, interleaved and with biases, on two nodes; and the checkpoint's numbers come back."""
    tensors = SCHEMES[BF16_NAME].layer("model.layers.0", hidden=40, intermediate=96)
    experts = load(tmp_path, tensors)
    with MoELayer(experts, numa_nodes=[0, 1]) as layer:
        assert_right(layer, experts, *random_batch(np.random.default_rng(1), experts, 5, 2, np.float32))
        (exported,) = layer.export_expert(1)
    np.testing.assert_array_equal(exported["up"].codes, tensors[f"{BASE}.gate_up_proj"][1][1, :, 1::2])
    np.testing.assert_array_equal(exported["down"].codes, tensors[f"{BASE}.down_proj"][1][1])
    np.testing.assert_array_equal(exported["down"].bias, tensors[f"{BASE}.down_proj_bias"][1][1].astype(np.float32))


# label: (tensor, what it is instead, error, what the message must hold)
BF16_MALFORMED = {
    "F16": ("gate_up_proj", zeros("F16", EXPERTS, 96, ROWS), FormatError, ["expected BF16", "F16 [3, 96, 128]"]),
    "flat": ("down_proj", zeros("BF16", EXPERTS, 64 * 96), FormatError, ["three dimensions", "[3, 6144]"]),
    "odd columns": ("gate_up_proj", zeros("BF16", EXPERTS, 96, 127), CheckpointError, ["[E, n, k]", "found [3, 64, 96]"]),
    "two experts": ("down_proj", zeros("BF16", 2, 64, 96), CheckpointError, ["= [3, 96, 64]", "found [2, 96, 64]"]),
    "bias per gate": ("gate_up_proj_bias", zeros("BF16", EXPERTS, 64), FormatError, ["[3, 128]", "one bias", "[3, 64]"]),
}


@pytest.mark.parametrize("label", BF16_MALFORMED)
def test_malformed_bfloat16(tmp_path, label):
    suffix, tensor, error, words = BF16_MALFORMED[label]
    checkpoint = write(tmp_path, SCHEMES[BF16_NAME].layer("model.layers.0") | {f"{BASE}.{suffix}": tensor})
    with pytest.raises(error) as caught:
        loaders.get("gpt_oss").load(checkpoint, 0)
    assert all(word in str(caught.value) for word in [f"{BASE}.", "expected", "found", *words]), str(caught.value)


def test_bfloat16_without_biases_is_refused_by_its_clamp(tmp_path):
    """Nothing but config.json would then tell it from the models whose gate comes first."""
    tensors = {name: tensor for name, tensor in SCHEMES[BF16_NAME].layer("model.layers.0").items() if "bias" not in name}
    with pytest.raises(FormatError, match=r"swiglu_limit of config.json: expected none for this scheme, found 7.0"):
        load(tmp_path, tensors, {"model_type": "gpt_oss", "swiglu_limit": 7.0})


def test_the_privacy_filters_gate_comes_first(tmp_path):
    """It has gpt-oss's names and function, but its gate and up do not alternate."""
    checkpoint = write(tmp_path, SCHEMES[BF16_NAME].layer("model.layers.0"), {"model_type": "openai_privacy_filter"})
    with pytest.raises(FormatError, match=r"model_type of config.json: expected 'gpt_oss' .*, found 'openai_privacy_filter'"):
        find_loader(checkpoint).load(checkpoint, 0)
