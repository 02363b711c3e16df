"""How much of its bound each term of the error reaches, on each backend: never more than 1, and somewhere more than a tenth.

Terms are those of docs/numerics.md: the linear maps of gate, up and down, the activation, the sum over experts, the rounding of
y. Every second case is made to lose as much as it can (worst_cases.py); the others are random. A bound that nothing comes near
would hide mistakes.
"""

from dataclasses import replace

import numpy as np
import pytest
import ways
from exact import identity, matrix_of
from linears import random_matrix
from random_exact import layer_of, random_format
from random_layers import random_activation, random_threads
from worst_cases import FLAT, STEEP, h_of, losing, ones_and_zeros, shown_layer, sorted_rows, tied

from ktmoe import set_num_threads
from ktmoe.dequantization import dequantize
from ktmoe.reference import TINY, UNIT, Reference, activate, linear, operand, round_bfloat16
from ktmoe.reference.errors import gamma
from ktmoe.two_stage import gemm2

#: Of each backend, in make soak; of an emulated backend, which takes a hundred times as long; in any run.
TOTAL, EMULATED, LEAST = 500, 50, 10
ENOUGH = 0.1


@pytest.fixture
def subject(request):
    """The name in ways.SUBJECTS of what `backend` is."""
    return request.node.callspec.params["backend"]


def operands(rng, worst, mode):
    """A matrix of any format, and rows that it is to be multiplied by: the same row for each token, few or many."""
    shape = 2 * int(rng.integers(1, 33)), 32 * int(rng.integers(2, 6))
    matrix = random_matrix(rng, *shape, random_format(rng, mode != "bf16"))
    n, k = matrix.shape
    (row,) = dequantize(matrix, [int(rng.integers(n))], factor=False)
    x = losing(rng, row) if worst else round_bfloat16(rng.standard_normal(k))
    return matrix, np.tile(x, (int(rng.choice([1, 3, 13])), 1))


def in_bfloat16(value, eps):
    """What is expected of a number that is within eps of value, when it is rounded to bfloat16."""
    low, high = round_bfloat16(value - eps), round_bfloat16(value + eps)
    return Reference(value, np.maximum(high - value, value - low))


def gate_or_up(projection):
    """h is the error of the sum, and little else: the bias takes away what the sum is exactly."""

    def ratio(rng, worst, backend, mode):
        matrix, x = operands(rng, worst, mode)
        rows = operand(x, x, x, mode)
        with np.errstate(all="ignore"):
            total = linear(matrix, *(of[:1] for of in rows), activations=mode)[0][0]
            matrix = replace(matrix, bias=-total.astype(np.float32))
            if not np.isfinite(matrix.bias).all():
                return 0.0
            made = linear(matrix, *rows, activations=mode)
            ones = np.ones_like(made[0]), np.zeros_like(made[0])
            both = (*made, *ones) if projection == "gate" else (*ones, *made)
            value, eps = activate(FLAT if projection == "gate" else STEEP, *both)
            with shown_layer(backend, projection, matrix) as layer:
                assert layer.activations == mode
                return in_bfloat16(value, eps).worst(h_of(layer, x))

    return ratio


def activation(rng, worst, backend, mode):
    """g and u for which the result is near the middle between two bfloat16 numbers: where h is the other one than it should be,
    the error was at least the distance of the exact result from there."""
    of, g = random_activation(rng), rng.uniform(-8, 8, 128).astype(np.float32)
    with np.errstate(all="ignore"):
        u = tied(rng, of, g) if worst else rng.standard_normal(128).astype(np.float32)
        value, eps = activate(of, *(v.astype(float) for pair in ((g, 0 * g), (u, 0 * u)) for v in pair))
    with layer_of(backend, ones_and_zeros(len(g), 32, g, u), of) as layer:
        assert layer.activations == mode
        h = h_of(layer, np.zeros((1, layer.hidden)))[0]
    assert in_bfloat16(value, eps).worst(h) <= 1
    other = h != round_bfloat16(value)
    middle = (h + round_bfloat16(value)) / 2
    return float((np.abs(value - middle) / eps)[other].max(initial=0))


def down(rng, worst, backend, mode):
    """d in float32, of an h that is given; and its rounding to bfloat16."""
    matrix, h = operands(rng, worst, mode)
    with np.errstate(all="ignore"):
        value, eps = linear(matrix, *operand(h, h, h, mode), activations=mode)
    if not np.isfinite(eps).all():
        return 0.0, 0.0
    n, k = matrix.shape
    with layer_of(backend, ones_and_zeros(k, n) | {"down": [matrix]}, STEEP) as layer:
        assert layer.activations == mode
        y = gemm2(layer, *sorted_rows(h[:, None]), "float32")
        rounded = gemm2(layer, *sorted_rows(h[:, None])).astype(float)
    return Reference(value, eps).worst(y), in_bfloat16(value, eps).worst(rounded)


def sum_of_experts(rng, worst, backend, mode):
    """Each expert's d is exact, since down is an identity and h is 127 times powers of two, which all modes have: what is left
    are products with router weights, and their sum."""
    count, tokens, size = int(rng.integers(2, 9)), 3, 32
    h = np.full((tokens, count, size), 127.0) * rng.choice([-1.0, 1.0], size)
    weights = rng.standard_normal((tokens, count)).astype(np.float32)
    if worst:  # the first product is just above 128; each of the others is lost when it is added to that
        weights[:, 0], weights[:, 1:] = np.nextafter(np.float32(128 / 127), np.float32(2)), 0.999 * 128 * UNIT / 127
    else:
        h *= np.exp2(rng.integers(-2, 3, (tokens, count, 1)))
    matrices = {projection: of * count for projection, of in ones_and_zeros(size, size).items()}
    with layer_of(backend, matrices | {"down": [matrix_of("identity", *identity(size))] * count}, STEEP) as layer:
        assert layer.activations == mode
        y = gemm2(layer, *sorted_rows(h, weights), "float32")
    terms = h * weights.astype(float)[:, :, None]
    return Reference(terms.sum(axis=1), gamma(count + 1) * np.abs(terms).sum(axis=1) + (count + 1) * TINY).worst(y)


#: {terms: what gives the share of its bound that a case reaches}.
TERMS = {
    ("gate",): gate_or_up("gate"),
    ("up",): gate_or_up("up"),
    ("activation",): activation,
    ("down", "rounding of y"): down,
    ("sum of experts",): sum_of_experts,
}


@pytest.mark.cover("any backend")
def test_each_term_reaches_a_tenth_of_its_bound_and_never_more_than_it(backend, subject, is_emulated, repeat):
    reached, mode = {}, ways.SUBJECTS[subject].activations
    what = f"error as a share of its bound: {subject}{', emulated' * is_emulated}"
    for number in repeat(what, EMULATED if is_emulated else TOTAL, LEAST):
        for at, (labels, of) in enumerate(TERMS.items()):
            rng = np.random.default_rng((number, at, 4))
            set_num_threads(random_threads(rng))
            for label, ratio in zip(labels, np.atleast_1d(of(rng, number % 2 == 0, backend, mode)), strict=True):
                assert ratio <= 1, f"case {number}: error of {label} is {ratio:.3g} of its bound"
                reached[label] = max(float(ratio), reached.get(label, 0.0))
                repeat.most(label, float(ratio))
    assert min(reached.values()) > ENOUGH, reached
