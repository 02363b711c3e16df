"""The reference's definitions once more, one scalar at a time in rational arithmetic."""

import functools
import math
from fractions import Fraction

import numpy as np


def bfloat16s(bits):
    """The rational numbers that 16 bits stand for, by the definition of the format."""
    return [
        (-1) ** (b >> 15) * (Fraction(128 * (b >> 7 & 255 > 0) + (b & 127), 128) * Fraction(2) ** (max(b >> 7 & 255, 1) - 127))
        for b in np.asarray(bits).ravel().tolist()
    ]


@functools.cache
def nearest_bfloat16(a: Fraction) -> Fraction:
    """Round half to even with 8 significant bits, in rationals; normal numbers and zero only."""
    if a == 0:
        return a
    exponent = 0
    while abs(a) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(a) < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (exponent - 7)
    return round(a / quantum) * quantum  # round() of a Fraction is half to even


def int16_step(largest):
    """Of a group with this maximum."""
    exponent = -126
    while largest >= Fraction(2) ** (exponent + 1):
        exponent += 1
    return Fraction(2) ** (exponent - 14)


def int8_step(largest):
    return nearest_bfloat16(max(largest, Fraction(127, 2**118)) / 127)


def quantised_by_rationals(row, activations):
    """What a mode makes of one row of Fractions, one element at a time."""
    result = []
    for start in range(0, len(row), 32):
        group = row[start : start + 32]
        step = {"int16": int16_step, "int8": int8_step}[activations](max(map(abs, group)))
        integers = [round(v / step) for v in group]  # half to even
        assert max(map(abs, integers)) <= {"int16": 32640, "int8": 127}[activations]
        result += [q * step for q in integers]
    return result


def naive_forward(experts, x, ids, weights, mask, router_weight, activations="bf16", rounded=()):
    """The definition, one scalar at a time: exact but for the activation, which is Python's float.

    rounded: the names of the matrices whose weights rounding="folded" rounds to bfloat16.
    """

    def weight(matrix, row, k):
        if matrix.format.scale is None:
            return Fraction(float(matrix.codes[row, k]))
        byte, scale = int(matrix.codes[row, k // 2]), matrix.scales[row, k // matrix.format.scale.extent[1]]
        scale = Fraction(2) ** (int(scale) - 127) if scale.dtype == np.uint8 else Fraction(float(scale))
        product = Fraction(matrix.format.codebook[byte >> 4 if k % 2 else byte & 15]) * scale
        return nearest_bfloat16(product) if matrix.name in rounded else product

    def linear(matrix, a):
        a = a if activations == "bf16" else quantised_by_rationals(a, activations)
        bias = [Fraction(0)] * matrix.shape[0] if matrix.bias is None else [Fraction(float(b)) for b in matrix.bias]
        n, k = matrix.shape
        return [bias[row] + sum(weight(matrix, row, i) * a[i] for i in range(k)) for row in range(n)]

    def act(g, u):
        alpha, limit = (float(np.float32(v)) for v in (experts.activation.alpha, experts.activation.limit))
        g, u = min(float(g), limit), max(-limit, min(float(u), limit))
        return Fraction((u + experts.activation.up_offset) * g / (1 + math.exp(-alpha * g)))

    y = [[Fraction(0)] * experts.hidden for _ in x]
    for t in range(len(x)):
        for expert, r in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if not 0 <= expert < experts.num_experts or not mask[expert]:
                continue
            a, r = [Fraction(float(v)) for v in x[t]], Fraction(r)
            if router_weight == "expert_input":
                a = [nearest_bfloat16(Fraction(float(np.float32(float(v * r))))) for v in a]
            g, u = (linear(experts.matrix(expert, p), a) for p in ("gate", "up"))
            h = [act(*pair) for pair in zip(g, u, strict=True)]
            h = [nearest_bfloat16(v * r if router_weight == "down_input" else v) for v in h]
            d = linear(experts.matrix(expert, "down"), h)
            y[t] = [s + (r * v if router_weight == "down_output" else v) for s, v in zip(y[t], d, strict=True)]
    return np.array([[float(v) for v in row] for row in y])
