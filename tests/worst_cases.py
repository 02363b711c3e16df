"""Operands for which float32 sums are as far off as they can be, and layers that show one term of the error by itself.

docs/numerics.md derives a bound from what each rounding may lose. A sum of random numbers loses a small part of that. Here each
addition loses almost all that it can: what is added is just below half a unit in the last place of the sum.
"""

from __future__ import annotations

import numpy as np
from exact import ALPHA, matrix_of, zeros
from helpers import BF16
from random_exact import layer_of

from ktmoe import GatedActivation, Matrix, MoELayer
from ktmoe.reference import UNIT, round_bfloat16
from ktmoe.two_stage import Sorting, gemm1, moe_sorting

#: exp(-alpha g) is 1 exactly, so that h is half of the gate where up is 1.
FLAT = GatedActivation(alpha=2.0**-100)
#: sigmoid(alpha g) is 1 exactly, so that h is up where the gate is 1.
STEEP = GatedActivation(alpha=ALPHA)


def below(numbers: np.ndarray) -> np.ndarray:
    """The bfloat16 numbers nearest to numbers of either sign that are not further from zero."""
    nearest = round_bfloat16(numbers)
    ulp = np.exp2(np.floor(np.log2(np.abs(nearest), where=nearest != 0, out=np.zeros_like(nearest))) - 7)
    return np.where(np.abs(nearest) > np.abs(numbers), round_bfloat16(nearest - np.sign(nearest) * ulp), nearest)


def losing(rng, weights: np.ndarray) -> np.ndarray:
    """x [k], bfloat16 numbers as float64, for a row of weights [k]: products of one sign, of which one or two are large. Each
    of the others is lost when it is added to these.

    Any of three ways, since formats have sums of their own: large ones at the first k alone, or in each block of 32; and small
    ones at each k, or one for each block, as sums of integers are of whole blocks.
    """
    x, usable = np.zeros(len(weights)), np.nonzero(weights)[0]
    if not len(usable):
        return x
    way, count = rng.integers(3), int(rng.integers(1, 3))
    blocks = [usable[usable // 32 == block] for block in np.unique(usable // 32)]
    large = np.concatenate([block[:count] for block in (blocks if way == 1 else blocks[:1])])
    small = np.array([block[0] for block in blocks], int) if way == 2 else usable
    x[small] = below(0.996 * UNIT / weights[small])
    x[large] = below(1 / weights[large])
    x[large] = np.where(x[large] * weights[large] < 1, round_bfloat16(x[large] * (1 + 2.0**-7)), x[large])
    return x


def tied(rng, activation: GatedActivation, g: np.ndarray) -> np.ndarray:
    """u for which the activation of g and u is the middle of two bfloat16 numbers, or a few units in the last place of float32
    from there; any u where there is none."""
    gate = np.minimum(g.astype(float), activation.limit)
    gate = gate / (1 + np.exp(-activation.alpha * gate))
    middle = np.exp2(rng.integers(-1, 2, len(g))) * (1 + (2 * rng.integers(0, 64, len(g)) + 1) * 2.0**-8)
    u = middle * (1 + rng.integers(-12, 13, len(g)) * UNIT) / gate - activation.up_offset
    return np.where(np.isfinite(u), u, 1).astype(np.float32)


def ones_and_zeros(intermediate: int, hidden: int, gate=1.0, up=1.0) -> dict[str, list[Matrix]]:
    """Of one expert, a gate and an up that are their biases, and a down that is zero. Both sizes are even."""
    biased = [
        matrix_of(name, *zeros(intermediate, hidden), bias=np.broadcast_to(np.float32(bias), intermediate).copy())
        for name, bias in (("gate", gate), ("up", up))
    ]
    return {"gate": biased[:1], "up": biased[1:], "down": [matrix_of("down", *zeros(hidden, intermediate))]}


def shown_layer(backend: str, projection: str, matrix: Matrix) -> MoELayer:
    """A layer of one expert whose h is x W^T + bias, W = up, or half of it, W = gate; before its rounding to bfloat16."""
    matrices = ones_and_zeros(*matrix.shape) | {projection: [matrix]}
    return layer_of(backend, matrices, FLAT if projection == "gate" else STEEP)


def sorted_rows(h: np.ndarray, weights: np.ndarray | None = None) -> tuple[np.ndarray, Sorting]:
    """What gemm2() takes for h [tokens, experts, intermediate], float64: each token has each expert once, in this order.

    weights: of the router, float32 [tokens, experts]; None: 1."""
    tokens, experts, k = h.shape
    weights = np.ones((tokens, experts), np.float32) if weights is None else weights
    sorting = moe_sorting(np.tile(np.arange(experts, dtype=np.int32), (tokens, 1)), weights, experts)
    token, slot = sorting.sorted_token_ids & 0xFFFFFF, sorting.sorted_token_ids >> 24
    rows, filled = np.zeros((len(token), k), BF16), token < tokens
    rows[filled] = h[token[filled], slot[filled]].astype(BF16)
    return rows, sorting


def h_of(layer: MoELayer, x: np.ndarray) -> np.ndarray:
    """h [tokens, intermediate] of the layer's only expert, as float64."""
    ids = np.zeros((len(x), 1), np.int32)
    h = gemm1(layer, x.astype(np.float32), moe_sorting(ids, np.ones(ids.shape, np.float32), 1))
    return h[: len(x)].astype(np.float64)
