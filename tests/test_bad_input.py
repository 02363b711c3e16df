"""Bad input: every message names the thing, what was expected and what was found; nothing is ever misread."""

import contextlib
import copy
import pickle
from dataclasses import fields, replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from checkpoints import SCHEMES, write
from helpers import BF16, random_batch, random_experts, same_bits

import ktmoe
from ktmoe import MXFP4, ExpertWeights, GatedActivation, Matrix, MoELayer, MoEModel, int4
from ktmoe.errors import (
    ClosedError,
    FormatError,
    InputError,
    KtmoeError,
    NotCopyableError,
    UnavailableError,
    UnknownNameError,
)

TOKENS, HIDDEN, TOP_K, NUM_EXPERTS = 3, 64, 2, 4


@pytest.fixture(scope="module")
def layer():
    with MoELayer(random_experts(np.random.default_rng(1), NUM_EXPERTS, HIDDEN, 96), "fp32_lut") as layer:
        yield layer


@pytest.fixture
def good():
    x = np.random.default_rng(2).standard_normal((TOKENS, HIDDEN)).astype(BF16)
    return {"x": x, "expert_ids": np.array([[0, 1], [2, 3], [1, 1]]), "expert_weights": np.ones((TOKENS, TOP_K), np.float32)}


def zeros(*shape, dtype=BF16):
    return np.zeros(shape, dtype)


X_KINDS = r"bfloat16.*uint16.*float32.*torch"

# argument, its bad value, what the message must say
FORWARD = [
    ("x", zeros(TOKENS, HIDDEN - 1), r"x must have shape \[any, 64\], found \[3, 63\]"),
    ("x", zeros(HIDDEN), r"x must have shape \[any, 64\], found \[64\]"),
    ("x", zeros(1, TOKENS, HIDDEN), r"x must have shape \[any, 64\], found \[1, 3, 64\]"),
    ("x", zeros(), r"x must have shape \[any, 64\], found \[\]"),
    ("x", zeros(TOKENS, HIDDEN, dtype=np.float64), rf"x must be {X_KINDS}.*found an array of float64"),
    ("x", zeros(TOKENS, HIDDEN, dtype=np.float16), rf"x must be {X_KINDS}.*found an array of float16"),
    ("x", zeros(TOKENS, HIDDEN, dtype=np.int16), rf"x must be {X_KINDS}.*found an array of int16"),
    ("x", zeros(TOKENS, HIDDEN, dtype=">f4"), rf"x must be {X_KINDS}.*found an array of >f4"),
    ("x", zeros(TOKENS, HIDDEN, dtype=">u2"), rf"x must be {X_KINDS}.*found an array of >u2"),
    ("x", zeros(TOKENS, HIDDEN, dtype=ml_dtypes.float8_e4m3fn), rf"x must be {X_KINDS}.*found an array of float8_e4m3fn"),
    ("x", [[0.0] * HIDDEN] * TOKENS, rf"x must be {X_KINDS}.*found list"),
    ("x", None, rf"x must be {X_KINDS}.*found NoneType"),
    ("expert_ids", zeros(TOKENS + 1, TOP_K, dtype=int), r"expert_ids must have shape \[3, any\], found \[4, 2\]"),
    ("expert_ids", zeros(TOKENS, dtype=int), r"expert_ids must have shape \[3, any\], found \[3\]"),
    ("expert_ids", zeros(TOKENS, TOP_K, dtype=np.float32), r"expert_ids must be integers, found float32"),
    ("expert_ids", zeros(TOKENS, TOP_K, dtype=bool), r"expert_ids must be integers, found bool"),
    ("expert_ids", zeros(TOKENS, TOP_K, dtype=object), r"expert_ids must be integers, found object"),
    ("expert_ids", [[0, 1]] * TOKENS, r"expert_ids must be a numpy array or a torch CPU tensor; found list"),
    ("expert_weights", zeros(TOKENS, TOP_K + 1, dtype=np.float32), r"expert_weights must have shape \[3, 2\], found \[3, 3\]"),
    ("expert_weights", zeros(TOP_K, dtype=np.float32), r"expert_weights must have shape \[3, 2\], found \[2\]"),
    ("expert_weights", zeros(TOKENS, TOP_K, dtype=np.float64), r"expert_weights must be float32, found float64"),
    ("expert_weights", zeros(TOKENS, TOP_K, dtype=BF16), r"expert_weights must be float32, found bfloat16"),
    ("expert_weights", zeros(TOKENS, TOP_K, dtype=">f4"), r"expert_weights must be float32, found >f4"),
    ("expert_weights", 1.0, r"expert_weights must be a numpy array or a torch CPU tensor; found float"),
    ("out", zeros(TOKENS, HIDDEN + 1), r"out must have shape \[3, 64\], found \[3, 65\]"),
    ("out", zeros(TOKENS, HIDDEN, dtype=np.float32), r"out must be of x's kind, a bfloat16 array; found a float32 array"),
    ("out", zeros(TOKENS, HIDDEN, dtype=np.uint16), r"out must be of x's kind, a bfloat16 array; found a uint16 array"),
    ("out", zeros(TOKENS, HIDDEN, dtype=int), rf"out must be {X_KINDS}.*found an array of int64"),
    ("out", zeros(TOKENS, 2 * HIDDEN)[:, ::2], r"out must be C-contiguous and writeable; found strides \(256, 4\)"),
    ("out", zeros(HIDDEN, TOKENS).T, r"out must be C-contiguous and writeable; found strides"),
    ("out", "y", rf"out must be {X_KINDS}.*found str"),
]


@pytest.mark.parametrize(("argument", "value", "message"), FORWARD, ids=[f"{case[0]}-{i}" for i, case in enumerate(FORWARD)])
def test_forward_arguments(layer, good, argument, value, message):
    with pytest.raises(InputError, match=message) as caught:
        layer.forward(**good | {argument: value})
    assert isinstance(caught.value, ValueError)
    layer.forward(**good)  # and nothing is broken


def test_out_that_cannot_be_written(layer, good):
    out = zeros(TOKENS, HIDDEN)
    out.flags.writeable = False
    with pytest.raises(InputError, match=r"out must be C-contiguous and writeable"):
        layer.forward(**good, out=out)


def test_out_that_overlaps_x(layer, good):
    memory = zeros(TOKENS + 1, HIDDEN)
    good["x"], out = memory[1:], memory[:-1]
    with pytest.raises(InputError, match="out must be x itself or not overlap it; found a partial overlap"):
        layer.forward(**good, out=out)


@pytest.mark.parametrize("argument", ["expert_ids", "expert_weights", "expert_mask"])
@pytest.mark.parametrize("shared", [1, -1])
def test_out_that_overlaps_what_is_read(layer, good, argument, shared):
    """By one element at either end: a batch in chunks would read what it has just written."""
    out = np.zeros((TOKENS, HIDDEN), np.float32)
    good["x"] = good["x"].astype(np.float32)
    like = layer.expert_mask if argument == "expert_mask" else good[argument]
    memory = np.zeros(out.nbytes + like.nbytes - like.itemsize, np.uint8)
    first, second = (out, like) if shared > 0 else (like, out)
    parts = memory[: first.nbytes].view(first.dtype), memory[-second.nbytes :].view(second.dtype)
    views = [part.reshape(array.shape) for part, array in zip(parts, (first, second), strict=True)]
    out, overlapping = views if shared > 0 else views[::-1]
    overlapping[...] = like
    kept = layer.expert_mask
    try:
        if argument == "expert_mask":
            layer.expert_mask = overlapping
        else:
            good[argument] = overlapping
        with pytest.raises(InputError, match=f"out must not overlap {argument}"):
            layer.forward(**good, out=out)
        assert np.array_equal(overlapping, like)
    finally:
        layer.expert_mask = kept


def test_out_that_is_x_by_another_view(layer, good):
    """The same bytes are x itself; the same beginning is not enough."""
    y = layer.forward(**good)
    x = good["x"].copy()
    same = x[:].view()
    assert same_bits(layer.forward(**good | {"x": same}, out=x), y)
    wide = np.zeros((TOKENS, 2 * HIDDEN), BF16)
    good["x"] = wide[:, :HIDDEN]
    with pytest.raises(InputError, match="found a partial overlap"):
        layer.forward(**good, out=wide.reshape(-1)[: TOKENS * HIDDEN].reshape(TOKENS, HIDDEN))


@pytest.mark.parametrize(
    ("mask", "found"),
    [(np.ones(3, bool), r"bool \[3\]"), (np.ones(4, np.uint8), r"uint8 \[4\]"), (np.ones((4, 1), bool), r"bool \[4, 1\]"),
     ([True] * 4, "list"), (None, "NoneType")],
)  # fmt: skip
def test_expert_mask(layer, good, mask, found):
    kept = layer.expert_mask
    layer.expert_mask = mask
    try:
        with pytest.raises(InputError, match=rf"expert_mask must be a bool array \[4\], found {found}"):
            layer.forward(**good)
    finally:
        layer.expert_mask = kept


# Layouts: accepted and right


def awkward_layouts(array):
    rows, columns = array.shape
    spread = np.zeros((2 * rows, 3 * columns), array.dtype)
    spread[::2, ::3] = array
    yield spread[::2, ::3]
    yield np.asfortranarray(array)
    yield array[::-1, ::-1].copy()[::-1, ::-1]
    wide = np.zeros((rows, columns + 1), array.dtype)
    wide[:, 1:] = array
    yield wide[:, 1:]
    unaligned = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    yield unaligned
    frozen = array.copy()
    frozen.flags.writeable = False
    yield frozen


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_arrays_of_any_layout_are_read_right(layer, good, dtype):
    good["x"] = good["x"].astype(dtype)
    y = layer.forward(**good)
    for argument, array in good.items():
        for awkward in awkward_layouts(array):
            assert same_bits(layer.forward(**good | {argument: awkward}), y)
    repeated = np.broadcast_to(good["x"][0], (TOKENS, HIDDEN))
    assert same_bits(layer.forward(**good | {"x": repeated}), layer.forward(**good | {"x": repeated.copy()}))


def test_an_unaligned_out_is_written_right_or_refused(layer, good):
    out = np.zeros(TOKENS * HIDDEN * 2 + 1, np.uint8)[1:].view(BF16).reshape(TOKENS, HIDDEN)
    with contextlib.suppress(InputError):
        assert same_bits(layer.forward(**good, out=out), layer.forward(**good))


# Making layers


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
    ({"shape": (4, 63)}, r"needs n >= 1 and a k that is a multiple of 2, found \(4, 63\)"),
    ({"shape": (0, 64)}, r"needs n >= 1 and a k that is a multiple of 2, found \(0, 64\)"),
    ({"shape": (4, 0)}, r"needs n >= 1 and a k that is a multiple of 2, found \(4, 0\)"),
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
    (101, OF_INT4, {}, r"needs n >= 1 and a k that is a multiple of 2, found \(4, 101\)"),
    (33, OF_B16, {"scales": np.ones((4, 2), BF16)}, r"scales: expected none for b16, found"),
    (33, OF_B16, {"codes": np.zeros((4, 33), np.uint16)}, r"codes: expected dtype bfloat16, found uint16"),
    (33, OF_B16, {"codes": np.zeros((4, 33), np.float32)}, r"codes: expected dtype bfloat16, found float32"),
    (33, OF_B16, {"codes": np.zeros((4, 66), np.uint8)}, r"codes: expected dtype bfloat16, found uint8"),
    (33, OF_B16, {"codes": np.zeros((4, 34), BF16)}, r"codes: expected shape \[4, 33\], found \[4, 34\]"),
    (33, OF_B16, {"codes": np.zeros((33, 4), BF16).T}, r"codes: expected a C-contiguous array"),
    (0, OF_B16, {}, r"needs n >= 1 and k >= 1, found \(4, 0\)"),
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
    other = ktmoe.WeightFormat("q4", tuple(np.roll(MXFP4.codebook, 1).tolist()), ktmoe.Scale("ue8m0", (1, 64)))
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


def test_from_arrays_of_other_formats(backend):
    """The same layer as from matrices; b16 has codes alone, as they are or in a tuple."""
    rng = np.random.default_rng(7)
    for weight_format in (int4(64), ktmoe.BF16):
        experts = random_experts(rng, 2, 100, 64, formats=weight_format)
        arrays = {}
        for projection in ("gate", "up", "down"):
            matrices = [experts.matrix(expert, projection) for expert in range(2)]
            codes, scales = np.stack([m.codes for m in matrices]), [m.scales for m in matrices]
            arrays[projection] = (codes,) if weight_format.scale is None else (codes, np.stack(scales))
        batch = random_batch(rng, experts, 3, 2)
        with MoELayer(experts, backend) as layer:
            y = layer.forward(*batch)
        with MoELayer(ExpertWeights.from_arrays(**arrays, format=weight_format), backend) as layer:
            assert (layer.hidden, layer.intermediate) == (100, 64)
            assert same_bits(layer.forward(*batch), y)
        if weight_format.scale is None:
            bare = {projection: codes for projection, (codes,) in arrays.items()}
            with MoELayer(ExpertWeights.from_arrays(**bare, format=weight_format), backend) as layer:
                assert same_bits(layer.forward(*batch), y)
        wrong = arrays | {"up": arrays["up"] * 2 if weight_format.scale is None else arrays["up"][:1]}
        with pytest.raises(FormatError, match=r"experts: up must be \(codes.*\), found \d arrays"):
            ExpertWeights.from_arrays(**wrong, format=weight_format)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bias_must_be_finite(backend, value):
    experts = random_experts(np.random.default_rng(3), 2, 64, 64, biases=True)
    experts._read(1, "down").bias[5] = value
    with pytest.raises(FormatError, match=rf"experts\.1\.down: bias must be finite, found {value}"):
        MoELayer(experts, backend)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"experts": {}}, InputError, r"experts must be ExpertWeights, found dict; see MoELayer\.from_checkpoint"),
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
    for call in (packed.kernels, lambda: packed.unpack(0, "gate"), lambda: packed.pack(0, {"gate": experts.matrix(0, "gate")})):
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


@pytest.mark.parametrize("weight_format", [MXFP4, int4(32), ktmoe.BF16], ids=["mxfp4", "int4", "b16"])
def test_what_only_looks_like_a_matrix(weight_format):
    """It is refused, before anything is read; and what was there stays."""
    rng = np.random.default_rng(8)
    experts = random_experts(rng, 1, 64, 96, formats=weight_format, biases=True)
    batch = random_batch(rng, experts, 3, 2)
    good = {p: experts.matrix(0, p) for p in ("gate", "up", "down")}
    arrays = ["codes", "bias"] if weight_format.scale is None else ["codes", "scales", "bias"]

    class Swapped(Matrix):
        """A Matrix of other arrays than were checked."""

    wrong = [(InputError, look_alike(good["up"])), (InputError, "up"), (InputError, None)]
    for name in arrays:
        array = getattr(good["up"], name)
        small, swapped = array[:1].copy(), Swapped(**vars(good["up"]))
        object.__setattr__(swapped, name, small)
        wrong.append((FormatError, swapped))
        wrong += [(FormatError, resized(good["up"], name, size)) for size in (array.itemsize, array.nbytes + array.itemsize)]
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
        out = [{p: (m.codes.copy(), None if m.scales is None else m.scales.copy()) for p, m in good.items()}]
        out[0]["up"][0].resize(1, refcheck=False)
        with pytest.raises(FormatError, match=r"up codes: expected \d+ bytes, found \d"):
            layer.packed.export(0, out)
        with pytest.raises(FormatError):
            layer.export_expert(0, out=out)


def test_what_a_loader_reads_must_be_a_matrix():
    experts = experts_of(lambda *_: look_alike(matrix(64, 64)))
    with pytest.raises(InputError, match=r"layers\.7: gate of expert 0 must be a Matrix, found SimpleNamespace"):
        MoELayer(experts, "fp32_lut")


# Copying


@pytest.mark.parametrize("copy_it", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_layers_and_models_are_not_copied(tmp_path, copy_it):
    """By themselves, and inside what is copied; the message says what to do."""
    write(tmp_path, SCHEMES["gpt_oss"].layer("model.layers.0")).close()
    with MoEModel.from_checkpoint(tmp_path, backend="fp32_lut") as model:
        for thing, what in ((model[0], "MoELayer"), (model, "MoEModel")):
            message = rf"a {what} cannot be copied or pickled.*Share it between threads.*{what}\.from_checkpoint"
            with pytest.raises(NotCopyableError, match=message) as caught:
                copy_it(thing)
            assert isinstance(caught.value, TypeError)
            if copy_it is not copy.copy:
                with pytest.raises(NotCopyableError, match=message):
                    copy_it({"model": [thing]})


def test_every_error_is_a_ktmoe_error():
    for name in dir(ktmoe.errors):
        error = getattr(ktmoe.errors, name)
        if isinstance(error, type) and issubclass(error, Exception) and error is not KtmoeError:
            assert issubclass(error, KtmoeError)
            assert any(base.__module__ == "builtins" and issubclass(base, Exception) for base in error.__mro__[2:-3])
