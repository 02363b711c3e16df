"""The gptq loader beyond what tests/test_loader_schemes.py asks of all: a writer, zero points, configs."""

import json

import numpy as np
import pytest
from checkpoints import BF16, PROJ, SCHEMES, numbers, write, zeros

from ktmoe import loaders
from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.weights.elements import INT4
from ktmoe.weights.formats import WeightFormat, int4, uint4
from ktmoe.weights.order import GPTQ
from ktmoe.weights.scales import Factor

EXPERT = "model.layers.0.mlp.experts.0"


def load(folder, tensors, config=None):
    checkpoint = write(folder, tensors, config)
    assert find_loader(checkpoint) is loaders.get("gptq")
    return loaders.get("gptq").load(checkpoint, 0)


def config(**changes):
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    return {"quantization_config": {key: value for key, value in (stated | changes).items() if value != "absent"}}


def pack(numbers_, axis):
    """Eight of an axis in each uint32, the first one in the lowest bits, one after another as AutoGPTQ's loops do it."""
    lines = np.moveaxis(numbers_, axis, 0).astype(np.uint32)
    packed = np.zeros((len(lines) // 8, *lines.shape[1:]), np.uint32)
    for row in range(len(packed)):
        for j in range(8):
            packed[row] |= lines[8 * row + j] << np.uint32(4 * j)
    return np.ascontiguousarray(np.moveaxis(packed, 0, axis))


def quantize(random, n, k, group, sym):
    """(tensors but for qzeros, z [k/group, n], what they mean): asymmetric by each group's ends, symmetric around 8."""
    w = random.standard_normal((n, k)) + (0 if sym else 0.3)
    w = w.reshape(n, -1, group)
    low, high = np.minimum(w.min(2), 0), np.maximum(w.max(2), 0)
    if sym:
        high = np.maximum(-low, high)
        low = -high
    scales = ((high - low) / 15).astype(np.float16)
    z = np.full(scales.shape, 8) if sym else np.clip(np.round(-low / scales.astype(float)), 1, 15).astype(int)
    q = np.clip(np.round(w / scales.astype(float)[:, :, None]) + z[:, :, None], 0, 15).astype(int)
    expected = ((q - z[:, :, None]) * scales.astype(np.float64)[:, :, None]).reshape(n, k)
    tensors = {
        ".qweight": ["I32", pack(q.reshape(n, k).T, 0).view(np.int32)],
        ".scales": ["F16", np.ascontiguousarray(scales.T)],
        ".g_idx": ["I32", (np.arange(k) // group).astype(np.int32)],
    }
    return tensors, z.T, expected


def checkpoint_of(group=32, sym=False, version="gptq", writer=None):
    tensors, expected, random = {}, {}, np.random.default_rng(5)
    for projection, stem in PROJ.items():
        n, k = (256, 128) if projection == "down" else (128, 256)
        made, z, expected[projection] = quantize(random, n, k, group, sym)
        stored = writer(z) if writer else pack(z - (version == "gptq"), 1)
        made[".qzeros"] = ["I32", stored.view(np.int32)]
        tensors |= {f"{EXPERT}.{stem}{ending}": tensor for ending, tensor in made.items()}
    return tensors, expected


def by_gptqmodel(z):
    """Zero points as GPTQModel packs them: it packs z, and subtracts 1 from all eight as one integer."""
    return pack(z, 1) - np.uint32(0x11111111)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_against_a_writer(tmp_path, group, sym, version):
    tensors, expected = checkpoint_of(group, sym, version)
    weights = load(tmp_path, tensors, config(group_size=group, sym=sym, checkpoint_format=version))
    plus = int(version == "gptq")
    wanted = int4(group, "fp16", GPTQ) if sym else uint4(group, "fp16", GPTQ, plus=plus)
    assert weights.formats == dict.fromkeys(PROJECTIONS, wanted)
    for projection in PROJECTIONS:
        np.testing.assert_array_equal(numbers(weights.matrix(0, projection)), expected[projection])


@pytest.mark.parametrize("sym", [False, True])
def test_against_gptqmodels_zero_points(tmp_path, sym):
    tensors, expected = checkpoint_of(sym=sym, writer=by_gptqmodel)
    weights = load(tmp_path, tensors, config(sym=sym))
    np.testing.assert_array_equal(numbers(weights.matrix(0, "down")), expected["down"])


def test_a_zero_point_of_0_is_refused_where_it_made_its_neighbours_wrong(tmp_path):
    """What GPTQModel stores for z = 0 borrows from the next one; what AutoGPTQ stores sets all above."""
    z = np.full((2, 8), 5)
    z[1, 2] = 0
    found = by_gptqmodel(z)
    assert found[1, 0] == 0x44443F44  # a reader that adds 1 to each takes the next one for 4
    tensors, _ = checkpoint_of()
    name = f"{EXPERT}.up_proj.qzeros"
    tensors[name][1][3, 1] = found.view(np.int32)[1, 0]
    weights = load(tmp_path, tensors, config(sym=False))
    weights.matrix(0, "gate")
    with pytest.raises(FormatError, match=rf"{name}: expected zero points from 1 to 15, found 16 or 0: .* 15, is ambiguous"):
        weights.matrix(0, "up")


@pytest.mark.parametrize(("packing", "version"), [("auto_round:auto_gptq", "gptq"), ("auto_round", "gptq_v2")])
@pytest.mark.parametrize("sym", [False, True])
def test_autoround(tmp_path, packing, version, sym):
    """Its zero points are less 1, or as they are; it writes neither checkpoint_format nor g_idx."""
    tensors, expected = checkpoint_of(sym=sym, version=version)
    tensors = {name: tensor for name, tensor in tensors.items() if "g_idx" not in name}
    stated = config(sym=sym, quant_method="auto-round", packing_format=packing, checkpoint_format="absent", desc_act="absent")
    weights = load(tmp_path, tensors, stated)
    for projection in PROJECTIONS:
        np.testing.assert_array_equal(numbers(weights.matrix(0, projection)), expected[projection])


def test_a_zero_point_of_15_is_one_in_version_2(tmp_path):
    tensors, _ = checkpoint_of(version="gptq_v2")
    tensors[f"{EXPERT}.up_proj.qzeros"][1][0, 0] = -1
    matrix = load(tmp_path, tensors, config(sym=False, checkpoint_format="gptq_v2")).matrix(0, "up")
    assert numbers(matrix)[0, :32].max() <= 0


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_symmetric_ones_must_be_around_8(tmp_path, version):
    tensors, _ = checkpoint_of(sym=True, version=version)
    name = f"{EXPERT}.gate_proj.qzeros"
    tensors[name][1][1, 2] ^= 3 << 8
    weights = load(tmp_path, tensors, config(checkpoint_format=version))
    weights.matrix(0, "up")
    wanted = 7 if version == "gptq" else 8
    with pytest.raises(FormatError, match=rf"{name}: expected {wanted} everywhere, as sym says, found {wanted ^ 3}$"):
        weights.matrix(0, "gate")


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_one_group_for_all_of_a_row(tmp_path, dtype):
    """group_size -1: the groups are the rows, of gate and of down."""
    tensors, expected = {}, {}
    for projection, stem in PROJ.items():
        n, k = (256, 128) if projection == "down" else (128, 256)
        made, z, expected[projection] = quantize(np.random.default_rng(7), n, k, k, sym=True)
        made[".qzeros"] = ["I32", pack(z - 1, 1).view(np.int32)]
        made[".scales"] = [dtype, made[".scales"][1].astype({"F16": np.float16, "BF16": BF16}[dtype])]
        expected[projection] = numbers_per_row(made)
        tensors |= {f"{EXPERT}.{stem}{ending}": tensor for ending, tensor in made.items()}
    weights = load(tmp_path, tensors, config(group_size=-1))
    assert weights.formats == dict.fromkeys(PROJECTIONS, WeightFormat(INT4, factor=Factor(per_row=True), order=GPTQ))
    for projection in PROJECTIONS:
        matrix = weights.matrix(0, projection)
        np.testing.assert_array_equal(numbers(matrix), expected[projection])
    (tmp_path / "asymmetric").mkdir()
    with pytest.raises(FormatError, match=r"gate_proj.qzeros: expected zero points in groups, found one per row"):
        load(tmp_path / "asymmetric", tensors, config(group_size=-1, sym=False))


def numbers_per_row(made):
    """(code - 8) * its row's scale; code (k, n) is nibble k % 8 of dword (k // 8, n)."""
    dwords, scales = made[".qweight"][1].astype(np.int64), made[".scales"][1].astype(np.float64)
    codes = np.stack([dwords[k // 8] >> 4 * (k % 8) & 15 for k in range(8 * len(dwords))])
    return ((codes - 8) * scales).T


def test_without_a_config_it_is_symmetric_or_refused(tmp_path):
    tensors, expected = checkpoint_of(group=64, sym=True)
    weights = load(tmp_path, tensors)
    np.testing.assert_array_equal(numbers(weights.matrix(0, "up")), expected["up"])
    (tmp_path / "asymmetric").mkdir()
    with pytest.raises(FormatError, match=r"qzeros: expected 7 everywhere"):
        load(tmp_path / "asymmetric", checkpoint_of()[0]).matrix(0, "up")


def test_autogptqs_own_file(tmp_path):
    (tmp_path / "quantize_config.json").write_text(json.dumps(config(sym=False)["quantization_config"]))
    tensors, expected = checkpoint_of()
    weights = load(tmp_path, tensors, {"model_type": "qwen3_moe"})
    np.testing.assert_array_equal(numbers(weights.matrix(0, "up")), expected["up"])


def test_bfloat16_scales_and_no_g_idx(tmp_path):
    tensors = {name: tensor for name, tensor in SCHEMES["gptq"].layer("model.layers.0").items() if "g_idx" not in name}
    for name in tensors:
        if name.endswith("scales"):
            tensors[name] = ["BF16", tensors[name][1].astype(BF16)]
    weights = load(tmp_path, tensors)
    assert weights.formats["up"] == int4(32, "bf16", GPTQ)
    SCHEMES["gptq"].check(weights, tensors, "model.layers.0")


def test_activation_order(tmp_path):
    tensors, _ = checkpoint_of()
    name = f"{EXPERT}.down_proj.g_idx"
    tensors[name][1][[40, 90]] = tensors[name][1][[90, 40]]
    weights = load(tmp_path, tensors, config(sym=False))
    weights.matrix(0, "gate")
    with pytest.raises(FormatError, match=rf"{name}: \[40\]: expected 1, groups in order, found 2: activation order"):
        weights.matrix(0, "down")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 8}, ["bits: expected 4, found 8"]),
        ({"bits": True}, ["bits: expected 4, found True"]),
        ({"desc_act": True}, ["desc_act: expected False, found True"]),
        ({"sym": "yes"}, ["sym: expected True or False, found 'yes'"]),
        ({"checkpoint_format": "marlin"}, ["checkpoint_format: expected 'gptq' or 'gptq_v2', found 'marlin'"]),
        ({"quant_method": "awq"}, ["quant_method: expected 'gptq' or 'auto-round', found 'awq'"]),
        ({"packing_format": "auto_round:exllamav2"}, ["packing_format: expected 'auto_round:auto_gptq'", "exllamav2"]),
        ({"group_size": -2}, ["group_size: expected a count of columns, found -2"]),
        ({"group_size": "32"}, ["group_size: expected a count of columns, found '32'"]),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_configs_that_are_refused(tmp_path, changes, words, nested):
    stated = {"text_config": config(**changes)} if nested else config(**changes)
    with pytest.raises(FormatError) as caught:
        load(tmp_path, SCHEMES["gptq"].layer("model.layers.0"), stated)
    assert all(word in str(caught.value) for word in ["quantization_config.", *words]), str(caught.value)


def test_asymmetric_rows_are_multiples_of_8(tmp_path):
    tensors = {}
    for stem, n, k in (("gate_proj", 36, 32), ("up_proj", 36, 32), ("down_proj", 32, 36)):
        name = f"{EXPERT}.{stem}"
        tensors |= {f"{name}.qweight": zeros("I32", k // 8, n), f"{name}.scales": zeros("F16", 1, n)}
        tensors[f"{name}.qzeros"] = zeros("I32", 1, n // 8)
    with pytest.raises(
        FormatError, match=r"qweight: shape: expected an n that is a multiple of 8, found \[n, k\] = \[36, 32\]"
    ):
        loaders.get("gptq").load(write(tmp_path, tensors, config(sym=False)), 0)


def test_eight_bits_are_refused_by_name(tmp_path):
    """As GPTQModel writes them: four codes an integer. Shapes alone would say that scales are too many."""
    tensors = {}
    for projection, stem in PROJ.items():
        n, k = (96, 64) if projection == "down" else (64, 96)
        name = f"{EXPERT}.{stem}"
        tensors[f"{name}.qweight"] = zeros("I32", k // 4, n)
        tensors[f"{name}.scales"] = zeros("F16", k // 32, n)
        tensors[f"{name}.qzeros"] = zeros("I32", k // 32, n // 4)
    with pytest.raises(FormatError, match=r"gptq: .*quantization_config\.bits: expected 4, found 8"):
        find_loader(write(tmp_path, tensors, config(bits=8, group_size=32)))
