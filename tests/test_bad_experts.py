"""Experts, matrices and arguments that no layer is made of: messages name the thing, what was expected and what was found."""

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import BF16, FORMATS, random_batch, random_experts, same_bits

import ktmoe
from ktmoe import MXFP4, ExpertWeights, GatedActivation, Matrix, MoELayer, int4, reference
from ktmoe._native import core
from ktmoe.errors import (
    ClosedError,
    FormatError,
    InputError,
    UnavailableError,
    UnknownNameError,
)
from ktmoe.reference.gradients import ReferenceTraining
from ktmoe.reference.training import training_forward

TOKENS, HIDDEN, TOP_K, NUM_EXPERTS = 3, 64, 2, 4


def matrix(n=4, k=64, **changed):
    fields = {
        "name": "layers.7.w1",
        "format": MXFP4,
        "shape": (n, k),
        "codes": np.zeros((n, k // 2), np.uint8),
        "scales": np.full((n, -(-k // 32)), 127, np.uint8),
        "bias": None,
    }
    return Matrix(**fields | changed)


MATRIX = [
    ({"codes": np.zeros((4, 32), np.int8)}, r"codes: expected dtype uint8, found int8"),
    ({"codes": np.zeros((4, 31), np.uint8)}, r"codes: expected shape \[4, 32\], found \[4, 31\]"),
    ({"codes": np.zeros((32, 4), np.uint8).T}, r"codes: expected a C-contiguous array, found strides \(1, 4\)"),
    ({"codes": [[0] * 32] * 4}, r"codes: expected a numpy array, found list"),
    ({"scales": np.zeros((4, 2), np.float32)}, r"scales: expected dtype uint8, found float32"),
    ({"scales": np.zeros((4, 3), np.uint8)}, r"scales: expected shape \[4, 2\], found \[4, 3\]"),
    ({"scales": np.zeros((4, 4), np.uint8)[:, ::2]}, r"scales: expected a C-contiguous array, found strides \(4, 2\)"),
    ({"bias": np.zeros(4)}, r"bias: expected dtype float32, found float64"),
    ({"bias": np.zeros(5, np.float32)}, r"bias: expected shape \[4\], found \[5\]"),
    ({"shape": (4, 63)}, r"needs n and k of at least 1, k a multiple of 2, found \(4, 63\)"),
    ({"shape": (0, 64)}, r"needs n and k of at least 1, k a multiple of 2, found \(0, 64\)"),
    ({"shape": (4, 0)}, r"needs n and k of at least 1, k a multiple of 2, found \(4, 0\)"),
]


@pytest.mark.parametrize(("changed", "message"), MATRIX, ids=[str(i) for i in range(len(MATRIX))])
def test_matrix(changed, message):
    matrix()
    with pytest.raises(FormatError, match=r"layers\.7\.w1.*" + message):
        matrix(**changed)


OF_INT4 = {"format": int4(64), "codes": np.zeros((4, 50), np.uint8), "scales": np.ones((4, 2), BF16)}
OF_B16 = {"format": ktmoe.BF16, "codes": np.zeros((4, 33), BF16), "scales": None}
OTHER_MATRICES = [
    (100, OF_INT4, {"scales": np.ones((4, 2), np.uint16)}, r"scales: expected dtype bfloat16, found uint16"),
    (100, OF_INT4, {"scales": np.ones((4, 2), np.float32)}, r"scales: expected dtype bfloat16, found float32"),
    (100, OF_INT4, {"scales": np.ones((4, 4), BF16)}, r"scales: expected shape \[4, 2\], found \[4, 4\]"),
    (100, OF_INT4, {"scales": None}, r"scales: expected a numpy array, found NoneType"),
    (100, OF_INT4, {"codes": np.zeros((4, 50), np.int8)}, r"codes: expected dtype uint8, found int8"),
    (101, OF_INT4, {}, r"needs n and k of at least 1, k a multiple of 2, found \(4, 101\)"),
    (33, OF_B16, {"scales": np.ones((4, 2), BF16)}, r"scales: expected none for BF16, found"),
    (33, OF_B16, {"codes": np.zeros((4, 33), np.uint16)}, r"codes: expected dtype bfloat16, found uint16"),
    (33, OF_B16, {"codes": np.zeros((4, 33), np.float32)}, r"codes: expected dtype bfloat16, found float32"),
    (33, OF_B16, {"codes": np.zeros((4, 66), np.uint8)}, r"codes: expected dtype bfloat16, found uint8"),
    (33, OF_B16, {"codes": np.zeros((4, 34), BF16)}, r"codes: expected shape \[4, 33\], found \[4, 34\]"),
    (33, OF_B16, {"codes": np.zeros((33, 4), BF16).T}, r"codes: expected a C-contiguous array"),
    (0, OF_B16, {}, r"needs n and k of at least 1, found \(4, 0\)"),
]


@pytest.mark.parametrize(("k", "right", "changed", "message"), OTHER_MATRICES, ids=[str(i) for i in range(len(OTHER_MATRICES))])
def test_matrix_of_other_formats(k, right, changed, message):
    matrix(4, 100, **OF_INT4)
    matrix(4, 33, **OF_B16)
    with pytest.raises(FormatError, match=r"layers\.7\.w1.*" + message):
        matrix(4, k, **right | changed)


def experts_of(read, formats=MXFP4, sizes=(2, 64, 64)):
    return ExpertWeights(*sizes, read, formats, name="layers.7")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((0, 64, 64), "num_experts must be a whole number from 1 to 268435456, found 0"),
     ((1, 0, 64), "hidden must be .* found 0"),
     ((1, 64, -2), "intermediate must be .* found -2"), ((1, 64, 2.0), r"intermediate must be .* found 2\.0"),
     ((2**28 + 1, 64, 64), "num_experts must be .* found 268435457"), ((1, "64", 64), "hidden must be .* found '64'")],
)  # fmt: skip
def test_sizes_of_experts(sizes, message):
    with pytest.raises(InputError, match="layers.7: " + message):
        experts_of(None, sizes=sizes)


def test_what_read_gives_is_checked():
    wrong_shape = experts_of(lambda *_: matrix(64, 32))
    with pytest.raises(FormatError, match=r"layers\.7\.w1: gate must be .* \[64, 64\], found .* \[64, 32\]"):
        MoELayer(wrong_shape, "fp32_lut")
    other = ktmoe.WeightFormat(MXFP4.element, ktmoe.Scale("ue8m0", (1, 64)))
    wrong_format = experts_of(lambda *_: matrix(64, 64, format=other, scales=np.zeros((64, 1), np.uint8)))
    with pytest.raises(FormatError, match=r"layers\.7\.w1: gate must be .* per 1x32 .*, found .* per 1x64"):
        MoELayer(wrong_format, "fp32_lut")
    with pytest.raises(InputError, match=r"layers\.7: projection must be .*gate.*up.*down.*, found 'w1'"):
        wrong_shape.matrix(0, "w1")
    for expert in (-1, 2):
        with pytest.raises(InputError, match=rf"layers\.7: expert must be in \[0, 2\), found {expert}"):
            wrong_shape.matrix(expert, "gate")


ARRAYS = {
    "gate": (np.zeros((2, 64, 32), np.uint8), np.zeros((2, 64, 2), np.uint8)),
    "up": (np.zeros((2, 64, 32), np.uint8), np.zeros((2, 64, 2), np.uint8)),
    "down": (np.zeros((2, 64, 32), np.uint8), np.zeros((2, 64, 2), np.uint8)),
}
FROM_ARRAYS = [
    ({"up": (np.zeros((2, 64, 32)), ARRAYS["up"][1])}, r"experts\.0\.up codes: expected dtype uint8, found float64"),
    ({"up": (np.zeros((64, 32), np.uint8), ARRAYS["up"][1])}, r"up codes must be an array \[experts.*found 2 dimensions"),
    ({"down": ([1], ARRAYS["down"][1])}, r"down codes must be an array \[experts.*found list"),
    ({"down": (np.zeros((3, 64, 32), np.uint8), ARRAYS["down"][1])}, r"down codes must hold 2 experts, found 3"),
    ({"gate": (ARRAYS["gate"][0], np.zeros((1, 64, 2), np.uint8))}, r"gate scales must hold 2 experts, found 1"),
    ({"down": (np.zeros((2, 64, 16), np.uint8), ARRAYS["down"][1])}, r"down codes: expected shape \[64, 32\], found.*16\]"),
    ({"biases": {"up": np.zeros((3, 64), np.float32)}}, r"up bias must hold 2 experts, found 3"),
    ({"biases": {"up": np.zeros((2, 63), np.float32)}}, r"experts\.0\.up bias: expected shape \[64\], found \[63\]"),
    ({"biases": {"up": [0.0] * 64}}, r"up bias.*found list"),
    ({"biases": {"w1": np.zeros((2, 64), np.float32)}}, r"biases.*gate.*up.*down.*found.*w1"),
]


@pytest.mark.parametrize(("changed", "message"), FROM_ARRAYS, ids=[str(i) for i in range(len(FROM_ARRAYS))])
def test_from_arrays(changed, message):
    with pytest.raises(FormatError, match=message):
        MoELayer(ExpertWeights.from_arrays(**ARRAYS | changed), "fp32_lut")


@pytest.mark.cover("any backend")
def test_from_arrays_of_other_formats(backend):
    """The same layer as from matrices; b16 has codes alone, as they are or in a tuple."""
    rng = np.random.default_rng(7)
    for weight_format in FORMATS.values():
        experts = random_experts(rng, 2, 104, 64, formats=weight_format)
        arrays = {}
        for projection in ("gate", "up", "down"):
            stored = [experts.matrix(expert, projection).stored for expert in range(2)]
            arrays[projection] = tuple(np.stack([one[label] for one in stored]) for label in stored[0])
        batch = random_batch(rng, experts, 3, 2)
        with MoELayer(experts, backend) as layer:
            y = layer.forward(*batch)
        with MoELayer(ExpertWeights.from_arrays(**arrays, format=weight_format), backend) as layer:
            assert (layer.hidden, layer.intermediate) == (104, 64)
            assert same_bits(layer.forward(*batch), y)
        if len(arrays["up"]) == 1:
            bare = {projection: codes for projection, (codes,) in arrays.items()}
            with MoELayer(ExpertWeights.from_arrays(**bare, format=weight_format), backend) as layer:
                assert same_bits(layer.forward(*batch), y)
        wrong = arrays | {"up": arrays["up"] * 2 if len(arrays["up"]) == 1 else arrays["up"][:1]}
        with pytest.raises(FormatError, match=r"experts: up must be \(codes.*\), found \d arrays"):
            ExpertWeights.from_arrays(**wrong, format=weight_format)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bias_must_be_finite(backend, value):
    experts = random_experts(np.random.default_rng(3), 2, 64, 64, biases=True)
    experts.matrix(1, "down").bias[5] = value
    with pytest.raises(FormatError, match=rf"experts\.1\.down: bias \[5\] is {value}; expected a finite number"):
        MoELayer(experts, backend)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"experts": {}}, InputError, r"experts must be ExpertWeights, found \{\}; ktmoe\.load_experts"),
        ({"router_weight": "up"}, InputError, r"router_weight must be one of .*down_output.*, found 'up'"),
        ({"activations": "int3"}, UnavailableError, r"'fp32_lut' .* no activation mode 'int3' for these weights, only bf16\b"),
        ({"backend": "cuda"}, UnknownNameError, r"unknown backend 'cuda'; known are .*avx512_bf16.*fp32_lut"),
    ],
)
def test_making_a_layer(arguments, error, message):
    experts = random_experts(np.random.default_rng(4), 1, 64, 64)
    with pytest.raises(error, match=message):
        MoELayer(**{"experts": experts, "backend": "fp32_lut"} | arguments)


@pytest.mark.parametrize(
    ("field", "value"),
    [("alpha", 0), ("alpha", -1), ("alpha", np.nan), ("alpha", np.inf), ("limit", 0), ("limit", -1), ("limit", np.nan),
     ("up_offset", np.nan), ("up_offset", np.inf)],
)  # fmt: skip
def test_gated_activation(field, value):
    with pytest.raises(InputError, match=rf"activation {field} must be .*found {value}"):
        GatedActivation(**{field: value})


def test_a_closed_layer():
    experts = random_experts(np.random.default_rng(5), 1, 64, 64)
    with MoELayer(experts, "fp32_lut") as layer:
        packed = layer.packed
    layer.close()  # a second time
    for call in (layer.forward, lambda *a: layer.submit(*a).result()):
        with pytest.raises(ClosedError, match="experts: forward after close") as caught:
            call(*random_batch(np.random.default_rng(6), experts, 1, 1))
        assert isinstance(caught.value, RuntimeError)
    for call in (
        lambda: core.folded(packed),
        lambda: core.unpack(packed, 0, "gate"),
        lambda: packed.pack(0, {"gate": experts.matrix(0, "gate")}),
    ):
        with pytest.raises(ClosedError):
            call()


def look_alike(matrix, **changed):
    return SimpleNamespace(**{field.name: getattr(matrix, field.name) for field in fields(matrix)} | changed)


def resized(matrix, name, nbytes):
    """A matrix whose array was shortened, or made longer, behind its back, with its memory."""
    array = getattr(matrix, name).copy()
    matrix = replace(matrix, **{name: array})
    array.resize(nbytes // array.itemsize, refcheck=False)
    return matrix


@pytest.mark.parametrize("weight_format", FORMATS.values(), ids=FORMATS)
def test_what_only_looks_like_a_matrix(weight_format):
    """It is refused, before anything is read; and what was there stays."""
    rng = np.random.default_rng(8)
    experts = random_experts(rng, 1, 64, 96, formats=weight_format, biases=True)
    batch = random_batch(rng, experts, 3, 2)
    good = {p: experts.matrix(0, p) for p in ("gate", "up", "down")}
    arrays = [*good["up"].stored, "bias"]

    class Swapped(Matrix):
        """A Matrix of other arrays than were checked."""

    wrong = [(InputError, look_alike(good["up"])), (InputError, "up"), (InputError, None)]
    for name in arrays:
        array = getattr(good["up"], name)
        small, swapped = array.reshape(-1)[:-1].copy(), Swapped(**vars(good["up"]))
        object.__setattr__(swapped, name, small)
        wrong.append((FormatError, swapped))
        wrong += [
            (FormatError, resized(good["up"], name, size))
            for size in (array.nbytes - array.itemsize, array.nbytes + array.itemsize)
        ]
    with MoELayer(experts, "fp32_lut") as layer:
        y = layer.forward(*batch)
        for error, matrix in wrong:
            for put in (layer.replace_expert, layer.packed.pack):
                with pytest.raises(error, match=r"must be a Matrix, found|expected \d+ bytes, found \d+"):
                    put(0, good | {"up": matrix})
        for matrices in ([*good.values()], None, "up", good | {"w1": good["up"]}):
            with pytest.raises(InputError, match=r"matrices must be by projection, .*, found"):
                layer.replace_expert(0, matrices)
        assert same_bits(layer.forward(*batch), y)
        out = [{p: {label: array.copy() for label, array in m.stored.items()} for p, m in good.items()}]
        out[0]["up"]["codes"].resize(1, refcheck=False)
        with pytest.raises(FormatError, match=r"up codes: expected \d+ bytes, found \d"):
            layer.packed.export(0, out)
        with pytest.raises(FormatError):
            layer.export_expert(0, out=out)


def test_what_a_loader_reads_must_be_a_matrix():
    experts = experts_of(lambda *_: look_alike(matrix(64, 64)))
    with pytest.raises(InputError, match=r"layers\.7: gate of expert 0 must be a Matrix, found SimpleNamespace"):
        MoELayer(experts, "fp32_lut")


def test_what_is_no_experts():
    """A checkpoint's path, most likely. Whoever takes experts says how to get them."""
    rng = np.random.default_rng(1)
    x, ids, weights = random_batch(rng, random_experts(rng, NUM_EXPERTS, HIDDEN, 32), TOKENS, TOP_K)
    for take in (
        MoELayer,
        lambda experts: ktmoe.quantize(experts, "int8"),
        lambda experts: reference.forward(experts, x, ids, weights),
        lambda experts: training_forward(experts, x, ids, weights),
        ReferenceTraining,
    ):
        for given in ("DeepSeek-V4-Flash", None, [1]):
            with pytest.raises(InputError) as caught:
                take(given)
            how = "ktmoe.load_experts(path, layer) gives those of a checkpoint"
            assert str(caught.value) == f"experts must be ExpertWeights, found {given!r}; {how}"
