"""rounding="folded": who rounds weights then, which, and that nothing else changes. test_exact.py has to which numbers."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import (
    BF16,
    GROUPS,
    KINDS,
    MIXED,
    WEIGHTS,
    assert_right,
    crowd,
    folds,
    random_batch,
    random_experts,
    rounds,
    same_bits,
)

from ktmoe import ExpertWeights, MoELayer, Scale, WeightFormat, int4
from ktmoe._native import core
from ktmoe.experts import PROJECTIONS
from ktmoe.weights.elements import E2M1

#: The exponent fields of scales that INT4's codes allow to fold; see folding.py.
LOW, HIGH = 1, 249


def may_round(weight_format):
    """Whether a format's weights may be rounded: 4-bit values times bfloat16 or fp16 scales, and no zero points."""
    scale = weight_format.scale
    return weight_format.family == "q4" and scale is not None and scale.kind in ("bf16", "fp16") and not weight_format.offset


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", [*KINDS, "int4-32", "gptq-sym-128", "fp8-bf16", *MIXED])
def test_who_rounds(backend, name):
    """Every matrix with bfloat16 or fp16 scales, where a backend can: the others are as they are in any case."""
    weights = {**WEIGHTS, **MIXED}[name]
    experts = random_experts(np.random.default_rng(1), 2, 160, 100, biases=True, **weights)
    batches = [random_batch(np.random.default_rng(2), experts, tokens, 2) for tokens in (1, 20)]
    with MoELayer(experts, backend) as layer:
        assert layer.rounding == "exact"
        exact, kernels = [assert_right(layer, experts, *batch) for batch in batches], core.folded(layer.packed)
    with MoELayer(experts, backend, rounding="folded") as layer:
        rounded = {p for p, weight_format in experts.formats.items() if may_round(weight_format) and rounds(layer)}
        assert layer.rounding == ("folded" if rounded else "exact")
        assert core.folded(layer.packed) == {key: folded or key[1] in rounded for key, folded in kernels.items()}
        folded = [assert_right(layer, experts, *batch) for batch in batches]
        for old, new in zip(exact, folded, strict=True):
            assert same_bits(old, new) == (not rounded)


@pytest.mark.cover("values")
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("group", GROUPS)
def test_a_batch_changes_no_bit(backend, group, kind):
    """Of a layer that rounds."""
    experts = random_experts(np.random.default_rng(3), 3, 160, 96, formats=int4(group, kind))
    with MoELayer(experts, backend, rounding="folded") as layer:
        x, ids, weights = random_batch(np.random.default_rng(4), experts, 60, 2)
        y = assert_right(layer, experts, x, ids, weights)
        for token in range(0, 60, 7):
            assert same_bits(layer.forward(x[[token]], ids[[token]], weights[[token]]), y[[token]])


def put_scale(experts, key, field):
    """Makes one scale of the matrix `key`, the last, a power of two of that exponent field; of field 0 the least of all."""
    matrix = experts.matrix(*key)
    matrix.scales[-1, -1] = np.array(field << 7 or 1, np.uint16).view(BF16)
    assert experts.matrix(*key).scales[-1, -1] == matrix.scales[-1, -1] > 0


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("field", [0, LOW, HIGH, HIGH + 1, 254])
def test_one_scale_decides_for_its_matrix(backend, projection, field):
    """All others are rounded as if it were not there."""
    key = (1, projection)
    experts = random_experts(np.random.default_rng(5), 2, 64, 96, formats=int4(32))
    put_scale(experts, key, field)
    with MoELayer(experts, backend, rounding="folded") as layer:
        expected = dict.fromkeys([(e, p) for e in range(2) for p in PROJECTIONS], rounds(layer))
        expected[key] &= LOW <= field <= HIGH
        assert core.folded(layer.packed) == expected
        assert layer.rounding == ("folded" if rounds(layer) else "exact")
        if field <= LOW:  # a sum might overflow else
            assert_right(layer, experts, *random_batch(np.random.default_rng(6), experts, 20, 2))


def test_every_fp16_scale_may_fold(backend):
    """The least, the greatest and zero: no product leaves bfloat16's normal range. One matrix has them all."""
    experts = random_experts(np.random.default_rng(9), 1, 64, 96, formats=int4(32, "fp16"))
    scales = experts.matrix(0, "up").scales
    scales[:4, 0] = np.array([0x0001, 0x7BFF, 0x8000, 0xFBFF], np.uint16).view(np.float16)
    with MoELayer(experts, backend, rounding="folded") as layer:
        assert set(core.folded(layer.packed).values()) == {rounds(layer)}
        assert_right(layer, experts, *random_batch(np.random.default_rng(10), experts, 20, 1))


def test_a_layer_beyond_the_rule_is_exact(backend):
    """One scale too small in every matrix: bit for bit what it is if nothing may be rounded."""
    experts = random_experts(np.random.default_rng(7), 1, 64, 64, formats=int4(64))
    for projection in PROJECTIONS:
        put_scale(experts, (0, projection), 0)
    with MoELayer(experts, backend) as exact, MoELayer(experts, backend, rounding="folded") as layer:
        assert layer.rounding == "exact"
        assert not any(core.folded(layer.packed).values())
        assert same_bits(layer.forward(*crowd(layer, 20)), exact.forward(*crowd(layer, 20)))


def test_powers_of_two_of_either_kind(backend):
    """MXFP4's numbers with scales that are bfloat16: folded, they have MXFP4's bits where that is folded, too."""
    bytes_ = random_experts(np.random.default_rng(8), 1, 128, 96)
    weight_format = WeightFormat(E2M1, Scale("bf16", (1, 32)))

    def read(*key):
        matrix = bytes_.matrix(*key)
        return replace(matrix, format=weight_format, scales=np.ldexp(1.0, matrix.scales.astype(int) - 127).astype(BF16))

    numbers = ExpertWeights(1, 128, 96, read, dict.fromkeys(PROJECTIONS, weight_format))
    with MoELayer(bytes_, backend, "bf16") as layer, MoELayer(numbers, backend, "bf16", rounding="folded") as other:
        assert other.rounding == ("folded" if rounds(other) else "exact")
        for tokens in (3, 40):
            y = assert_right(other, numbers, *crowd(other, tokens))
            if folds(layer) == rounds(other):
                assert same_bits(y, layer.forward(*crowd(layer, tokens)))
