"""From a GGUF file to an output: layers, models, KTMoEWrapper, what `ktmoe inspect` says, and the files that tests make."""

import json
import math

import numpy as np
import pytest
from gguf_files import F32, Q1_0, Q4_0, Q8_0, layer, metadata, records, write
from helpers import assert_right, random_batch, same_bits
from kt_wrappers import REVERSED, batch, wrapper

import ktmoe
from ktmoe import MoELayer, MoEModel, cli, load_experts
from ktmoe.dequantization import dequantize
from ktmoe.errors import FormatError, InputError, UnavailableError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.synthetic.gguf import GGUF, MIXED, gguf_experts, write_gguf
from ktmoe.weights.ggml import GGML

SIZES = {"num_experts": 4, "hidden": 512, "intermediate": 256}


@pytest.mark.cover("values")
@pytest.mark.parametrize("types", GGML)
def test_an_output(backend, tmp_path, types):
    """Of layer 1, whose tensors are in another file than layer 0's."""
    write_gguf(tmp_path, types=types, **SIZES, layers=2, splits=2)
    experts = load_experts(tmp_path, 1)
    rng = np.random.default_rng(1)
    with MoELayer.from_checkpoint(tmp_path, 1, backend) as made:
        for tokens in (1, 9):
            assert_right(made, experts, *random_batch(rng, experts, tokens, 2))


def test_a_model(tmp_path):
    """All layers, the threads of a load beside each other; and an expert's records come back as they are in the file."""
    write_gguf(tmp_path, types="Q8_0", **SIZES, layers=3, splits=2)
    with MoEModel.from_checkpoint(tmp_path) as model, Checkpoint(tmp_path) as checkpoint:
        assert list(model) == [0, 1, 2]
        (part,) = model[2].export_expert(3)
        for projection in PROJECTIONS:
            stored = checkpoint.read(f"blk.2.ffn_{projection}_exps.weight")
            assert part[projection].codes.tobytes() == stored[3 * len(stored) // 4 :].tobytes()


def test_biases_and_factors(tmp_path):
    """In the sums of a layer, as the reference has them."""
    kinds = {"gate": F32, "up": F32, "down": F32}
    rng = np.random.default_rng(2)
    tensors = {}
    for name, (kind, shape, _) in layer(0, kinds, 3, 32, 64).items():
        stem = name.removesuffix(".weight")
        tensors[name] = kind, shape, rng.normal(0, shape[2] ** -0.5, shape).astype(np.float32).tobytes()
        tensors[f"{stem}.bias"] = F32, shape[:2], rng.normal(size=shape[:2]).astype(np.float32).tobytes()
        tensors[f"{stem}.scale"] = F32, (3,), np.float32([0.5, 0.7, 1.9]).tobytes()
    write(tmp_path / "m.gguf", metadata("gpt-oss"), tensors)
    experts = load_experts(tmp_path / "m.gguf", 0)
    assert experts.activation.up_offset == 1
    with MoELayer(experts) as made:
        assert_right(made, experts, *random_batch(rng, experts, 5, 2))


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("of_file", [False, True])
def test_the_wrapper(tmp_path, of_file):
    """kt-kernel's method LLAMAFILE takes a folder or a file; it exports nothing, and takes no other checkpoint's types."""
    write_gguf(tmp_path, types="Q4_0", num_experts=8, hidden=128, intermediate=256, layers=2)
    place = tmp_path / "model.gguf" if of_file else tmp_path
    experts, (x, ids, weights) = load_experts(place, 1), batch()
    with wrapper(place, 1, method="LLAMAFILE", moe_intermediate_size=256) as w, MoELayer(experts) as made:
        assert_right(made, experts, x, ids, weights, w.forward(x, ids, weights))
        with pytest.raises(UnavailableError, match="no buffers for GPUs that take these weights of method 'LLAMAFILE'"):
            w.submit_write_weight_scale_to_buffer(1, 0, [1], [1], [1], [1])
        w.load_weights(REVERSED)
        assert_right(made, experts, x, REVERSED[ids], weights, w.forward(x, ids, weights))


def test_a_layer_of_another_type(tmp_path, capsys):
    """MoEModel, packing and converting name it, and say how to take the others; then they do."""
    kinds, shape = {"gate": Q8_0, "up": Q8_0, "down": Q8_0}, (2, 512, 256)
    tensors = {name: tensor for number in range(4) for name, tensor in layer(number, kinds).items()}
    tensors = {name: (kind, s, bytes(len(data))) for name, (kind, s, data) in tensors.items()}  # numbers that are finite
    path = write(
        tmp_path / "m.gguf", metadata(), tensors | {"blk.2.ffn_up_exps.weight": (Q1_0, shape, records(0, Q1_0, shape))}
    )
    words = r"blk\.2\.ffn_up_exps\.weight: type: expected .*; the other layers can be read: pass layers=, or --layers 0-1,3"
    with pytest.raises(FormatError, match=words):
        MoEModel.from_checkpoint(path)
    with MoEModel.from_checkpoint(path, [0, 1, 3]) as model:
        assert list(model) == [0, 1, 3]
    with pytest.raises(FormatError, match=r"found Q1_0 \[2, 512, 256\]$"):  # which was asked for
        MoEModel.from_checkpoint(path, [0, 2])
    assert cli.main(["pack", str(path), str(tmp_path / "cache")]) == 1
    assert "or --layers 0-1,3 to a command" in capsys.readouterr().err
    assert cli.main(["pack", str(path), str(tmp_path / "cache"), "--layers", "0-1,3"]) == 0


def test_inspect(tmp_path, capsys):
    """Layers by their types; a type that cannot be computed is named once for all layers that have it."""
    kinds = {"gate": Q4_0, "up": Q4_0, "down": Q8_0}
    tensors = layer(0, kinds) | layer(1, kinds)
    for number in (2, 3):
        shape = (2, 512, 256)
        tensors |= layer(number, kinds) | {f"blk.{number}.ffn_up_exps.weight": (Q1_0, shape, records(0, Q1_0, shape))}
    write(tmp_path / "m.gguf", metadata(expert_used_count=1, block_count=4), tensors)
    assert cli.main(["inspect", str(tmp_path), "--no-measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["loader"], found["tensors"], found["top_k"]) == ("gguf", 12, 1)
    (group,) = found["groups"]
    assert (group["layers"], group["experts"], group["hidden"], group["intermediate"]) == ([0, 1], 2, 256, 512)
    assert group["projections"]["down"]["format"] == "INT8 with fp16 scales per 1x32, in Q8_0 records"
    (refused,) = found["not_served"]
    assert refused["layers"] == [2, 3]
    assert "blk.2.ffn_up_exps.weight: type: expected one of Q4_0, " in refused["reason"]
    assert "found Q1_0 [2, 512, 256]" in refused["reason"]


# ktmoe.synthetic


@pytest.mark.parametrize("types", [*GGML, *MIXED])
def test_what_is_made(tmp_path, types):
    """In memory it is what loads; weights of the usual size, all of them finite."""
    write_gguf(tmp_path, types=types, **SIZES, layers=2, seed=3, top_k=2, splits=2)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config["num_experts_per_tok"] == 2
    loaded, made = find_loader(checkpoint).load(checkpoint, 0), gguf_experts(types=types, **SIZES, seed=3)
    assert (made.name, made.formats["gate"], made.activation) == (loaded.name, loaded.formats["gate"], loaded.activation)
    for projection in ("gate", "up"):
        one, other = loaded.matrix(1, projection), made.matrix(1, projection)
        for label, array in one.stored.items():
            assert array.tobytes() == other.stored[label].tobytes()
        one.refuse()
        values = dequantize(one)
        assert 0.6 < values.std() * math.sqrt(values.shape[1]) < 1.6
        assert abs(values.mean()) < 0.2 * values.std()
    assert not same_bits(loaded.matrix(0, "up").codes, loaded.matrix(1, "up").codes)


def test_mixed_types(tmp_path):
    """Q4_K_M's better type is at both ends and at every third layer between, as llama.cpp chooses."""
    write_gguf(tmp_path, num_experts=1, hidden=256, intermediate=256, layers=16)
    with Checkpoint(tmp_path) as checkpoint:
        types = {name: checkpoint.info(name).dtype for name in checkpoint.names()}
    better = [int(name.split(".")[1]) for name, kind in types.items() if kind == "Q6_K"]
    assert better == [0, 1, 4, 7, 10, 13, 14, 15]
    assert {kind for name, kind in types.items() if "down" not in name} == {"Q4_K"}


def test_what_cannot_be_made(tmp_path):
    for given, message in (
        ({"types": "Q1_0"}, "types: expected one of Q4_K_M, .*, found 'Q1_0'"),
        ({"hidden": 128}, "hidden: expected a positive multiple of 256, found 128"),
        ({"splits": 0}, "splits: expected a positive multiple of 1, found 0"),
    ):
        with pytest.raises(InputError, match=message):
            write_gguf(tmp_path, **SIZES | given)
    write_gguf(tmp_path, **SIZES)
    with pytest.raises(InputError, match=r"expected a folder without a model, found model\.gguf"):
        write_gguf(tmp_path, **SIZES)


def test_nothing_is_left_of_a_model_that_is_not_whole(tmp_path, monkeypatch):
    calls = iter(range(3))
    monkeypatch.setattr("ktmoe.synthetic.gguf.GgufTensor.read", lambda *_: np.zeros(8, np.uint8) if next(calls) < 2 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_gguf(tmp_path, **SIZES, splits=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", GGUF)
def test_published(name):
    """Of the benches: all projections are of one type."""
    experts = GGUF[name].experts(num_experts=1, hidden=256, intermediate=256)
    assert set(experts.formats.values()) == {GGML[name.removeprefix("GGUF ")]}
    assert isinstance(experts, ktmoe.ExpertWeights)
