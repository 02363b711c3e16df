"""Random layers, dense matrices and training beside float64: every number is within its bound, whatever is asked for.

What is random: formats, GGUF's among them, sizes, scales of any exponent, biases, activation, mode, rounding, tuned_for,
shards, masks, router weights, batches.
"""

import contextlib

import numpy as np
import pytest
import ways
from helpers import BF16, SCALES, same_bits, settings_of
from linears import DENSE_FORMATS, expected, expected_gradient, random_matrix
from random_layers import (
    POOL,
    RandomLayer,
    experts_of,
    one_of,
    random_activation,
    random_layer,
    random_mode,
    random_size,
    random_threads,
    random_tokens,
    random_tuning,
)
from simulated_training import Lora
from trained import compared, training_batch

from ktmoe import Linear, LinearGroup, quantize, reference, set_num_threads
from ktmoe._native import core
from ktmoe.experts import PROJECTIONS
from ktmoe.quantization import RULES
from ktmoe.reference.moe import ROUNDING, TUNED_FOR
from ktmoe.two_stage import gemm1, gemm2, moe_sorting

pytestmark = [pytest.mark.usefixtures("three_nodes"), pytest.mark.cover("any backend")]
#: Cases that have a layer in common, which is packed once.
AT_ONCE = 4
#: Of an emulated backend, which takes a hundred times as long, one case of so many.
EMULATED = 50
BF16_SUBJECTS = [name for name, subject in ways.SUBJECTS.items() if subject.activations == "bf16"]


@pytest.fixture
def of_integers(request):
    """Whether the backend's mode is one of integers."""
    return ways.SUBJECTS[request.node.callspec.params["backend"]].activations != "bf16"


@pytest.fixture
def cases(request, repeat, is_emulated):
    """cases(what, total, make): (what make gave, a generator) of each case of this backend. make takes a generator and returns
    a tuple, whose first is to be closed; it is asked once for AT_ONCE cases."""
    backend = request.node.callspec.params["backend"]
    with contextlib.ExitStack() as stack:

        def of(what, total, make):
            what = f"{what} beside float64: {backend}{', emulated' * is_emulated}"
            for number in repeat(what, total // EMULATED if is_emulated else total):
                rng = np.random.default_rng((number, 1))
                if number % AT_ONCE == 0:
                    stack.close()
                    made = make(np.random.default_rng(number))
                    stack.callback(made[0].close)
                    set_num_threads(random_threads(rng))
                yield *made, rng

        yield of


def within(repeat, label, wanted, actual, extreme=False):
    """The error is within the bound, and there is one; extreme scales may leave float32."""
    assert extreme or np.isfinite(wanted.bound).all()
    worst = wanted.worst(actual)
    repeat.most(label, worst)
    assert worst <= 1, f"error of {label} is {worst:.3g} of its bound"


def check_forward(repeat, made, layer, rng, known=False):
    """forward() of a random batch, mask and tuning; returns the batch and y. known: all ids are of experts."""
    x, ids, weights = random_tokens(rng, made, int(rng.integers(1, 21)), np.float32 if rng.integers(4) else BF16)
    batch = x, np.clip(ids, 0, layer.num_experts - 1) if known else ids, weights
    core.tune(**random_tuning(rng))
    layer.expert_mask[:] = rng.integers(4, size=layer.num_experts) > 0
    y = layer.forward(*batch)
    settings = settings_of(layer, made.experts, batch[0].dtype)
    wanted = reference.forward(made.experts, *batch, expert_mask=layer.expert_mask, **settings)
    within(repeat, f"y in {y.dtype}", wanted, y, made.extreme)
    return batch, y


def test_layers(backend, of_integers, cases, repeat):
    def make(rng):
        made = random_layer(rng, integers=of_integers)
        return made.made(backend), made

    for layer, made, rng in cases("layers", 1000, make):
        check_forward(repeat, made, layer, rng)


def test_two_stages(backend, of_integers, cases, repeat):
    """gemm1() and gemm2() have the bits of forward(), which is within the bound."""

    def make(rng):
        made = random_layer(rng, integers=of_integers)
        while made.experts.intermediate % 2:  # a row of h in MXFP4 is a whole number of bytes
            made = random_layer(rng, integers=of_integers)
        return made.made(backend, numa_nodes=[0]), made

    for layer, made, rng in cases("two stages", 200, make):
        (x, ids, weights), y = check_forward(repeat, made, layer, rng, known=True)
        sorting = moe_sorting(ids.astype(np.int32), weights, layer.num_experts, one_of(rng, (16, 32, 64)), layer.expert_mask)
        dtype = "float32" if y.dtype == np.float32 else "bfloat16"
        assert same_bits(gemm2(layer, gemm1(layer, x, sorting), sorting, dtype), y)


def test_quantized_layers(backend, of_integers, cases, repeat):
    """Experts that are rounded by any rule to any format, and then computed: within the bound of what they were rounded to."""
    sources = [weight_format for weight_format in POOL.values() if weight_format.family in ("b16", "f8", "f32")]

    def make(rng):
        rule, formats = one_of(rng, list(RULES.values())), dict.fromkeys(PROJECTIONS, one_of(rng, sources))
        sizes = 64 * rng.integers(1, 4, 2)
        experts = experts_of(rng, formats, 2, *map(int, sizes), SCALES, SCALES, True, random_activation(rng))
        made = RandomLayer(quantize(experts, rule.target, rule=rule.name), {"activations": random_mode(rng, of_integers)})
        return made.made(backend), made

    for layer, made, rng in cases("quantized layers", 200, make):
        check_forward(repeat, made, layer, rng)


def random_linears(rng, backend, mode, count):
    """Linears that take the same x, and their matrices, of any formats; those that are not in the first one's mode are left
    out."""
    k, matrices, linears = random_size(rng), [], []
    for _ in range(count):
        matrix = random_matrix(rng, random_size(rng), k, one_of(rng, list(DENSE_FORMATS.values())), bias=bool(rng.integers(2)))
        if linears and matrix.shape[1] != k:
            continue
        nodes = [0, 1] if matrix.shape[0] > 128 and rng.integers(3) == 0 else [0]
        how = {"rounding": one_of(rng, ROUNDING), "tuned_for": one_of(rng, TUNED_FOR), "numa_nodes": nodes}
        linear = Linear(matrix, backend, mode, **how)
        if linears and linear.activations != linears[0].activations:
            linear.close()
            continue
        k = matrix.shape[1]
        matrices.append(matrix)
        linears.append(linear)
    return linears, matrices


def test_dense_matrices(backend, of_integers, cases, repeat):
    """By themselves, or several that are computed at once of the same x."""

    def make(rng):
        linears, matrices = random_linears(rng, backend, random_mode(rng, of_integers), int(rng.integers(1, 4)))
        return LinearGroup(linears), linears, matrices

    for group, linears, matrices, rng in cases("dense matrices", 600, make):
        core.tune(**random_tuning(rng))
        dtype = np.float32 if rng.integers(3) else BF16
        x = (rng.standard_normal((rng.integers(1, 21), matrices[0].shape[1])) * np.exp2(rng.integers(-6, 3))).astype(dtype)
        for linear, matrix, y in zip(linears, matrices, group.forward(x), strict=True):
            within(repeat, f"y in {y.dtype}", expected(linear, matrix, x, y.dtype), y)


@pytest.mark.parametrize("backend", BF16_SUBJECTS, indirect=True)
def test_gradients_of_dense_matrices(backend, cases, repeat):
    """Of one matrix, or the sum over several that take the same x."""

    def make(rng):
        linears, matrices = random_linears(rng, backend, "bf16", int(rng.integers(1, 4)))
        return LinearGroup(linears), linears, matrices

    for group, linears, matrices, rng in cases("gradients of dense matrices", 500, make):
        dtype, tokens = np.float32 if rng.integers(3) else BF16, int(rng.integers(1, 21))
        grads = [rng.standard_normal((tokens, matrix.shape[0])).astype(dtype) for matrix in matrices]
        if len(group.dispatches) == 1:  # else each set of nodes has a sum
            found = group.backward(grads)
            within(repeat, f"dX in {found.dtype}", expected_gradient(linears, matrices, grads, found.dtype), found)
        found = linears[0].backward(grads[0])
        within(repeat, f"dX in {found.dtype}", expected_gradient(linears[:1], matrices[:1], grads[:1], found.dtype), found)


@pytest.mark.parametrize("backend", BF16_SUBJECTS, indirect=True)
def test_training(backend, cases, repeat):
    """Both passes, with an adapter of any of the projections or none."""

    def make(rng):
        made = random_layer(rng, mode="bf16")
        projections = [projection for projection in PROJECTIONS if rng.integers(3)]
        kinds = {"rank": int(rng.integers(1, 20)), "dtype": one_of(rng, (np.float32, BF16))}
        lora = Lora(rng, made.experts, projections=projections, **kinds) if projections else None
        return made.made(backend), made, lora

    for layer, made, lora, rng in cases("training", 500, make):
        dtype = np.float32 if rng.integers(2) else BF16
        x, ids, weights, grad_y = training_batch(rng, made.experts, int(rng.integers(1, 9)), 2, dtype)
        batch = (x.astype(np.float64) * made.x).astype(dtype), ids, (weights * made.weights).astype(np.float32), grad_y
        layer.expert_mask[:] = rng.integers(4, size=layer.num_experts) > 0
        options = {"scale": float(one_of(rng, (1.0, 0.5))), "again": bool(rng.integers(2))}
        for name, (wanted, found) in compared(layer, made.experts, *batch, lora, **options)[2].items():
            within(repeat, name, wanted, found, made.extreme)
