"""Bad input: every message names the thing, what was expected and what was found; nothing is ever misread."""

import contextlib
import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
from checkpoints import SCHEMES, write
from helpers import BF16, random_experts, same_bits

import ktmoe
from ktmoe import MoELayer, MoEModel
from ktmoe.errors import (
    InputError,
    KtmoeError,
    NotCopyableError,
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
    ("out", zeros(TOKENS, HIDDEN, dtype=np.uint16), r"out must be of x's kind, a bfloat16 array, or float32; found a uint16"),
    ("out", zeros(TOKENS, HIDDEN, dtype=int), rf"out must be {X_KINDS}.*found an array of int64"),
    ("out", zeros(TOKENS, 2 * HIDDEN)[:, ::2], r"out must be C-contiguous, aligned and writeable; found strides \(256, 4\)"),
    ("out", zeros(HIDDEN, TOKENS).T, r"out must be C-contiguous, aligned and writeable; found strides"),
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
    with pytest.raises(InputError, match="out must be C-contiguous, aligned and writeable"):
        layer.forward(**good, out=out)


def test_float32_that_overlaps_x(layer, good):
    """Its rows are longer: it would be written over rows of x that have not been read."""
    memory = np.zeros((TOKENS, HIDDEN), np.float32)
    x = memory.reshape(-1).view(good["x"].dtype)[: TOKENS * HIDDEN].reshape(TOKENS, HIDDEN)
    with pytest.raises(InputError, match="out must not overlap x"):
        layer.forward(**good | {"x": x, "out": memory})


def test_out_that_overlaps_x(layer, good):
    memory = zeros(TOKENS + 1, HIDDEN)
    good["x"], out = memory[1:], memory[:-1]
    with pytest.raises(InputError, match="out must be x itself or not overlap it; found a partial overlap"):
        layer.forward(**good, out=out)


@pytest.mark.parametrize("argument", ["expert_ids", "expert_weights", "expert_mask"])
@pytest.mark.parametrize("shared", [1, -1])
def test_out_that_overlaps_what_is_read(layer, good, argument, shared):
    """By one element of the larger ones at either end: a batch in chunks would read what it has just written."""
    out = np.zeros((TOKENS, HIDDEN), np.float32)
    good["x"] = good["x"].astype(np.float32)
    like = layer.expert_mask if argument == "expert_mask" else good[argument]
    memory = np.zeros(out.nbytes + like.nbytes - max(like.itemsize, out.itemsize), np.uint8)
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
