"""A layer that trains, through what the driver offers: for tests of its passes against ktmoe/reference/training.py."""

from types import SimpleNamespace

import numpy as np
from helpers import BF16, random_batch, shards_of

from ktmoe._native import core
from ktmoe.experts import PROJECTIONS
from ktmoe.reference import Reference
from ktmoe.reference.training import training_backward, training_forward


def training_batch(rng, experts, tokens, top_k=2, dtype=BF16):
    """x, ids, weights and the gradient of y; the first pair is of no expert."""
    x, ids, weights = random_batch(rng, experts, tokens, top_k, dtype)
    ids[0, 0] = -1
    return x, ids, weights, rng.standard_normal(x.shape).astype(dtype)


def bits16(array):
    """bfloat16 numbers as the driver takes them."""
    return np.ascontiguousarray(array).view(np.uint16) if array.dtype == BF16 else np.ascontiguousarray(array)


def adapter_of(layer, lora):
    if lora is None:
        return None
    return core.Adapter(layer.spec, lora.scale, {p: tuple(map(bits16, pair)) for p, pair in lora.pairs.items()})


def forward(layer, x, ids, weights, lora=None, keep=True):
    """y, and what is kept: g, u and t, NaN where nothing was written; and what backward() needs of it."""
    pairs, y = ids.size, np.full_like(x, np.nan)
    saved = None
    if keep:
        g, u = np.full((2, pairs, layer.intermediate), np.nan, np.float32)
        t = np.full((pairs, len(PROJECTIONS), lora.rank), np.nan, np.float32) if lora else None
        saved = g, u, t
    mask = layer.expert_mask.view(np.uint8)
    layer.packed.forward_training(bits16(x), ids.astype(np.int64), weights, mask, bits16(y), adapter_of(layer, lora), saved)
    return SimpleNamespace(y=y, saved=saved)


def backward(
    layer, x, ids, weights, grad_y, lora=None, saved=None, *, into=None, add=False, scale=1.0, wanted=PROJECTIONS, of_x=True
):
    """The gradients x, weights and lora, NaN where nothing was written. into: the adapter's, to be added to."""
    found = SimpleNamespace(
        x=np.full_like(x, np.nan) if of_x else None, weights=np.full(ids.shape, np.nan, np.float32), lora=into
    )
    if into is None and lora:
        found.lora = {
            p: tuple(np.full(m.shape, np.nan, np.float32) for m in pair) for p, pair in lora.pairs.items() if p in wanted
        }
    layer.packed.backward(
        bits16(x),
        ids.astype(np.int64),
        weights,
        layer.expert_mask.view(np.uint8),
        bits16(grad_y),
        adapter_of(layer, lora),
        saved,
        bits16(found.x) if of_x else None,
        found.weights,
        found.lora,
        add,
        scale,
    )
    return found


def arrays_of(found):
    """All arrays of what backward() gave, by name."""
    arrays = {"weights": found.weights} | ({"x": found.x} if found.x is not None else {})
    for projection, pair in (found.lora or {}).items():
        arrays |= {f"{projection} {name}": array for name, array in zip("ab", pair, strict=True)}
    return arrays


def compared(layer, experts, x, ids, weights, grad_y, lora=None, scale=1.0, again=False):
    """What both passes gave, and {the name of each array of it: (what is expected of it, it)}.

    again: backward() makes anew what forward() keeps."""
    options = {
        "expert_mask": layer.expert_mask,
        "router_weight": layer.router_weight,
        "out_dtype": "float32" if x.dtype == np.float32 else "bfloat16",
        "rounding": layer.rounding,
        "tuned_for": layer.tuned_for,
        "shards": shards_of(layer, experts),
    }
    given = forward(layer, x, ids, weights, lora)
    expected = training_forward(experts, x, ids, weights, lora, **options)
    of_each = {"y": (expected.y, given.y)}
    used = np.isin(ids, np.nonzero(layer.expert_mask)[0]).reshape(-1)
    for name, array in zip("gut", given.saved, strict=True):
        if array is not None:
            assert np.isnan(array[~used]).all(), f"{name} of a pair that is skipped was written"
            wanted = getattr(expected, name)
            of_each[name] = Reference(wanted.y[used], wanted.bound[used]), array[used]
    found = backward(layer, x, ids, weights, grad_y, lora, None if again else given.saved, scale=scale)
    expected = training_backward(experts, x, ids, weights, grad_y, lora, scale=scale, **options)
    of_each |= {"dX": (expected.x, found.x), "dr": (expected.weights, found.weights)}
    for projection, pair in expected.lora.items():
        for name, wanted, array in zip("AB", pair, found.lora[projection], strict=True):
            of_each[f"d{name} of {projection}"] = wanted, array
    return given, found, of_each


def assert_right(*args, **options):
    """Check both passes against the reference; returns what they gave. Arguments: those of compared()."""
    given, found, of_each = compared(*args, **options)
    for name, (wanted, array) in of_each.items():
        assert np.isfinite(wanted.bound).all(), name
        worst = wanted.worst(array)
        assert worst <= 1, f"error of {name} is {worst:.3g} of its bound"
    return given, found
