"""Lora, the adapter of a layer's experts: what it holds, what it refuses; and the sizes and the stack of what is saved."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ktmoe.errors import InputError, UnavailableError
from ktmoe.experts import PROJECTIONS, ExpertSpec
from ktmoe.training import RANK_MAX, Lora, Saved, SavedStack, saved_nbytes
from ktmoe.weights.formats import MXFP4

BF16 = np.dtype(ml_dtypes.bfloat16)
EXPERTS, HIDDEN, INTERMEDIATE, RANK = 3, 64, 96, 5
SPEC = ExpertSpec(EXPERTS, HIDDEN, INTERMEDIATE, dict.fromkeys(PROJECTIONS, MXFP4), "layer 7")


def pair(projection="gate", rank=RANK, dtype=np.float32):
    n, k = SPEC.shape(projection)
    return np.ones((EXPERTS, rank, k), dtype), np.ones((EXPERTS, n, rank), dtype)


def test_what_it_holds():
    """No copies, in the order of the projections, and bfloat16 as its bits."""
    down, gate = pair("down", dtype=BF16), pair()
    lora = Lora({"down": down, "gate": gate}, 10)
    assert (lora.projections, lora.rank, lora.alpha, lora.scale) == (("gate", "down"), RANK, 10.0, 2.0)
    assert (lora.num_experts, lora.nbytes) == (EXPERTS, sum(array.nbytes for array in (*gate, *down)))
    assert all(np.shares_memory(held, array) for held, array in zip(lora.pairs["gate"], gate, strict=True))
    assert [array.dtype for array in lora.pairs["down"]] == [np.uint16, np.uint16]
    gate[0][1, 2, 3] = 4
    assert lora.pairs["gate"][0][1, 2, 3] == 4
    lora.check(SPEC)
    assert Lora(lora.pairs, 10).pairs["down"][0] is lora.pairs["down"][0]


@pytest.mark.parametrize("rank", [1, RANK_MAX])
def test_ranks(rank):
    assert Lora({"up": pair("up", rank)}, 1).rank == rank


def with_(array, place, value):
    array = array.copy()
    array[place] = value
    return array


A, B = pair()
WRONG = {
    "no pair": ({}, r"pairs must be \{projection: \(a, b\)\}, found \{\}"),
    "no mapping": ([("gate", (A, B))], "pairs must be"),
    "a projection": ({"gates": (A, B)}, "projections gate, up, down, found 'gates'"),
    "three of them": ({"gate": (A, B, A)}, r"gate must be \(a, b\)"),
    "a list": ({"gate": ([1], B)}, "gate's a must be float32, bfloat16 .*; found list"),
    "float16": ({"gate": (A, B.astype(np.float16))}, "gate's b must be .*found an array of float16"),
    "dimensions": ({"gate": (A[0], B)}, r"gate's a must have shape \[any, any, any\], found \[5, 64\]"),
    "two ranks": ({"gate": (A, B[:, :, :3].copy())}, r"gate's b must have shape \[3, any, 5\], found \[3, 96, 3\]"),
    "ranks of two": ({"gate": (A, B), "up": pair("up", 4)}, r"up's a must have shape \[3, 5, any\], found \[3, 4, 64\]"),
    "experts": ({"gate": (A, B[:2])}, r"gate's b must have shape \[3, any, 5\], found \[2, 96, 5\]"),
    "no rank": ({"gate": pair(rank=0)}, r"a rank of 1 to 256, found \[3, 0, 64\]"),
    "a large rank": ({"gate": pair(rank=257)}, r"a rank of 1 to 256, found \[3, 257, 64\]"),
    "layout": ({"gate": (A.transpose(0, 2, 1), B)}, "gate's a must be C-contiguous"),
    "NaN": ({"gate": (A, with_(B, (2, 1, 0), np.nan))}, r"gate's b \[2, 1, 0\] must be finite, found nan"),
    "signalling NaN": ({"gate": (A, np.full(B.shape, 0x7F81, np.uint16).view(BF16))}, "b .* must be finite, found nan"),
    "infinity": ({"gate": (with_(A.astype(BF16), (0, 4, 63), -np.inf), B)}, r"a \[0, 4, 63\] must be finite, found -inf"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    pairs, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        Lora(pairs, 1)


@pytest.mark.parametrize("alpha", [np.nan, np.inf, "much", None, 10**400])
def test_alpha(alpha):
    with pytest.raises(InputError, match="alpha must be a finite number"):
        Lora({"gate": (A, B)}, alpha)


def test_numbers_that_need_not_be_finite():
    assert np.isnan(Lora({"gate": (A, with_(B, 0, np.nan))}, 1, finite=False).pairs["gate"][1]).any()


def test_experts_of_another_layer():
    lora = Lora({"gate": (A, B)}, 1)
    for sizes, message in (
        ((EXPERTS + 1, HIDDEN, INTERMEDIATE), r"layer 8: gate's a must have shape \[4, 5, 64\], found \[3, 5, 64\]"),
        ((EXPERTS, HIDDEN + 32, INTERMEDIATE), r"gate's a must have shape \[3, 5, 96\]"),
        ((EXPERTS, HIDDEN, INTERMEDIATE + 32), r"gate's b must have shape \[3, 128, 5\], found \[3, 96, 5\]"),
    ):
        with pytest.raises(InputError, match=message):
            lora.check(ExpertSpec(*sizes, SPEC.formats, "layer 8"))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_initial(dtype):
    """B is zero. A is uniform in +-1 / sqrt(inputs): its variance is a third of the square of that."""
    lora = Lora.initial(SPEC, 16, 32, seed=3, dtype=dtype)
    lora.check(SPEC)
    assert (lora.projections, lora.rank, lora.scale) == (PROJECTIONS, 16, 2.0)
    for projection, (a, b) in lora.pairs.items():
        a = a.view(BF16).astype(np.float64) if a.dtype == np.uint16 else a.astype(np.float64)
        limit = SPEC.shape(projection)[1] ** -0.5
        assert not b.any()
        assert limit * 0.99 < abs(a).max() <= limit * (1 + 2**-8)
        assert abs(np.var(a) * 3 / limit**2 - 1) < 0.1
        assert abs(a.mean()) < 0.05 * limit
        assert len(np.unique(a.round(6))) > 100
    same, other = Lora.initial(SPEC, 16, 32, seed=3, dtype=dtype), Lora.initial(SPEC, 16, 32, seed=4, dtype=dtype)
    assert np.array_equal(same.pairs["up"][0], lora.pairs["up"][0])
    assert not np.array_equal(other.pairs["up"][0], lora.pairs["up"][0])


def test_initial_of_some_projections():
    assert Lora.initial(SPEC, 2, 1, ("down", "up")).projections == ("up", "down")
    assert Lora.initial(SPEC, 2, 1, "down").projections == ("down",)
    for arguments, message in (
        ((0, 1), "rank must be an integer from 1 to 256, found 0"),
        ((257, 1), "found 257"),
        ((2.0, 1), r"found 2\.0"),
        ((True, 1), "found True"),
        ((2, np.nan), "alpha must be a finite number"),
        ((2, 1, ()), r"projections must be one or more of gate, up, down, found \[\]"),
        ((2, 1, ("gate", "router")), "found .*'router'"),
        ((2, 1, PROJECTIONS, 0, np.float64), "dtype must be float32 or bfloat16, found float64"),
    ):
        with pytest.raises(InputError, match=message):
            Lora.initial(SPEC, *arguments)


def saved(tokens, top_k, rank, recompute, x_dtype):
    arrays = [np.zeros((tokens * top_k, INTERMEDIATE), np.float32) for _ in "gu"]
    t = np.zeros((tokens * top_k, 3, rank), np.float32) if rank else None
    ids, weights = np.zeros((tokens, top_k), np.int64), np.zeros((tokens, top_k), np.float32)
    x, mask = np.zeros((tokens, HIDDEN), x_dtype), np.ones(EXPERTS, np.uint8)
    return Saved(x, ids, weights, mask, None if recompute else (*arrays, t), None, None, lambda array: array)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("x_dtype", [np.uint16, np.float32])
def test_bytes(recompute, rank, x_dtype):
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "rank": rank, "recompute": recompute}
    expected = saved_nbytes(7, 2, **sizes, x_bytes=np.dtype(x_dtype).itemsize)
    assert saved(7, 2, rank, recompute, x_dtype).nbytes == expected


def test_a_stack():
    stack = SavedStack(2)
    first, second = (saved(tokens, 2, 0, False, np.uint16) for tokens in (1, 2))
    with pytest.raises(UnavailableError, match="expected a forward pass that was saved, found none"):
        stack.pop()
    stack.push(first)
    stack.push(second)
    assert (len(stack), stack.nbytes) == (2, first.nbytes + second.nbytes)
    with pytest.raises(UnavailableError, match="at most 2 forward passes without their backward passes"):
        stack.push(first)
    assert stack.pop() is second
    assert stack.pop() is first
    stack.push(first)
    assert stack.last is first
    stack.clear()
    assert (len(stack), stack.nbytes) == (0, 0)


def test_a_stack_that_forgets():
    stack = SavedStack(2, forgets=True)
    kept = [saved(tokens, 2, 0, False, np.uint16) for tokens in (1, 2, 3)]
    for each in kept:
        stack.push(each)
    assert (stack.pop(), stack.pop(), len(stack)) == (kept[2], kept[1], 0)


@pytest.mark.parametrize("depth", [0, -1, 1.5, "2", None])
def test_depth(depth):
    with pytest.raises(InputError, match="depth must be an integer of at least 1"):
        SavedStack(depth)
