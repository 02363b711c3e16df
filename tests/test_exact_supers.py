"""Exact arithmetic for super-scales and minima: every integer scale, super-scales of every exponent, what is added when.

See exact.py. test_exact_formats.py and test_exact_int8.py have these formats among all others.
"""

from dataclasses import replace

import numpy as np
import pytest
import ways
from exact import down_layer, forward, odd_scales, random_codes, weights_of
from helpers import SUPER_SCALED, WHOLE

from ktmoe._native import core
from ktmoe.weights.offsets import Minimum


@pytest.fixture(scope="module", params=[name for name, subject in ways.SUBJECTS.items() if subject.activations == "bf16"])
def backend(request, emulator_folder):
    with ways.chosen(ways.SUBJECTS[request.param], emulator_folder) as name:
        yield name


def groups_of(weight_format, n, k, **numbers):
    """All arrays of groups, by name: of ones, but for those that are given."""
    arrays = {label: np.ones(shape, dtype) for label, (dtype, shape) in weight_format.arrays(n, k).items() if label != "codes"}
    return arrays | {label: np.ascontiguousarray(array, arrays[label].dtype) for label, array in numbers.items()}


WITH_SUPERS = [name for name, weight_format in SUPER_SCALED.items() if weight_format.super_scale]
WITH_MINIMA = [name for name, weight_format in SUPER_SCALED.items() if weight_format.offset]


@pytest.mark.parametrize("name", WITH_SUPERS)
def test_every_integer_scale_with_every_code(backend, name):
    """A row for each scale; minima are other integers. One weight a sum, and the sums of whole groups."""
    rng = np.random.default_rng(1)
    weight_format = SUPER_SCALED[name]
    k = 544  # two whole groups of super-scales, and a block
    codes = np.resize(np.arange(1 << weight_format.element.bits, dtype=np.uint8), (256, k))
    codes = rng.permuted(codes, axis=1)
    least, most = WHOLE[weight_format.scale.kind]
    every = np.resize(np.arange(least, most + 1), 256)
    numbers = np.stack([rng.permutation(every) for _ in range(weight_format.scale.shape(1, k)[1])], axis=1)
    given = {"scales": numbers, "super_scales": np.resize([0.5, -2.0, 0.25], (256, 3))}
    if weight_format.offset:
        given |= {"offsets": np.roll(numbers, 1, axis=1), "super_offsets": np.resize([-4.0, 1.0, 2.0], (256, 3))}
    scales = groups_of(weight_format, 256, k, **given)
    weights = weights_of(codes, scales, weight_format)
    with down_layer(backend, codes, scales, weight_format) as layer:
        one_hot = np.eye(k)[rng.permutation(k)[:40]]
        for x in (one_hot, one_hot[:1], one_hot[1:4], rng.integers(-1, 2, (3, k)).astype(float)):
            assert np.array_equal(forward(layer, x)[:, :256], x @ weights.T)


@pytest.mark.parametrize("name", [*WITH_SUPERS, "int2 super-256"])
def test_super_scales_of_every_exponent(backend, name):
    """All fp16 exponents, denormal numbers among them, any significand: a product with a scale and a code has 26 bits at most,
    and is rounded once. Scales of 256 k without others are such numbers themselves."""
    rng = np.random.default_rng(2)
    weight_format = SUPER_SCALED[name]
    if weight_format.family == "q4":  # int has no kernels for these without minima
        weight_format = replace(weight_format, offset=None)
    n, k = 248, 512
    codes = random_codes(rng, n, k, weight_format)
    fields = np.resize(np.arange(31, dtype=np.uint16), (n, 2)) << 10 | rng.integers(0, 1024, (n, 2), dtype=np.uint16)
    supers = (fields | rng.integers(0, 2, (n, 2), dtype=np.uint16) << 15).view(np.float16)
    given = {"scales": supers}
    if weight_format.super_scale:
        numbers = rng.integers(*WHOLE[weight_format.scale.kind], weight_format.scale.shape(n, k), endpoint=True)
        given = {"scales": numbers, "super_scales": supers}
    if weight_format.offset:
        given["super_offsets"] = np.zeros((n, 2))
    scales = groups_of(weight_format, n, k, **given)
    weights = weights_of(codes, scales, weight_format).astype(np.float32)
    with down_layer(backend, codes, scales, weight_format) as layer:
        for x in (np.eye(k)[rng.permutation(k)[:24]], np.eye(k)[256:257], np.eye(k)[255:256]):
            assert np.array_equal(forward(layer, x)[:, :n], x @ weights.T.astype(float))


@pytest.mark.parametrize("tokens", [1, 5, 26])
@pytest.mark.parametrize("name", WITH_MINIMA)
def test_a_minimum_is_subtracted_after_its_group(backend, name, tokens):
    """One group has x. Its scaled sum is exact; less the minimum times the sum of x, it is rounded once, and no sum that began
    with the minimum would be the same."""
    rng = np.random.default_rng(3)
    weight_format = SUPER_SCALED[name]
    n, k, length = 128, 320, weight_format.scale.extent[1]
    codes = random_codes(rng, n, k, weight_format)
    scales = odd_scales(rng, n, k, weight_format, 7 if weight_format.element.bits <= 4 else 3)
    label = "super_offsets" if weight_format.super_scale else "offsets"
    scales[label] = (rng.integers(1025, 2048, scales[label].shape) * 2.0**-9).astype(np.float16)
    minima = weights_of(np.zeros_like(codes), scales | {"scales": 0 * scales["scales"]}, weight_format)
    products = weights_of(codes, scales, replace(weight_format, offset=None))
    group = rng.permutation(np.resize(np.arange(k // length), tokens))
    x = rng.integers(-7, 8, (tokens, k)) * (np.arange(k) // length == group[:, None]) * 1.0
    sums, less = x @ products.T, x @ minima.T
    assert np.array_equal(sums.astype(np.float32), sums)
    with down_layer(backend, codes, scales, weight_format) as layer:
        assert np.array_equal(forward(layer, x)[:, :n], (sums + less).astype(np.float32))
    assert np.count_nonzero(less) > less.size / 2


@pytest.mark.parametrize("name", WITH_MINIMA)
def test_what_is_added_changes_its_sign(backend, name):
    """A format that adds its minima is the one that subtracts their negatives."""
    rng = np.random.default_rng(4)
    weight_format = SUPER_SCALED[name]
    n, k = 72, 288
    codes, scales = random_codes(rng, n, k, weight_format), odd_scales(rng, n, k, weight_format, 3)
    x = rng.integers(-7, 8, (4, k)).astype(float)
    other = replace(weight_format, offset=replace(weight_format.offset, added=not weight_format.offset.added))
    label = "super_offsets" if weight_format.super_scale else "offsets"
    negated = scales | {label: -scales[label]}
    expected = x @ weights_of(codes, scales, weight_format).T
    for of_format, numbers in ((weight_format, scales), (other, negated)):
        with down_layer(backend, codes, numbers, of_format) as layer:
            assert np.array_equal(forward(layer, x)[:, :n], expected)
            assert isinstance(of_format.offset, Minimum)
            unpacked = core.unpack(layer.packed, 0, "down")
            assert np.array_equal(unpacked[label][:n].view(np.uint8), numbers[label].view(np.uint8))


MISTAKES = {
    "super-scale": ("super_scales", lambda array: np.roll(array, 1, axis=1)),
    "super-scales of rows": ("super_scales", lambda array: np.roll(array, 1, axis=0)),
    "its last bit": ("super_scales", lambda array: (array.view(np.uint16) ^ 1).view(np.float16)),
    "scale": ("scales", lambda array: np.roll(array, 1, axis=1)),
    "scale's sign": ("scales", lambda array: -array),
    "minimum": ("offsets", lambda array: np.roll(array, 1, axis=1)),
    "one minimum": ("offsets", lambda array: array + np.pad([[1]], ((5, 66), (7, array.shape[1] - 8))).astype(array.dtype)),
    "minima's super-scale": ("super_offsets", lambda array: np.roll(array, 1, axis=1)),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        (name, mistake)
        for name, weight_format in SUPER_SCALED.items()
        for mistake, (label, _) in MISTAKES.items()
        if label in weight_format.arrays(8, 8) and not (mistake == "scale's sign" and weight_format.scale.kind == "uint4")
    ],
)
def test_mistakes_are_seen(backend, name, mistake):
    rng = np.random.default_rng(5)
    weight_format = SUPER_SCALED[name]
    codes = random_codes(rng, 72, 544, weight_format)
    scales = odd_scales(rng, 72, 544, weight_format, 3)
    scales = scales if isinstance(scales, dict) else {"scales": scales}
    scales["scales"][scales["scales"] == 0] = 1
    for label in ("super_scales", "super_offsets"):
        if label in scales:
            scales[label][:] = np.resize([1.5, 2, 0.5, 1], scales[label].shape)
    x = rng.choice([-3.0, -1.0, 2.0, 5.0], (3, 544))
    expected = x @ weights_of(codes, scales, weight_format).T
    label, change = MISTAKES[mistake]
    for given, same in ((scales, True), (scales | {label: np.ascontiguousarray(change(scales[label]))}, False)):
        with down_layer(backend, codes, given, weight_format) as layer:
            assert np.array_equal(forward(layer, x)[:, :72], expected) == same
