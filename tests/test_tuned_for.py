"""tuned_for: which kernels serve then, that a batch changes no bit of either, and that all entrances take it."""

import json

import numpy as np
import pytest
from helpers import BF16, GROUPS, KINDS, LONGEST, assert_right, random_batch, random_experts, reading, same_bits, unsigned

from ktmoe import MXFP4, MoELayer, MoEModel, Scale, WeightFormat, cli, int4, reference, synthetic
from ktmoe._native import core
from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS
from ktmoe.weights.elements import E2M1, INT4, Element

OTHERS = Element("others", "q4", (0.0, 7.0, -7.0, 12.0, 1.75, -0.75, *INT4.values[1:11]))
#: Formats whose weights may be sums of two bfloat16 numbers, and the least exponent fields of their scales.
SPLIT = {
    **{f"int4-{group}": (int4(group), 1) for group in GROUPS},
    "e2m1": (WeightFormat(E2M1, Scale("bf16", (1, 32))), 2),
    "others": (WeightFormat(OTHERS, LONGEST.scale), 3),
}
HIGH = 251  # the greatest
#: The formats whose weights may not.
WHOLE = {
    "13 = 8 + 4 + 1": WeightFormat(Element("13", "q4", (13.0, *INT4.values[1:])), Scale("bf16", (1, 32))),
    "16": WeightFormat(Element("16", "q4", (16.0, *INT4.values[1:])), Scale("bf16", (1, 32))),
    "fp16 scales": int4(32, "fp16"),
}


def keys(experts):
    return [(expert, projection) for expert in range(experts.num_experts) for projection in PROJECTIONS]


def splits(layer, tuned_for="prefill"):
    """Whether a layer made for this has kernels for two numbers a weight."""
    return tuned_for == "prefill" and layer.backend == "amx" and layer.activations == "bf16"


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("tuned_for", ["decode", "prefill"])
def test_a_batch_changes_no_bit(backend, name, tuned_for):
    experts = unsigned(random_experts(np.random.default_rng(3), 3, 160, 96, formats=SPLIT[name][0], biases=True))
    with MoELayer(experts, backend, tuned_for=tuned_for) as layer:
        assert layer.tuned_for == tuned_for
        assert layer.rounding == "exact"
        assert core.folded(layer.packed) == dict.fromkeys(keys(experts), 2 * splits(layer, tuned_for))
        x, ids, weights = random_batch(np.random.default_rng(4), experts, 90, 2)
        y = assert_right(layer, experts, x, ids, weights)
        for token in range(0, 90, 7):
            assert same_bits(layer.forward(x[[token]], ids[[token]], weights[[token]]), y[[token]])


@pytest.mark.parametrize("name", [*KINDS, *WHOLE])
def test_other_weights_have_the_same_bits_either_way(backend, name):
    weights = {"formats": WHOLE[name]} if name in WHOLE else KINDS[name]
    experts = random_experts(np.random.default_rng(1), 2, 160, 100, **weights)
    if name in WHOLE:
        experts = unsigned(experts)
    batch = random_batch(np.random.default_rng(2), experts, 20, 2)
    with MoELayer(experts, backend) as decode, MoELayer(experts, backend, tuned_for="prefill") as prefill:
        assert core.folded(decode.packed) == core.folded(prefill.packed)
        assert same_bits(decode.forward(*batch), prefill.forward(*batch))


def put_scale(experts, key, bits):
    """Makes one scale of the matrix `key`, the last."""
    experts.matrix(*key).scales[-1, -1] = np.array(bits, np.uint16).view(BF16)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("name", ["int4-32", "e2m1"])
@pytest.mark.parametrize("which", ["zero", "minus zero", "denormal", "below", "least", "greatest", "above", "negative"])
def test_one_scale_decides_for_its_matrix(backend, name, which, projection):
    """All others are sums of two as if it were not there: the order of sums is the matrix's own."""
    weight_format, least = SPLIT[name]
    bits = {
        "zero": 0,
        "minus zero": 0x8000,
        "denormal": 1,
        "below": (least - 1 << 7) + 127,
        "least": least << 7,
        "greatest": (HIGH << 7) + 127,
        "above": HIGH + 1 << 7,
        "negative": 0x8000 | 120 << 7,
    }[which]
    signed = random_experts(np.random.default_rng(5), 2, 64, 96, formats=weight_format)
    for key in keys(signed):
        np.abs(signed.matrix(*key).scales, out=signed.matrix(*key).scales)
    put_scale(signed, (1, projection), bits)
    expected = {key: reference.splits(signed.matrix(*key)) for key in keys(signed)}
    assert expected == {key: key != (1, projection) or which in ("zero", "least", "greatest") for key in keys(signed)}
    with MoELayer(signed, backend, tuned_for="prefill") as layer:
        assert core.folded(layer.packed) == {key: 2 * (split and splits(layer)) for key, split in expected.items()}
        if which not in ("greatest", "above"):  # where a sum might overflow
            assert_right(layer, signed, *random_batch(np.random.default_rng(6), signed, 20, 2))


def test_matrices_that_split_beside_others(backend):
    experts = random_experts(np.random.default_rng(7), 3, 160, 96, formats=int4(64), biases=True)
    some = [(0, "gate"), (1, "up"), (1, "down"), (2, "gate"), (2, "up")]
    experts = unsigned(experts, some)
    with MoELayer(experts, backend, tuned_for="prefill") as layer:
        assert core.folded(layer.packed) == {key: 2 * (key in some and splits(layer)) for key in keys(experts)}
        for tokens in (1, 40):
            assert_right(layer, experts, *random_batch(np.random.default_rng(8), experts, tokens, 2))


def test_weights_that_may_be_rounded_are(backend):
    """rounding="folded" has one number a weight, which is faster than two."""
    experts = unsigned(random_experts(np.random.default_rng(9), 1, 64, 96, formats=int4(32)))
    with MoELayer(experts, backend, rounding="folded", tuned_for="prefill") as layer:
        assert set(core.folded(layer.packed).values()) == {int(splits(layer))}
        assert_right(layer, experts, *random_batch(np.random.default_rng(10), experts, 20, 1))


def test_replaced_experts_are_tuned_alike(backend):
    experts = unsigned(random_experts(np.random.default_rng(12), 2, 64, 96, formats=int4(32)))
    other = random_experts(np.random.default_rng(13), 2, 64, 96, formats=int4(32))
    with MoELayer(experts, backend, tuned_for="prefill") as layer:
        layer.replace_expert(0, {projection: other.matrix(0, projection) for projection in PROJECTIONS})
        assert core.folded(layer.packed) == {key: 2 * (key[0] == 1 and splits(layer)) for key in keys(experts)}
        mixed = reading(experts, lambda e, p: (other if e == 0 else experts).matrix(e, p))
        assert_right(layer, mixed, *random_batch(np.random.default_rng(14), experts, 20, 2))


@pytest.mark.parametrize("wrong", ["", "both", 1])
def test_what_is_no_choice(wrong):
    experts = random_experts(np.random.default_rng(15), 1, 32, 32, formats=MXFP4)
    with pytest.raises(InputError, match=r"tuned_for must be one of \('decode', 'prefill'\), found"):
        MoELayer(experts, tuned_for=wrong)
    with pytest.raises(InputError, match=r"tuned_for must be one of \('decode', 'prefill'\), found"):
        reference.forward(experts, *random_batch(np.random.default_rng(16), experts, 1, 1), tuned_for=wrong)


# entrances


def test_layers_and_models_of_checkpoints(tmp_path):
    synthetic.write_deepseek_v4(tmp_path, num_experts=3, hidden=64, intermediate=32, layers=2)
    for given in ({}, {"tuned_for": "decode"}, {"tuned_for": "prefill"}):
        with MoELayer.from_checkpoint(tmp_path, 1, **given) as layer, MoEModel.from_checkpoint(tmp_path, **given) as model:
            assert {layer.tuned_for, model[0].tuned_for, model[1].tuned_for} == {given.get("tuned_for", "decode")}
    with pytest.raises(InputError, match="tuned_for must be one of"):
        MoELayer.from_checkpoint(tmp_path, 1, tuned_for="chat")
    with pytest.raises(InputError, match="tuned_for must be one of"):
        MoEModel.from_checkpoint(tmp_path, tuned_for="chat")


@pytest.mark.usefixtures("limits_at_once")
def test_commands(tmp_path, capsys, monkeypatch):
    synthetic.write_deepseek_v4(tmp_path, num_experts=8, hidden=64, intermediate=32, layers=1)
    monkeypatch.setattr("ktmoe.cli.bench.DECODE", (1,))
    monkeypatch.setattr("ktmoe.cli.bench.PREFILL", ())
    assert cli.main(["bench", str(tmp_path), "--top-k", "2", "--seconds", "0", "--tuned-for", "prefill", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layer"]["tuned_for"] == "prefill"
    loaded, load = [], MoEModel.from_checkpoint

    def spy(*arguments, **given):
        loaded.append(given["tuned_for"])
        return load(*arguments, **given)

    monkeypatch.setattr(MoEModel, "from_checkpoint", spy)
    for given in ([], ["--tuned-for", "prefill"]):
        assert cli.main(["load", str(tmp_path), *given]) == 0
    assert loaded == ["decode", "prefill"]
    for command in ("bench", "load", "chat", "serve"):
        assert cli.main([command, str(tmp_path), "--tuned-for", "both"]) == 2
