"""Where kt-kernel rounds, as numpy: its result for one layer in float64, and a bound on what its kernels can be off.

For one expert: g = gate(x), u = up(x), h = activation(g, u), d = down(h). kt-kernel keeps g, u, h and d as bfloat16 and sums
r * d in float32; those of its INT4 kernels that multiply integers also quantise x and h to 8 bits in groups. ktmoe keeps only h
as bfloat16. Nothing here knows in which order a kernel adds: the bound holds for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ktmoe.experts import ExpertWeights
from ktmoe.matrix import Matrix
from ktmoe.reference import Reference, dequantize, round_bfloat16
from ktmoe.weights.activation import GatedActivation

#: What stands for a number of k: all of a row share an int8 scale.
ROW = -1
UNIT = 2.0**-24
TINY = 2.0**-126
#: kt-kernel's exp is 2**n * p(f), |f| <= 1/2, p of degree 5: at most 3.5e-6 = 2**-18.1 off, and six float32 roundings.
EXP_RELATIVE_ERROR = 2.0**-18
#: Roundings of exp's argument, z * log2(e), which is rounded, and so is log2(e): 2 units of |z| log2(e) ln(2) = |z|.
EXP_ARGUMENT_ROUNDINGS = 2
#: Roundings from the exp to the product: 1 + e, the quotient, u + 1, two products.
ACTIVATION_ROUNDINGS = 5


@dataclass(frozen=True)
class Roundings:
    """sums: whether g, u and d are kept as bfloat16 (h always is). int8_group: of how many k of x and h one int8 scale is; ROW.

    clamps_below: whether the gate's clamp has a lower end, too, which kt-kernel's has with an alpha.
    """

    sums: bool
    int8_group: int | None = None
    clamps_below: bool = False


KTMOE, KT_KERNEL = Roundings(sums=False), Roundings(sums=True)


def forward(
    experts: ExpertWeights,
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    roundings: Roundings,
    *,
    exact: bool = False,
    skip: np.ndarray | None = None,
    shards: int = 1,
    before: np.ndarray | None = None,
) -> Reference:
    """What a library with these roundings returns as bfloat16.

    exact: y is in real arithmetic, and the bound pays for the roundings; else y has them, and the bound is for sums, exp and
    roundings that may go either way. skip: bool [experts], those that add nothing. shards: equal ones of intermediate, whose d
    are rounded by themselves. before: bfloat16 [tokens, hidden] that the sum begins with.
    """
    x, weights = np.asarray(x).astype(np.float64), np.asarray(weights).astype(np.float64)
    active = (ids >= 0) & (ids < experts.num_experts)
    if skip is not None:
        active &= ~skip[np.where(active, ids, 0)]
    y = np.zeros_like(x) if before is None else before.astype(np.float64)
    eps, size = np.zeros_like(x), np.abs(y)
    for expert in np.unique(ids[active]).tolist():
        gate, up, down = (experts.matrix(expert, projection) for projection in ("gate", "up", "down"))
        token, slot = np.nonzero(active & (ids == expert))
        r = weights[token, slot][:, None]
        g, u = (_sum(matrix, x[token], np.zeros((len(token), experts.hidden)), roundings, exact) for matrix in (gate, up))
        h, eps_h = _rounded(*_activate(experts.activation, *g, *u, roundings.clamps_below), exact)
        for k in np.split(np.arange(experts.intermediate), shards):
            d, eps_d = _sum(down, h[:, k], eps_h[:, k], roundings, exact, slice(k[0], k[-1] + 1))
            np.add.at(y, token, r * d)
            np.add.at(eps, token, np.abs(r) * eps_d)
            np.add.at(size, token, np.abs(r) * (np.abs(d) + eps_d))
    added = shards * (active.sum(axis=1, keepdims=True) + 1) + 1
    eps = eps + _gamma(added) * size + added * TINY
    low, high = round_bfloat16(y - eps), round_bfloat16(y + eps)
    return Reference(y, np.maximum(high - y, y - low) + np.where(np.abs(y) - eps <= TINY, TINY, 0.0))


def apart(experts: ExpertWeights, loaded: ExpertWeights, x, ids, weights, roundings: Roundings, **options) -> np.ndarray:
    """How far ktmoe's y, float64 but with its own roundings, and a library's output with these can be apart.

    loaded: what the library makes of the experts. Both are within a bound of the same real numbers, or of two where it rounds
    weights, or clamps the gate below, too.
    """
    theirs = forward(loaded, x, ids, weights, roundings, exact=True, **options)
    ours = forward(experts, x, ids, weights, KTMOE, exact=True, **options)
    return ours.bound + theirs.bound + np.abs(ours.y - theirs.y)


def _sum(matrix: Matrix, a, eps_a, roundings: Roundings, exact: bool, k=slice(None)):
    """a @ W.T and its error: each product is exact, and passes through at most one rounding for each k, added in any order."""
    w = np.abs(weights := dequantize(matrix)[:, k]).T
    if roundings.int8_group:
        a, eps_a = _int8(a, eps_a, roundings.int8_group, exact)
    size = np.abs(a) + eps_a
    scales = [of for of in (matrix.scales, matrix.factor) if of is not None and of.dtype != np.uint8]
    largest = max([1.0, *(float(np.abs(of.astype(float)).max()) for of in scales)])
    lost = TINY * (len(w) + 2 + w.sum(axis=0)) * largest
    eps = eps_a @ w + _gamma(len(w) + 3) * (size @ w) + lost
    return _rounded(a @ weights.T, eps, exact) if roundings.sums else (a @ weights.T, eps)


def _rounded(v, eps, exact: bool):
    """v as bfloat16, and its error: rounding is monotone, so that what is kept lies between the roundings of v -+ eps."""
    low, high = round_bfloat16(v - eps), round_bfloat16(v + eps)
    v = v if exact else round_bfloat16(v)
    return v, np.maximum(np.abs(high - v), np.abs(v - low)) + np.where(np.abs(v) - eps <= TINY, TINY, 0.0)


def _int8(a, eps, group: int, exact: bool):
    """Each group of k as integers of 8 bits times its maximum / 127; the quotient is a float32 product: near ties may flip."""
    shape = a.shape
    a, eps = (v.reshape(len(a), -1, shape[1] if group == ROW else group) for v in (a, eps))
    most = (np.abs(a) + eps).max(axis=2, keepdims=True) / 127
    certain = (np.abs(a) - eps).max(axis=2, keepdims=True) / 127 == most
    step = np.where(most > 0, most, 1.0)
    margin = 127 * 4 * UNIT  # of the quotient: the scale, its inverse and the product are rounded

    def nearest(v, shift):
        return np.rint(v / step + shift) * step

    q = a if exact else nearest(a, 0.0)
    low, high = nearest(a - eps, -margin), nearest(a + eps, margin)
    flips = np.maximum(np.abs(high - q), np.abs(q - low))
    apart = np.maximum(np.abs(a + eps - q), np.abs(q - a + eps)) + step / 2 * (1 + 2.0**-16)
    off = np.where(certain, flips, apart) + 4 * UNIT * 127 * step
    return q.reshape(shape), off.reshape(shape)


def _activate(activation: GatedActivation, g, eps_g, u, eps_u, clamps_below: bool):
    """(u' + up_offset) * g' * sigmoid(alpha * g'): both factors have derivatives that are bounded on an interval."""
    alpha, limit, offset = (float(np.float32(v)) for v in (activation.alpha, activation.limit, activation.up_offset))
    least = -limit if clamps_below else -np.inf

    def gate(v):
        v = np.clip(v, least, limit)
        return v / (1 + np.exp(np.clip(-alpha * v, -700, 700)))

    s = gate(g)
    # v sigmoid(alpha v) has a slope of at most 1.1
    eps_s = np.minimum(1.1 * eps_g, 2 * np.maximum(np.abs(gate(g + eps_g)), np.abs(gate(g - eps_g))) + 0.6 / alpha)
    size = np.abs(s) + eps_s
    z = np.minimum(alpha * (np.abs(g) + eps_g), 100.0)
    error_e = EXP_RELATIVE_ERROR + (EXP_ARGUMENT_ROUNDINGS * z + 8) * UNIT
    eps_s = eps_s + (error_e * (1 + error_e) + _gamma(ACTIVATION_ROUNDINGS)) * size + TINY * (1 + np.abs(g) + eps_g)
    t = np.clip(u, -limit, limit) + offset
    return s * t, eps_s * (np.abs(t) + eps_u) + eps_u * size + TINY


def _gamma(roundings):
    """Higham's gamma_n, with room for float64's own roundings."""
    return roundings * UNIT / (1 - roundings * UNIT) * (1 + 2.0**-20)
