"""The gguf loader: names, values by an own reading of the records, what experts compute, and what is refused."""

import struct
import sys

import numpy as np
import pytest
from checkpoints import scores
from gguf_files import BF16, F16, F32, NVFP4, Q1_0, Q4_0, Q8_0, layer, metadata, records, write

from ktmoe import SILU, MoEModel, cli, load_experts
from ktmoe.dequantization import dequantize
from ktmoe.errors import CheckpointError, FormatError, MissingTensorError, UnavailableError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders import naming
from ktmoe.loaders.base import find_layers, find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.model_config import SWIGLU_OAI
from ktmoe.measuring.inspection import top_k_of
from ktmoe.weights.ggml import GGML, TYPES
from ktmoe.weights.scales import Factor

KINDS = {"gate": Q4_0, "up": Q8_0, "down": F32}
EXPERTS, HIDDEN, INTERMEDIATE = 3, 64, 128
SIZES = {"experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE}


def made(folder, tensors, keys=None, architecture="qwen3moe", **numbers):
    """A checkpoint of these tensors."""
    keys = metadata(architecture, **numbers) | (keys or {})
    return Checkpoint(write(folder / "m.gguf", keys, tensors))


def load(checkpoint, number=0):
    return find_loader(checkpoint, layer=number).load(checkpoint, number)


def shape_of(projection):
    return (HIDDEN, INTERMEDIATE) if projection == "down" else (INTERMEDIATE, HIDDEN)


def plain(kind, stored, shape):
    """float64 weights of Q4_0, Q8_0 and F32, after ggml's definitions."""
    if kind == F32:
        return np.frombuffer(stored, np.float32).astype(np.float64).reshape(shape)
    rows = np.frombuffer(stored, np.uint8).reshape(-1, 18 if kind == Q4_0 else 34)
    scale, codes = rows[:, :2].copy().view(np.float16).astype(np.float64), rows[:, 2:]
    values = np.hstack([codes & 15, codes >> 4]).astype(int) - 8 if kind == Q4_0 else codes.view(np.int8)
    return (values * scale).reshape(shape)


def sane(kind, shape, seed=0):
    """Records whose numbers are finite."""
    if kind == F32:
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).tobytes()
    size = 18 if kind == Q4_0 else 34
    rows = np.frombuffer(records(seed, kind, shape), np.uint8).reshape(-1, size).copy()
    rows[:, :2] = np.random.default_rng(seed).uniform(0.01, 0.1, (len(rows), 1)).astype(np.float16).view(np.uint8)
    return rows.tobytes()


def sane_layer(number, kinds=KINDS):
    return {
        f"blk.{number}.ffn_{p}_exps.weight": (kind, (EXPERTS, *shape_of(p)), sane(kind, (EXPERTS, *shape_of(p)), number))
        for p, kind in kinds.items()
    }


def test_each_projection_has_its_type(tmp_path):
    """Values of every expert, by an own reading; layers may differ, and need not begin at 0."""
    other = {"gate": Q8_0, "up": F32, "down": Q4_0}
    tensors = {2: sane_layer(2), 5: sane_layer(5, other)}
    checkpoint = made(tmp_path, tensors[2] | tensors[5], expert_count=EXPERTS)
    assert {name for name, score in scores(checkpoint).items() if score} == {"gguf"}
    assert find_layers(checkpoint) == [2, 5]
    for number, kinds in ((2, KINDS), (5, other)):
        experts = load(checkpoint, number)
        assert (experts.num_experts, experts.hidden, experts.intermediate) == (EXPERTS, HIDDEN, INTERMEDIATE)
        assert (experts.name, experts.activation, experts.router_weight) == (f"blk.{number}", SILU, "down_output")
        for projection, kind in kinds.items():
            name = f"blk.{number}.ffn_{projection}_exps.weight"
            _, shape, stored = tensors[number][name]
            weights = plain(kind, stored, shape)
            for expert in range(EXPERTS):
                matrix = experts.matrix(expert, projection)
                assert matrix.name == f"blk.{number}.ffn_{projection}_exps[{expert}]"
                np.testing.assert_array_equal(dequantize(matrix), weights[expert])


@pytest.mark.parametrize("name", GGML)
def test_bytes_of_every_type(tmp_path, name):
    """An expert's arrays are its slice of the tensor."""
    (kind,) = (number for number, of in TYPES.items() if of.name == name)
    shape = (2, 8, 512)
    stored = np.random.default_rng(1).bytes(2 * 8 * 512 // TYPES[kind].weights * TYPES[kind].nbytes)
    tensors = {
        f"blk.0.ffn_{p}_exps.weight": (kind, s, stored) for p, s in zip(PROJECTIONS, (shape, shape, (2, 512, 8)), strict=True)
    }
    if TYPES[kind].weights > 1:
        tensors["blk.0.ffn_down_exps.weight"] = (F32, (2, 512, 8), bytes(2 * 512 * 8 * 4))
    experts = load(made(tmp_path, tensors))
    assert experts.formats["gate"] == GGML[name]
    for expert in (1, 0):
        matrix = experts.matrix(expert, "up")
        assert matrix.codes.tobytes() == stored[expert * len(stored) // 2 :][: len(stored) // 2]
        assert matrix.factor is None or matrix.factor == [1]


def test_gate_and_up_in_one(tmp_path):
    """Gate's rows come first; a bias and a factor are split as the rows are."""
    shape = (EXPERTS, 2 * INTERMEDIATE, HIDDEN)
    bias = np.arange(EXPERTS * 2 * INTERMEDIATE, dtype=np.float32)
    tensors = sane_layer(0)
    down = tensors["blk.0.ffn_down_exps.weight"]
    stored = sane(Q4_0, shape)
    tensors = {
        "blk.0.ffn_gate_up_exps.weight": (Q4_0, shape, stored),
        "blk.0.ffn_gate_up_exps.bias": (F32, (EXPERTS, 2 * INTERMEDIATE), bias.tobytes()),
        "blk.0.ffn_gate_up_exps.scale": (F32, (EXPERTS,), np.float32([1, 2, 4]).tobytes()),
        "blk.0.ffn_down_exps.weight": down,
    }
    tensors["blk.0.ffn_down_exps.bias"] = (F32, (EXPERTS, HIDDEN), np.arange(EXPERTS * HIDDEN, dtype=np.float32).tobytes())
    experts = load(made(tmp_path, tensors, architecture="gpt-oss"))
    weights, biases = plain(Q4_0, stored, shape), bias.reshape(EXPERTS, 2, INTERMEDIATE)
    for expert in range(EXPERTS):
        for index, projection in enumerate(("gate", "up")):
            matrix = experts.matrix(expert, projection)
            rows = weights[expert, index * INTERMEDIATE :][:INTERMEDIATE]
            np.testing.assert_array_equal(dequantize(matrix), rows * 2.0**expert)
            np.testing.assert_array_equal(matrix.bias, biases[expert, index])
            assert matrix.factor.tolist() == [2.0**expert]
            assert matrix.name == f"blk.0.ffn_gate_up_exps[{expert}] {projection}"
        np.testing.assert_array_equal(experts.matrix(expert, "down").bias, np.arange(HIDDEN) + expert * HIDDEN)


@pytest.mark.parametrize("kind", [F32, F16, BF16])
def test_gpt_oss(tmp_path, kind):
    """Biases of all projections, and its function."""
    tensors = sane_layer(0)
    numbers = {}
    for projection in PROJECTIONS:
        numbers[projection] = np.arange(EXPERTS * shape_of(projection)[0], dtype=np.float32).reshape(EXPERTS, -1) % 251
        stored = {F32: numbers[projection], F16: numbers[projection].astype(np.float16)}.get(kind)
        data = (
            stored.tobytes() if stored is not None else (numbers[projection].view(np.uint32) >> 16).astype(np.uint16).tobytes()
        )
        tensors[f"blk.0.ffn_{projection}_exps.bias"] = (kind, numbers[projection].shape, data)
    experts = load(made(tmp_path, tensors, architecture="gpt-oss"))
    assert experts.activation == SWIGLU_OAI
    for projection in PROJECTIONS:
        np.testing.assert_array_equal(experts.matrix(2, projection).bias, numbers[projection][2])


def test_nvfp4(tmp_path):
    """With a factor for each expert; without, it is 1; the scale of the input is not used."""
    tensors = layer(0, dict.fromkeys(PROJECTIONS, NVFP4), experts=2, hidden=64, intermediate=128)
    for projection in ("gate", "down"):
        tensors[f"blk.0.ffn_{projection}_exps.scale"] = (F32, (2,), np.float32([0.5, 3]).tobytes())
        tensors[f"blk.0.ffn_{projection}_exps.input_scale"] = (F32, (2,), bytes(8))
    experts = load(made(tmp_path, tensors))
    assert experts.formats == dict.fromkeys(PROJECTIONS, GGML["NVFP4"])
    assert {p: experts.matrix(1, p).factor.tolist() for p in PROJECTIONS} == {"gate": [3], "up": [1], "down": [3]}


def test_a_factor_of_other_types(tmp_path):
    tensors = sane_layer(0) | {"blk.0.ffn_up_exps.scale": (F32, (EXPERTS,), np.float32([1, 2, 3]).tobytes())}
    experts = load(made(tmp_path, tensors))
    assert experts.formats["up"].factor == Factor(per_row=False)
    assert (experts.formats["gate"], experts.formats["down"]) == (GGML["Q4_0"], GGML["F32"])


def old_layer(number, experts=EXPERTS):
    return {
        f"blk.{number}.ffn_{p}.{expert}.weight": (KINDS[p], shape_of(p), sane(KINDS[p], shape_of(p), 10 * number + expert))
        for expert in range(experts)
        for p in PROJECTIONS
    }


def test_old_names(tmp_path):
    """A tensor for each expert, as Mixtral's first files have them; with more than nine, and in any order."""
    tensors = dict(sorted(old_layer(0, 11).items()))
    experts = load(made(tmp_path, tensors, architecture="llama", expert_count=11))
    assert experts.num_experts == 11
    for expert, projection in ((0, "gate"), (2, "up"), (10, "down")):
        name = f"blk.0.ffn_{projection}.{expert}"
        kind, shape, stored = tensors[f"{name}.weight"]
        matrix = experts.matrix(expert, projection)
        assert matrix.name == name
        np.testing.assert_array_equal(dequantize(matrix), plain(kind, stored, shape))


def test_one_expert(tmp_path):
    """ggml writes no dimension of 1 that comes first in numpy's order."""
    tensors = {
        name.replace("blk", "blk"): (kind, shape[1:], data[: len(data) // 3])
        for name, (kind, shape, data) in sane_layer(0).items()
    }
    tensors |= {f"blk.0.ffn_{p}_exps.bias": f32(shape_of(p)[0]) for p in PROJECTIONS}
    experts = load(made(tmp_path, tensors, architecture="gpt-oss", expert_count=1))
    assert (experts.num_experts, experts.hidden, experts.intermediate) == (1, HIDDEN, INTERMEDIATE)
    assert experts.matrix(0, "up").bias.shape == (INTERMEDIATE,)


def changed(name, value):
    return lambda tensors: {**tensors, name: value} if value else {k: v for k, v in tensors.items() if k != name}


def f32(*shape):
    return F32, shape, bytes(4 * int(np.prod(shape)))


def biases():
    return {f"blk.0.ffn_{p}_exps.bias": f32(EXPERTS, shape_of(p)[0]) for p in PROJECTIONS}


UP = "blk.0.ffn_up_exps"
WRONG = {
    "no up": (
        changed(f"{UP}.weight", None),
        MissingTensorError,
        ["blk.0.ffn_up_exps.weight: expected with the layer's others"],
    ),
    "another bias": (
        lambda tensors: tensors | biases() | {f"{UP}.bias": f32(EXPERTS, 64)},
        FormatError,
        [f"{UP}.bias", "[3, 128]", "[3, 64]"],
    ),
    "bias of codes": (
        lambda tensors: tensors | biases() | {f"{UP}.bias": (Q8_0, (EXPERTS, 128), sane(Q8_0, (EXPERTS, 128)))},
        FormatError,
        [f"{UP}.bias", "dtype", "Q8_0"],
    ),
    "another scale": (changed(f"{UP}.scale", f32(2)), FormatError, [f"{UP}.scale", "one factor per expert", "[2]"]),
    "a type without kernels": (
        changed(f"{UP}.weight", (Q1_0, (EXPERTS, 128, 256), records(0, Q1_0, (EXPERTS, 128, 256)))),
        FormatError,
        [f"{UP}.weight: type: expected one of Q4_0, ", "found Q1_0 [3, 128, 256]"],
    ),
    "other experts": (changed(f"{UP}.weight", f32(2, 128, 64)), CheckpointError, [UP, "[3, 128, 64]", "found [2, 128, 64]"]),
    "other rows": (changed(f"{UP}.weight", f32(3, 64, 64)), CheckpointError, [UP, "[3, 128, 64]", "found [3, 64, 64]"]),
    "four dimensions": (changed(f"{UP}.weight", f32(1, 3, 128, 64)), FormatError, [UP, "three dimensions"]),
    "no experts": (
        changed("blk.0.ffn_gate_exps.weight", f32(0, 128, 64)),
        FormatError,
        ["gate_exps", "three dimensions above 0"],
    ),
    "old names, too": (
        lambda tensors: tensors | old_layer(0),
        CheckpointError,
        ["of all experts or of one each", "found both"],
    ),
    "fused, too": (
        changed("blk.0.ffn_gate_up_exps.weight", f32(3, 256, 64)),
        FormatError,
        ["blk.0.ffn_gate_exps.weight: expected none beside", "its meaning is not known"],
    ),
    "an odd number of rows": (
        lambda tensors: {
            "blk.0.ffn_gate_up_exps.weight": f32(3, 255, 64),
            "blk.0.ffn_down_exps.weight": tensors["blk.0.ffn_down_exps.weight"],
        },
        CheckpointError,
        ["even number of rows", "found 255"],
    ),
    "a gap": (lambda _: changed("blk.0.ffn_up.1.weight", None)(old_layer(0)), MissingTensorError, ["ffn_up.1.weight"]),
    "no expert 1": (
        lambda _: {name: value for name, value in old_layer(0).items() if ".1." not in name},
        MissingTensorError,
        ["blk.0.ffn_gate.1.weight"],
    ),
    "a huge expert": (
        lambda _: old_layer(0) | {"blk.0.ffn_up.999999.weight": f32(128, 64)},
        MissingTensorError,
        ["expected with the layer's others"],
    ),
    **{
        f"expert {expert} unlike expert 0": (
            lambda _, name=f"blk.0.ffn_up.{expert}.weight": old_layer(0) | {name: f32(128, 64)},
            CheckpointError,
            [f"ffn_up.{expert}.weight: expected Q8_0 [128, 64] as in expert 0, found F32 [128, 64]"],
        )
        for expert in (1, 2)
    },
    "three dimensions of one": (
        lambda _: {name: (F32, (2, *shape), bytes(8 * 128 * 64)) for name, (_, shape, _) in old_layer(0).items()},
        FormatError,
        ["ffn_gate.0.weight", "two dimensions"],
    ),
    "bias of old names": (
        lambda _: old_layer(0) | {"blk.0.ffn_up.0.bias": f32(128)},
        FormatError,
        ["blk.0.ffn_up.0.bias: expected none beside"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(tmp_path, name):
    """With the same words by load() and by the choice of a loader."""
    change, error, words = WRONG[name]
    tensors = change(sane_layer(0))
    architecture = "gpt-oss" if f"{UP}.bias" in tensors else "qwen3moe"  # which has biases
    checkpoint = made(tmp_path, tensors, architecture=architecture)
    for call in (lambda: find_loader(checkpoint, "gguf").load(checkpoint, 0), lambda: find_loader(checkpoint)):
        with pytest.raises(error) as caught:
            call()
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_another_number_of_experts(tmp_path):
    checkpoint = made(tmp_path, sane_layer(0), expert_count=4)
    with pytest.raises(CheckpointError, match=r"blk\.0: expected 4 by qwen3moe\.expert_count of the GGUF header, found 3"):
        load(checkpoint)


@pytest.mark.parametrize("stated", [{}, {"expert_used_count": 9}])
def test_how_many_experts_a_token_has(tmp_path, stated):
    """By the header, which messages name: there is no config.json."""
    assert top_k_of(made(tmp_path, sane_layer(0), expert_used_count=2), 3) == 2
    with pytest.raises(CheckpointError, match=r"qwen3moe\.expert_used_count of the GGUF header") as caught:
        top_k_of(made(tmp_path, sane_layer(0), **stated), 3)
    assert "config.json" not in str(caught.value)


def test_a_layer_that_is_not_there(tmp_path):
    checkpoint = made(tmp_path, sane_layer(1) | sane_layer(2))
    for layer_ in (0, "mtp.0"):
        with pytest.raises(MissingTensorError, match=r"expected a layer that has routed experts, found layers 1-2"):
            find_loader(checkpoint).load(checkpoint, layer_)
    assert find_loader(checkpoint).load(checkpoint, "2").name == "blk.2"


def test_numbers_that_are_none(tmp_path):
    """Refused when packed, with the tensor and the place."""
    tensors = sane_layer(0)
    kind, shape, stored = tensors[f"{UP}.weight"]
    infinite = bytearray(stored)
    infinite[34 * 5 : 34 * 5 + 2] = np.float16(np.inf).tobytes()
    experts = load(made(tmp_path, tensors | {f"{UP}.weight": (kind, shape, bytes(infinite))}))
    experts.matrix(1, "up").refuse()
    with pytest.raises(FormatError, match=r"blk\.0\.ffn_up_exps\[0\]: scale"):
        experts.matrix(0, "up").refuse()


@pytest.mark.parametrize("label", ["bias", "scale"])
@pytest.mark.parametrize(
    ("kind", "dtype", "bits"),
    [(F32, "<u4", (0x7FA00000, 0xFFC00001, 0x7F800000)), (F16, "<u2", (0x7D00, 0x7C00)), (BF16, "<u2", (0x7FA0, 0xFF80))],
)
def test_biases_and_factors_that_are_none(tmp_path, label, kind, dtype, bits):
    """Signalling NaN, NaN, infinite: refused by name and place, without numpy's warnings."""
    shape = (EXPERTS, INTERMEDIATE) if label == "bias" else (EXPERTS,)
    name, what = f"{UP}.{label}", {"bias": r"bias \[5\]", "scale": r"factor \[0\]"}[label]
    for number in bits:
        stored = np.zeros(shape, dtype)
        stored[(1, 5)[: len(shape)]] = number
        experts = load(made(tmp_path, sane_layer(0) | biases() | {name: (kind, shape, stored.tobytes())}, None, "gpt-oss"))
        experts.matrix(0, "up").refuse()
        with pytest.raises(FormatError, match=rf"blk\.0\.ffn_up_exps\[1\]: {what} is -?(?:nan|inf); expected a finite number"):
            experts.matrix(1, "up").refuse()


def test_a_dense_model(tmp_path):
    checkpoint = made(tmp_path, {"blk.0.ffn_gate.weight": f32(4, 4), "blk.0.ffn_gate_shexp.weight": f32(4, 4)})
    with pytest.raises(UnavailableError, match="no tensor of routed experts among 2: a dense model"):
        find_loader(checkpoint)


# Work that is bounded


def tiny(folder, layers):
    """A file of so many layers of one expert, with a weight each."""
    one = F32, (1, 1, 1), bytes(4)
    tensors = {f"blk.{number}.ffn_{p}_exps.weight": one for number in range(layers) for p in PROJECTIONS}
    return write(folder / f"{layers}.gguf", metadata(), tensors)


def test_a_layer_costs_the_same_in_a_long_model(tmp_path):
    """Functions are counted, those in C, too, since a test is never timed."""
    counts = []
    for layers in (100, 200):
        checkpoint = Checkpoint(tiny(tmp_path, layers))
        loader = find_loader(checkpoint)
        calls = 0

        def count(_frame, event, _argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for number in range(layers):
                loader.load(checkpoint, number)
        finally:
            sys.setprofile(None)
        counts.append(calls / layers)
    assert counts[1] < 1.01 * counts[0]


def test_too_many_layers(tmp_path, capsys):
    """Refused once, whoever asks, and not by every loader; as many as the limit are taken."""
    most = naming.LAYERS_LIMIT
    assert len(find_layers(Checkpoint(tiny(tmp_path, most)), "gguf")) == most
    path = tiny(tmp_path, most + 1)
    message = f"{path}: expected at most {most} layers with routed experts, found more"
    for ask in (
        lambda: find_loader(Checkpoint(path)),
        lambda: find_layers(Checkpoint(path), "gguf"),
        lambda: load_experts(path, 0),
        lambda: MoEModel.from_checkpoint(path, [0]),
    ):
        with pytest.raises(CheckpointError) as caught:
            ask()
        assert str(caught.value) == message
    assert cli.main(["inspect", str(path), "--no-measure"]) == 1
    assert message in capsys.readouterr().err


def test_types_that_are_not_known(tmp_path):
    """A layer of a type that ktmoe has no name for is refused by its number, wherever it comes; the others are served."""
    path = write(tmp_path / "m.gguf", metadata(), sane_layer(0) | sane_layer(1))
    stored = path.read_bytes()
    entry = f"{UP}.weight".replace("blk.0", "blk.1").encode() + struct.pack("<IQQQ", 3, HIDDEN, INTERMEDIATE, EXPERTS)
    at = stored.index(entry) + len(entry)
    path.write_bytes(stored[:at] + struct.pack("<I", 139) + stored[at + 4 :])
    assert load_experts(path, 0).formats["gate"] == GGML["Q4_0"]
    with pytest.raises(FormatError, match=r"blk\.1\.ffn_up_exps\.weight: type: expected .* found type 139 \[3, 128, 64\]"):
        load_experts(path, 1, loader="gguf")
    assert find_layers(Checkpoint(path)) == [0, 1]
    path.write_bytes(path.read_bytes().replace(b"blk.0.", b"blk.7."))
    assert find_layers(Checkpoint(path)) == [1, 7]
    assert load_experts(path, 7).name == "blk.7"
