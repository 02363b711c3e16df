"""From a checkpoint's folder to an output, through the loader, on every backend."""

import os

import numpy as np
import pytest
from helpers import assert_right, random_batch, same_bits

import ktmoe
from ktmoe import MoELayer
from ktmoe.errors import CheckpointError, MissingTensorError, UnknownNameError
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.synthetic import PUBLISHED, write_deepseek_v4, write_fp8, write_gpt_oss, write_kimi_k2, write_qwen3

HIDDEN, INTERMEDIATE, NUM_EXPERTS = 96, 64, 4
#: label: (writes it, options, its loader). 320 is no multiple of 128, like gpt-oss's 2880; clamps are so low that they show.
SCHEMES = {
    "DeepSeek-V4": (write_deepseek_v4, {"hidden": 320, "intermediate": 192, "swiglu_limit": 0.5}, "deepseek_v4"),
    "gpt-oss": (write_gpt_oss, {"hidden": 320, "intermediate": 320, "swiglu_limit": 0.5}, "gpt_oss"),
    "Kimi-K2": (write_kimi_k2, {"hidden": 320, "intermediate": 192}, "compressed_tensors"),
    "Kimi-K2, groups of 64": (write_kimi_k2, {"hidden": 320, "intermediate": 192, "group": 64}, "compressed_tensors"),
    "Kimi-K2, groups of 128": (write_kimi_k2, {"hidden": 384, "intermediate": 256, "group": 128}, "compressed_tensors"),
    "Qwen3": (write_qwen3, {"hidden": 320, "intermediate": 192}, "bf16"),
    "Qwen3, odd": (write_qwen3, {"hidden": 67, "intermediate": 31}, "bf16"),
    "FP8, blocks that are cut": (write_fp8, {"hidden": 320, "intermediate": 192}, "fp8"),
    **{
        name: (published.write, {"hidden": 384, "intermediate": 256}, published.loader) for name, published in PUBLISHED.items()
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two layers and an MTP layer over several files; clamped at so little that it shows."""
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = {"num_experts": NUM_EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE}
    write_deepseek_v4(folder, **sizes, layers=2, mtp_layers=1, swiglu_limit=0.5, shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("layer", [0, 1, "mtp.0"])
def test_a_layers_output(backend, folder, layer):
    experts = ktmoe.load_experts(folder, layer)
    assert experts.activation.limit == 0.5
    rng = np.random.default_rng(1)
    with MoELayer.from_checkpoint(folder, layer, backend) as made:
        assert (made.hidden, made.intermediate, made.num_experts) == (HIDDEN, INTERMEDIATE, NUM_EXPERTS)
        for tokens, dtype in ((1, np.float32), (9, ktmoe.arrays.BF16)):
            assert_right(made, experts, *random_batch(rng, experts, tokens, 3, dtype))


@pytest.mark.cover("values")
@pytest.mark.parametrize("label", SCHEMES)
def test_every_scheme(backend, tmp_path, label):
    """Written, recognised, loaded and computed; layer 1, of several files."""
    write, options, loader = SCHEMES[label]
    write(tmp_path, **options, num_experts=NUM_EXPERTS, layers=2, shard_bytes=100_000)
    checkpoint = Checkpoint(tmp_path)
    assert find_loader(checkpoint) is ktmoe.loaders.get(loader)
    experts = ktmoe.load_experts(tmp_path, 1)
    assert (experts.hidden, experts.intermediate) == (options["hidden"], options["intermediate"])
    rng = np.random.default_rng(1)
    with MoELayer.from_checkpoint(tmp_path, 1, backend) as made:
        for tokens, dtype in ((1, np.float32), (9, ktmoe.arrays.BF16)):
            y = assert_right(made, experts, *random_batch(rng, experts, tokens, 3, dtype))
            assert 0.01 < np.abs(y.astype(np.float32)).mean() < 10


def test_layers_differ_and_a_layer_is_always_the_same(backend, folder):
    batch = random_batch(np.random.default_rng(2), ktmoe.load_experts(folder, 0), 3, 2)
    outputs = []
    for layer in (0, 1, "mtp.0", 0):
        with MoELayer.from_checkpoint(folder, layer, backend, loader="deepseek_v4") as made:
            outputs.append(made.forward(*batch))
    assert same_bits(outputs[0], outputs[3])
    assert not any(same_bits(outputs[0], other) for other in outputs[1:3])


def test_options_are_passed_on(backend, folder):
    calls = []
    router_weight, progress = "down_input", lambda *done_and_total: calls.append(done_and_total)
    with MoELayer.from_checkpoint(folder, 0, backend, "bf16", router_weight=router_weight, progress=progress) as layer:
        assert (layer.router_weight, layer.activations, layer.backend) == (router_weight, "bf16", backend)
        assert_right(layer, ktmoe.load_experts(folder, 0), *random_batch(np.random.default_rng(3), layer, 4, 2))
    assert len(calls) == NUM_EXPERTS
    assert calls[-1][0] == calls[-1][1] > 0


def test_no_file_stays_open(folder):
    before = len(os.listdir("/proc/self/fd"))
    with MoELayer.from_checkpoint(folder, 0, "fp32_lut"):
        assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(MissingTensorError):
        MoELayer.from_checkpoint(folder, 7, "fp32_lut")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layer": 2}, MissingTensorError, r"layer 2"),
        ({"layer": "mtp.1"}, MissingTensorError, r"mtp\.1"),
        ({"layer": -1}, (MissingTensorError, ValueError), r"-1"),
        ({"loader": "exl3"}, UnknownNameError, r"unknown loader 'exl3'; known are .*deepseek_v4"),
        ({"backend": "avx3"}, UnknownNameError, r"unknown backend 'avx3'"),
        ({"path": "nowhere/at/all"}, (CheckpointError, OSError), r"nowhere/at/all"),
    ],
)
def test_what_does_not_exist(folder, arguments, error, message):
    with pytest.raises(error, match=message):
        MoELayer.from_checkpoint(**{"path": folder, "layer": 0, "backend": "fp32_lut"} | arguments)


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    write_deepseek_v4(tmp_path, num_experts=2, hidden=64, intermediate=64)
    file = next(tmp_path.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=file.name):
        MoELayer.from_checkpoint(tmp_path, 0, "fp32_lut")
