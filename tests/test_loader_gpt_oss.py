"""The gpt_oss loader beyond what tests/test_loader_schemes.py asks of all: interleaved rows, biases, slabs, its refusals."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoints import BF16, EXPERTS, HIDDEN, INTERMEDIATE, SCHEMES, check_matrix, write, zeros

from ktmoe import loaders
from ktmoe.errors import CheckpointError, FormatError
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
    """(name, part) of every read."""
    reads = []
    read = Checkpoint.read

    def record(self, name, out=None, *, part=None, release=False):
        reads.append((name, part))
        return read(self, name, out, part=part, release=release)

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
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("_bias")}
    SCHEME.check(load(tmp_path, tensors), tensors, "model.layers.0")


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (None, 7.0),
        ({"swiglu_limit": None}, 7.0),
        ({"swiglu_limit": 7}, 7.0),
        ({"swiglu_limit": 3.5, "hidden_act": "silu"}, 3.5),
        ({"text_config": {"swiglu_limit": 2.0}}, 2.0),
    ],
)
def test_activation(tmp_path, tensors, config, limit):
    assert load(tmp_path, tensors, config).activation == GatedActivation(alpha=1.702, limit=limit, up_offset=1.0)


@pytest.mark.parametrize(("limit", "expected"), [(-1, "0 or more"), ("7", "0 or more"), (True, "0 or more"), (0, "above 0")])
def test_bad_limit(tmp_path, tensors, limit, expected):
    with pytest.raises(CheckpointError, match=rf"swiglu_limit of config.json: expected .*{expected}.*, found {limit!r}"):
        load(tmp_path, tensors, {"swiglu_limit": limit})


def test_gate_and_up_are_read_once(tmp_path, tensors, reads):
    weights = load(tmp_path, tensors)
    for projection in ("up", "gate"):
        weights.matrix(1, projection)
    assert [name for name, _ in reads] == [f"{BASE}.gate_up_proj_{part}" for part in ("blocks", "scales", "bias")]
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
    blocks = [part for name, part in reads if name.endswith("blocks")]
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
    "BF16 blocks": ("gate_up_proj_blocks", zeros("BF16", EXPERTS, ROWS, 3, 16), FormatError, ["expected U8", "BF16 [3, 128"]),
    "flat blocks": ("gate_up_proj_blocks", zeros("U8", EXPERTS, ROWS, 48), FormatError, ["four dimensions", "[3, 128, 48]"]),
    "blocks of 8": ("down_proj_blocks", zeros("U8", EXPERTS, 96, 2, 8), FormatError, ["[3, 96, 2, 16]", "16 bytes", "2, 8]"]),
    "no rows": ("down_proj_blocks", zeros("U8", EXPERTS, 0, 2, 16), FormatError, ["above 0", "[3, 0, 2, 16]"]),
    "BF16 scales": (
        "down_proj_scales",
        zeros("BF16", EXPERTS, 96, 2),
        FormatError,
        ["expected U8 or F8_E8M0", "BF16 [3, 96, 2]"],
    ),
    "groups of 16": ("down_proj_scales", zeros("U8", EXPERTS, 96, 4), FormatError, ["[3, 96, 2]", "per 32", "[3, 96, 4]"]),
    "F16 bias": ("down_proj_bias", zeros("F16", EXPERTS, 96), FormatError, ["expected BF16 or F32", "F16 [3, 96]"]),
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


def test_a_dequantized_one_is_refused_by_the_bf16_loader(tmp_path):
    """[E, H, 2I], interleaved, with biases; and without them by its shape alone."""
    tensors = {
        f"{BASE}.gate_up_proj": zeros("BF16", EXPERTS, HIDDEN, ROWS),
        f"{BASE}.down_proj": zeros("BF16", EXPERTS, INTERMEDIATE, HIDDEN),
    }
    biases = {
        f"{BASE}.{stem}_bias": ["BF16", np.zeros((EXPERTS, n), BF16)] for stem, n in (("gate_up_proj", ROWS), ("down_proj", 96))
    }
    with pytest.raises(FormatError, match=rf"{BASE}.down_proj_bias: expected none .*, found one: biases are not supported"):
        load(tmp_path, tensors | biases)
    with pytest.raises(
        FormatError, match=rf"{BASE}.gate_up_proj: shape: .*found it transposed, \[3, 96, 128\] beside \[3, 64, 96\]"
    ):
        load(tmp_path, tensors)
