"""FP8 experts that are all in one tensor: scales per block and per row, transposed or not, and what is refused."""

import ml_dtypes
import numpy as np
import pytest
from checkpoints import BF16, EXPERTS, HIDDEN, SCHEMES, check_matrix, write, zeros
from helpers import assert_right, random_batch

from ktmoe import MoELayer, loaders
from ktmoe.errors import CheckpointError, FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.weights.activation import SILU
from ktmoe.weights.order import ROWS, TRANSPOSED

BASE = "model.layers.0.mlp.experts"
LLAMA4 = "model.layers.0.feed_forward.experts"
STACKED = [name for name, scheme in SCHEMES.items() if scheme.stacked]


def load(folder, tensors, config=None):
    checkpoint = write(folder, tensors, config)
    return find_loader(checkpoint).load(checkpoint, 0)


@pytest.mark.parametrize("name", ["fp8 fused", "fp8 transposed"])
def test_blocks_that_are_cut(tmp_path, name):
    """The last block along hidden is, in gate and up along k and in down along n."""
    scheme = SCHEMES[name]
    tensors = scheme.layer("model.layers.0", hidden=288, intermediate=256)
    weights = load(tmp_path, tensors, {"quantization_config": {"weight_block_size": [128, 128]}})
    assert {each.order for each in weights.formats.values()} == {TRANSPOSED if name == "fp8 transposed" else ROWS}
    assert weights.activation == SILU
    for projection in PROJECTIONS:
        check_matrix(weights.matrix(2, projection), *scheme.meaning(tensors, BASE, 2, projection))


@pytest.mark.usefixtures("three_nodes")
@pytest.mark.parametrize("name", ["fp8 transposed", "llama4 fp8", "granite"])
def test_computes_and_gives_the_checkpoints_bytes_back(tmp_path, name):
    """With shards on two nodes, each of which has other columns of the transposed codes."""
    scheme = SCHEMES[name]
    tensors = scheme.layer("model.layers.0", hidden=160, intermediate=256)
    experts = load(tmp_path, tensors, {"model_type": "llama4"} if name == "llama4 fp8" else None)
    with MoELayer(experts, numa_nodes=[1, 0]) as layer:
        assert_right(layer, experts, *random_batch(np.random.default_rng(1), experts, 5, 2, np.float32))
        (exported,) = layer.export_expert(1)
    for projection, matrix in exported.items():
        read = experts.matrix(1, projection)
        assert all(np.array_equal(array, read.stored[label]) for label, array in matrix.stored.items())
        check_matrix(matrix, *scheme.meaning(tensors, experts.name, 1, projection))


@pytest.mark.parametrize(
    ("suffix", "shape"),
    [("gate_up_proj", (EXPERTS, 128)), ("gate_up_proj", (EXPERTS, 128, 1)), ("down_proj", (EXPERTS, 1, HIDDEN))],
)
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_factor_per_row_may_have_an_axis_of_one(tmp_path, suffix, shape, dtype):
    scheme = SCHEMES["llama4 fp8"]
    tensors = scheme.layer("model.layers.0")
    scale = tensors[f"{LLAMA4}.{suffix}_scale"]
    scale[:] = [dtype, scale[1].reshape(shape).astype({"F32": np.float32, "BF16": BF16}[dtype])]
    scheme.check(load(tmp_path, tensors), tensors, "model.layers.0")


def test_one_scale_for_all_experts(tmp_path):
    """Llama-4 by ModelOpt; the scale of an expert's input is not used."""
    fused, random = SCHEMES["llama4 fp8"].layer("model.layers.0"), np.random.default_rng(3)
    tensors, scales = {}, {}
    for stem in ("gate_up_proj", "down_proj"):
        scales[stem] = np.float32(random.uniform(0.5, 2))
        tensors[f"{LLAMA4}.{stem}"] = fused[f"{LLAMA4}.{stem}"]
        tensors[f"{LLAMA4}.{stem}_weight_scale"] = ["F32", np.array(scales[stem])]
        tensors[f"{LLAMA4}.{stem}_input_scale"] = ["F32", np.array(np.float32(3))]
    weights = load(tmp_path, tensors, {"model_type": "llama4"})
    assert weights.router_weight == "expert_input"
    for projection, columns in (("gate", slice(64)), ("up", slice(64, 128)), ("down", slice(96))):
        stem = "down_proj" if projection == "down" else "gate_up_proj"
        for expert in range(EXPERTS):
            codes = tensors[f"{LLAMA4}.{stem}"][1][expert].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
            check_matrix(weights.matrix(expert, projection), codes.T[columns] * float(scales[stem]), None)


# label: (scheme, intermediate, tensor, what it is instead or None, error, what the message must hold)
REFUSED = {
    "a scale of gate and up": ("fp8 fused", 192, "gate_up_proj", None, FormatError, ["a multiple of 128 rows", "192 rows"]),
    "columns of gate and up": ("fp8 transposed", 64, "gate_up_proj", None, FormatError, ["a multiple of 128 rows", "64 rows"]),
    "scales not transposed": (
        "fp8 transposed",
        256,
        "gate_up_proj_scale_inv",
        zeros("F32", EXPERTS, 4, 1),
        FormatError,
        ["[3, 1, 4]", "one scale per 128x128", "[3, 4, 1]"],
    ),
    "I8 scales": ("fp8 fused", 128, "down_proj_scale_inv", zeros("I8", 3, 1, 1), FormatError, ["expected F32", "I8"]),
    "scales of two experts": (
        "fp8 fused",
        128,
        "down_proj_scale_inv",
        zeros("F32", 2, 1, 1),
        FormatError,
        ["[3, 1, 1]", "[2, 1, 1]"],
    ),
    "BF16 down": ("fp8 fused", 128, "down_proj", zeros("BF16", 3, 96, 128), FormatError, ["expected F8_E4M3", "BF16"]),
    "per expert": ("llama4 fp8", 64, "down_proj_scale", zeros("F32", 3, 1, 1), FormatError, ["[3, 96]", "per expert and row"]),
    "four axes": ("llama4 fp8", 64, "down_proj_scale", zeros("F32", 3, 96, 1, 1), FormatError, ["[3, 96]", "[3, 96, 1, 1]"]),
    "no experts": ("llama4 fp8", 64, "gate_up_proj", zeros("F8_E4M3", 0, 96, 128), FormatError, ["above 0", "[0, 96, 128]"]),
    "other inputs": (
        "llama4 fp8",
        64,
        "down_proj",
        zeros("F8_E4M3", 3, 64, 80),
        CheckpointError,
        ["expected [E, n, k] = [3, "],
    ),
}


@pytest.mark.parametrize("name", ["fp8 fused", "fp8 fused per matrix", "llama4 fp8"])
def test_scales_of_activations_are_not_used(tmp_path, name):
    scheme = SCHEMES[name]
    tensors = scheme.layer("model.layers.0", intermediate=128)
    more = {
        f"model.layers.0.{scheme.module}.{stem}_activation_scale": zeros("F32", 3) for stem in ("gate_up_proj", "down_proj")
    }
    weights = load(tmp_path, tensors | more, {"model_type": "llama4"} if name == "llama4 fp8" else None)
    for expert, projection in ((0, "gate"), (2, "up"), (1, "down")):
        check_matrix(weights.matrix(expert, projection), *scheme.meaning(tensors, weights.name, expert, projection))


@pytest.mark.parametrize("label", REFUSED)
def test_refused(tmp_path, label):
    name, intermediate, suffix, tensor, error, words = REFUSED[label]
    scheme = SCHEMES[name]
    tensors = scheme.layer("model.layers.0", intermediate=intermediate)
    base = f"model.layers.0.{scheme.module}"
    write(tmp_path, tensors | ({} if tensor is None else {f"{base}.{suffix}": tensor}))
    with pytest.raises(error) as caught:
        loaders.get(scheme.loader).load(Checkpoint(tmp_path), 0)
    assert all(word in str(caught.value) for word in [f"{base}.", "expected", "found", *words]), str(caught.value)


@pytest.mark.parametrize("name", STACKED)
def test_another_activation_is_refused(tmp_path, name):
    """gpt-oss's own is what its names mean, whatever hidden_act says."""
    tensors = SCHEMES[name].layer("model.layers.0")
    if SCHEMES[name].loader == "gpt_oss":
        assert load(tmp_path, tensors, {"hidden_act": "gelu"}).activation.up_offset == 1
        return
    with pytest.raises(FormatError, match=r"hidden_act of config.json: expected 'silu', found 'gelu'"):
        load(tmp_path, tensors, {"hidden_act": "gelu"})
