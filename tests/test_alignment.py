"""Arrays whose items are not aligned in memory: inputs are copied, and what cannot be copied is refused. C promises nothing for
them, and native code refuses them, so a call that gives the same bits has copied them."""

import numpy as np
import pytest
from helpers import BF16, KINDS, TURNED, WEIGHTS, random_batch, random_experts, reading, same_bits, unaligned

from ktmoe import Matrix, MoELayer, quantize, two_stage
from ktmoe.errors import FormatError, InputError
from ktmoe.experts import PROJECTIONS
from ktmoe.training import Lora, Training
from ktmoe.two_stage import gemm1, gemm2, moe_sorting

FORMATS = WEIGHTS | {name: {"formats": weight_format} for name, weight_format in TURNED.items()}


def moved(matrix: Matrix) -> Matrix:
    stored = {label: unaligned(array) for label, array in matrix.stored.items()}
    bias = None if matrix.bias is None else unaligned(matrix.bias)
    return Matrix(matrix.name, matrix.format, matrix.shape, bias=bias, **stored)


def moved_experts(experts):
    return reading(experts, lambda expert, projection: moved(experts.matrix(expert, projection)))


@pytest.fixture(scope="module")
def layer():
    with MoELayer(random_experts(np.random.default_rng(1), 4, 96, 64, biases=True), activations="bf16") as made:
        yield made


def batch(layer, dtype=BF16):
    return random_batch(np.random.default_rng(2), layer, 5, 2, dtype)


@pytest.mark.parametrize("dtype", [BF16, np.uint16, np.float32], ids=str)
def test_forward(layer, dtype):
    given = list(batch(layer, BF16 if dtype == np.uint16 else dtype))
    given[0] = given[0].view(dtype)
    expected = layer.forward(*given)
    for which in ({0}, {1}, {2}, {0, 1, 2}):
        arguments = [unaligned(array) if i in which else array for i, array in enumerate(given)]
        assert same_bits(layer.forward(*arguments), expected)
        assert same_bits(layer.submit(*arguments).result(), expected)
    out = unaligned(expected)
    for call in (lambda: layer.forward(*given, out=out), lambda: layer.submit(*given, out=out).result()):
        with pytest.raises(InputError, match=r"out must be C-contiguous, aligned and writeable; found .* aligned False, wr"):
            call()
    none = unaligned(np.zeros((0, layer.hidden), dtype))
    assert layer.forward(none, np.zeros((0, 2), int), np.zeros((0, 2), np.float32)).shape == none.shape


def test_native_code_refuses_them(layer):
    """What stands before it copies them."""
    x, ids, weights = batch(layer, np.float32)
    mask, y = layer.expert_mask.view(np.uint8), np.empty_like(x)
    for name, arguments in {
        "x": (unaligned(x), ids, weights, mask, y),
        "ids": (x, unaligned(ids), weights, mask, y),
        "weights": (x, ids, unaligned(weights), mask, y),
        "out": (x, ids, weights, mask, unaligned(y)),
    }.items():
        with pytest.raises(InputError, match=rf"^{name} must be at a multiple of \d bytes in memory, found at \d+"):
            layer.packed.forward(*arguments)


@pytest.mark.parametrize("name", FORMATS)
def test_weights(name):
    """Packed, given back and rounded."""
    experts = random_experts(np.random.default_rng(3), 2, 64, 64, **FORMATS[name], biases=True)
    for projection in PROJECTIONS:
        found, expected = (quantize(each, "int8").matrix(1, projection) for each in (moved_experts(experts), experts))
        assert all(same_bits(array, expected.stored[label]) for label, array in found.stored.items())
    with MoELayer(experts) as packed, MoELayer(moved_experts(experts)) as other:
        assert same_bits(packed.forward(*batch(packed)), other.forward(*batch(packed)))
        other.replace_expert(0, {p: moved(experts.matrix(1, p)) for p in PROJECTIONS})
        for (exported,) in (other.export_expert(0), other.export_expert(1)):
            for projection, matrix in exported.items():
                wanted = experts.matrix(1, projection)
                assert same_bits(matrix.bias, wanted.bias)
                assert all(same_bits(array, wanted.stored[label]) for label, array in matrix.stored.items())


@pytest.mark.parametrize("name", KINDS)
def test_memory_for_exported_weights(name):
    experts = random_experts(np.random.default_rng(3), 1, 64, 64, **KINDS[name])
    with MoELayer(experts) as layer:
        out = {p: experts.formats[p].empty(*experts.shape(p)) for p in PROJECTIONS}
        for projection, stored in out.items():
            for label in [label for label, array in stored.items() if array.dtype.alignment > 1]:
                wrong = out | {projection: stored | {label: unaligned(stored[label])}}
                with pytest.raises(InputError, match=f"experts.0.{projection}: out: {label} must be .*aligned False"):
                    layer.export_expert(0, out=[wrong])


def test_an_array_that_was_moved_after_it_was_checked(layer):
    """numpy lets a program do that."""
    experts = random_experts(np.random.default_rng(3), 1, 64, 64, biases=True)
    matrix = experts.matrix(0, "up")
    object.__setattr__(matrix, "bias", unaligned(matrix.bias))
    one = {p: matrix if p == "up" else experts.matrix(0, p) for p in PROJECTIONS}
    with MoELayer(experts) as packed, pytest.raises(FormatError, match=r"up bias: expected an array that is aligned"):
        packed.replace_expert(0, one)


def test_training(layer):
    x, ids, weights = batch(layer)
    grad_y = batch(layer)[0]
    rng = np.random.default_rng(4)
    spec, rank = layer.spec, 3
    pairs = {}
    for projection in PROJECTIONS:
        n, k = spec.shape(projection)
        shapes = (spec.num_experts, rank, k), (spec.num_experts, n, rank)
        pairs[projection] = tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    lora = Lora(pairs, 1.0)
    for recompute in (False, True):
        training = Training(layer, recompute)
        y, saved = training.forward(x, ids, weights, lora)
        wanted = training.backward(saved, grad_y, lora)
        other, saved = training.forward(*map(unaligned, (x, ids, weights)), lora)
        found = training.backward(saved, unaligned(grad_y), lora)
        unsaved, _ = training.forward(*map(unaligned, (x, ids, weights)), lora, save=False)
        assert same_bits(y, other)
        assert same_bits(y, unsaved)
        assert same_bits(found.x, wanted.x)
        assert same_bits(found.weights, wanted.weights)
        assert all(map(same_bits, sum(found.lora.values(), ()), sum(wanted.lora.values(), ())))
    with pytest.raises(InputError, match="out must be C-contiguous, aligned and writeable"):
        training.forward(x, ids, weights, lora, out=unaligned(x))
    into = {p: tuple(np.zeros_like(array) for array in pair) for p, pair in pairs.items()}
    with pytest.raises(InputError, match="into: up's db must be C-contiguous, aligned and writeable"):
        training.backward(saved, grad_y, lora, into=into | {"up": (into["up"][0], unaligned(into["up"][1]))})
    for array in (pairs["up"][0], pairs["up"][0].astype(BF16)):
        with pytest.raises(InputError, match=r"up's a must be C-contiguous and aligned; found .* aligned False"):
            Lora({"up": (unaligned(array), pairs["up"][1])}, 1.0)


@pytest.mark.parametrize("mode", ["bf16", "mxfp8/mxfp4"])
def test_two_stages(mode):
    experts = random_experts(np.random.default_rng(1), 4, 96, 64)
    with MoELayer(experts, activations=mode) as layer:
        x, ids, weights = batch(layer)
        ids = ids.astype(np.int32)
        sorting = moe_sorting(ids, weights, 4)
        h = gemm1(layer, x, sorting)
        y = gemm2(layer, h, sorting)
        other = moe_sorting(unaligned(ids), unaligned(weights), 4)
        assert all(map(np.array_equal, sorting, other))
        other = type(sorting)(*map(unaligned, sorting))
        own = gemm1(layer, unaligned(x), other)
        for ours, theirs in zip(own, h, strict=True) if mode != "bf16" else [(own, h)]:
            assert np.array_equal(ours, theirs)
        given = unaligned(h) if mode == "bf16" else h
        assert same_bits(gemm2(layer, given, other), y)
        with pytest.raises(InputError, match="out must be C-contiguous, aligned and writeable"):
            gemm2(layer, h, sorting, out=unaligned(y))
    rows = two_stage.quantize(x)
    assert all(map(np.array_equal, two_stage.quantize(unaligned(x))[:2], rows[:2]))
