"""ktmoe.quantize(): what it takes, what it refuses, experts that layers compute, and how far a weight can move."""

import numpy as np
import pytest
from helpers import BF16, random_batch, random_experts

import ktmoe
from ktmoe import BF16 as B16
from ktmoe import GatedActivation, Matrix, MoELayer, WeightFormat, reference
from ktmoe.errors import InputError
from ktmoe.quantization import RULES, TARGETS, Quantizer
from ktmoe.weights.elements import FP32

#: What docs/numerics.md says: of a weight's size, else of the step that is multiplied by its code; plus what saturates.
MOVES = {
    ("mxfp4", "ceil"): (1 / 5, 1 / 4),
    ("mxfp4", "modelopt"): (1 / 5, 1 / 4),
    ("mxfp4", "even"): (1 / 5, 1 / 4),
    ("mxfp4", "quark"): (1 / 5, 1 / 4),
    ("mxfp4", "floor"): (1 / 4, 1 / 4),
    ("mxfp4", "gguf"): (1 / 4, 1 / 4),
    ("mxfp4", "round"): (1 - 2**-0.5, 1 / 4),
    ("mxfp8", "ceil"): (1 / 17, 2**-10),
    ("mxfp8", "compressed-tensors"): (1 / 17, 2**-10),
    ("mxfp8", "even"): (3 / 31, 2**-10),
    ("mxfp8", "floor"): (1 / 8, 2**-10),
    ("mxfp8", "round"): (1 - 2**-0.5, 2**-10),
    ("nvfp4", "modelopt"): (1 / 5, 1 / 4),
    ("nvfp4", "compressed-tensors"): (1 / 5, 1 / 4),
    ("fp8", "up"): (1 / 17, 2**-10),
    ("fp8", "nearest"): (1 / 17, 2**-10),
    ("fp8", "transformers"): (1 / 17, 2**-10),
    ("int8", "symmetric"): (0, 1 / 2),
    ("int8", "compressed-tensors"): (0, 1),
    ("int8", "gguf"): (0, 1 / 2 + 127 * 2**-11),
    ("int4", "symmetric"): (0, 1 / 2),
    ("int4", "compressed-tensors"): (0, 1 / 2 + 2**-5),
    ("int4", "asymmetric"): (0, 0.71),
}


@pytest.mark.parametrize(("to", "rule"), MOVES)
def test_how_far_a_weight_moves(to, rule):
    """Gaussian and uniform rows, and all fractions of a largest weight: within the bound, which is nearly attained."""
    rng = np.random.default_rng(0)
    weights = np.concatenate([rng.standard_normal((256, 1024)), rng.uniform(-1, 1, (256, 1024))])
    weights[::2, ::32] = np.resize(3 + np.arange(256) / 64, (256, 32))
    powers = (-3, 4) if to == "nvfp4" or rule == "gguf" else (-60, 60)
    weights = (weights * 2.0 ** rng.integers(*powers, (512, 1))).astype(np.float32)
    in_groups = (to, rule) == ("int8", "compressed-tensors")  # whose bound is attained by weights of more than 8 bits
    format_ = WeightFormat(FP32) if in_groups else B16
    weights = weights if in_groups else weights.astype(BF16)
    group = 128 if in_groups else (1, 128) if to == "fp8" else None
    made, _ = Quantizer(to, rule=rule, group=group).matrix(Matrix("m", format_, weights.shape, weights))
    exact = weights.astype(np.float64)
    off = np.abs(reference.dequantize(made) - exact)
    scale = made.format.scale
    step = scale.spread(made.scales, *made.shape) if scale else made.factor[:, None].astype(np.float64)
    if to == "nvfp4":
        assert (step >= 2**-6).all()
        step = step / made.factor if made.format.factor.divides else step * made.factor
    of_weight, of_step = MOVES[to, rule]
    share = off / (np.maximum(of_weight * np.abs(exact), of_step * step) * (1 + 2**-16))
    assert 0.8 < share.max() <= 1


@pytest.mark.parametrize("to", TARGETS)
def test_experts_that_a_layer_computes(to):
    activation = GatedActivation(limit=3.0)
    experts = random_experts(np.random.default_rng(1), 3, 256, 128, formats=B16, biases=True, activation=activation)
    made = ktmoe.quantize(experts, to)
    assert (made.num_experts, made.hidden, made.intermediate, made.activation) == (3, 256, 128, activation)
    assert (made.name, made.router_weight) == (experts.name, experts.router_weight)
    quantizer = Quantizer(to)
    for projection in ("gate", "up", "down"):
        given, found = experts.matrix(1, projection), made.matrix(1, projection)
        wanted, error = quantizer.matrix(given)
        assert found.format == quantizer.format == made.formats[projection]
        assert all(np.array_equal(found.stored[label], array) for label, array in wanted.stored.items())
        assert np.array_equal(found.bias, given.bias)
        assert 0 < error.relative < 0.2
    batch = random_batch(np.random.default_rng(2), made, 4, 2)
    with MoELayer(made) as layer:
        assert (
            reference.forward(made, *batch, out_dtype="float32").worst(layer.forward(batch[0].astype(np.float32), *batch[1:]))
            <= 1
        )


def test_a_matrix_is_read_when_it_is_asked_for():
    experts = random_experts(np.random.default_rng(3), 2, 64, 32, formats=B16)
    asked = []

    def read(expert, projection):
        asked.append((expert, projection))
        return experts.matrix(expert, projection)

    made = ktmoe.quantize(ktmoe.ExpertWeights(2, 64, 32, read, B16), "mxfp4")
    assert not asked
    made.matrix(1, "down")
    assert asked == [(1, "down")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "int3"}, "to must be one of mxfp4, nvfp4, mxfp8, fp8, int8, int4, found 'int3'"),
        ({"to": "mxfp4", "rule": "up"}, "mxfp4: rule must be one of ceil, round, floor, .*, found 'up'"),
        ({"to": "mxfp4", "group": 16}, "group must be 32, found 16"),
        ({"to": "mxfp4", "scales": "fp16"}, "mxfp4: its scales are of one kind, found 'fp16'"),
        ({"to": "mxfp4", "symmetric": False}, "mxfp4: no rule has zero points"),
        ({"to": "int8", "symmetric": False}, "int8: no rule has zero points"),
        ({"to": "int4", "rule": "symmetric", "symmetric": False}, "int4: rule must be one of asymmetric, found 'symmetric'"),
        ({"to": "int4", "scales": "e4m3"}, "int4: scales must be one of fp32, bf16, fp16, found 'e4m3'"),
        ({"to": "int4", "group": (2, 32)}, r"group must be columns of one row, found \(2, 32\)"),
        ({"to": "int4", "group": "column"}, r"group must be 'row', a number of columns or \(rows, columns\), found 'column'"),
        ({"to": "int8", "group": 0}, "group must be 'row', a number of columns or .* found 0"),
        ({"to": "int8", "group": "matrix"}, "group must be 'row', a number of columns or .* found 'matrix'"),
        ({"to": "int8", "rule": "gguf", "group": 64}, "rule 'gguf': group must be 32, found 64"),
        ({"to": "int8", "rule": "gguf", "scales": "bf16"}, "rule 'gguf': scales must be 'fp16', found 'bf16'"),
        (
            {"to": "int4", "group": "row", "symmetric": False},
            "zero points are of groups of columns: group must be a number of columns, found 'row'",
        ),
    ],
)
def test_what_there_is_not(arguments, message):
    with pytest.raises(InputError, match=message):
        Quantizer(**arguments)


def test_what_is_no_matrix_and_no_magnitude():
    quantizer = Quantizer("nvfp4")
    for given in ("x", None):
        for take in (quantizer.matrix, quantizer.largest):
            with pytest.raises(InputError, match=rf"matrix must be a Matrix, found {given!r}; ExpertWeights\.matrix\("):
                take(given)
    matrix = random_experts(np.random.default_rng(3), 1, 64, 32, formats=B16).matrix(0, "up")
    for largest in (float("nan"), float("inf"), 1e300, -1.0, "1", [1.0]):
        with pytest.raises(InputError, match="largest must be None or a finite float32 magnitude, found"):
            quantizer.matrix(matrix, largest=largest)
    same = quantizer.largest(matrix)
    for largest in (same, np.float32(same)):
        assert quantizer.matrix(matrix, largest=largest)[1] == quantizer.matrix(matrix)[1]


def test_formats_by_their_arguments():
    made = {
        ktmoe.fp8(): Quantizer("fp8"),
        ktmoe.FP8_PER_ROW: Quantizer("fp8", group="row"),
        ktmoe.FP8_PER_MATRIX: Quantizer("fp8", group="matrix"),
        ktmoe.int8(): Quantizer("int8"),
        ktmoe.int8(128): Quantizer("int8", group=128),
        ktmoe.int8(128, "fp32", rows=128): Quantizer("int8", group=(128, 128), scales="fp32"),
        ktmoe.int4(64, "fp16"): Quantizer("int4", group=64, scales="fp16"),
        ktmoe.int4(): Quantizer("int4", group="row"),
        ktmoe.uint4(32, "bf16"): Quantizer("int4", symmetric=False),
        ktmoe.nvfp4(divides=True): Quantizer("nvfp4", rule="compressed-tensors"),
    }
    for wanted, quantizer in made.items():
        assert quantizer.format == wanted
    assert {rule.target for rule in RULES.values()} == set(TARGETS)
