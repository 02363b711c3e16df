"""The reference's definitions once more, one scalar at a time in rational arithmetic."""

import bisect
import functools
import math
import re
from fractions import Fraction

import numpy as np

from ktmoe.modes import mode_of
from ktmoe.quantization.rules import Rule


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


#: The nibble of a dword, from its lowest bits up, that has AutoAWQ's output 0, 1, ... of eight.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def float_of(bits, exponent_bits, significand_bits):
    """The rational number of a float's bits, by the definition of binary formats."""
    bias, significand = 2 ** (exponent_bits - 1) - 1, bits & (1 << significand_bits) - 1
    field = bits >> significand_bits & (1 << exponent_bits) - 1
    size = Fraction(significand, 1 << significand_bits) + (field > 0)
    return (-1) ** (bits >> exponent_bits + significand_bits) * size * Fraction(2) ** (max(field, 1) - bias)


def e4m3(byte):
    return float_of(byte, 4, 3)


def number(kind, stored):
    """What one stored scale, or minimum, stands for."""
    if kind == "ue8m0":
        return Fraction(2) ** (int(stored) - 127)
    if kind == "e4m3":
        return e4m3(int(stored))
    if kind in ("int8", "int6", "uint4"):
        return Fraction(int(stored))
    exponent, significand, unsigned = {"bf16": (8, 7, np.uint16), "fp16": (5, 10, np.uint16), "fp32": (8, 23, np.uint32)}[kind]
    return float_of(int(stored.view(unsigned)), exponent, significand)


def value_of(element, code):
    """What a code stands for, of elements that have a definition."""
    if element.name == "E2M1":
        return float_of(code, 2, 1)
    if element.name == "E4M3":
        return e4m3(code)
    if element.name == "E5M2":
        return float_of(code, 5, 2)
    if element.name == "INT8":
        return Fraction(code - 256 * (code >> 7))
    if element.name == "INT8 + 128":
        return Fraction(code - 128)
    if element.name in ("INT4", "UINT4"):
        return Fraction(code - 8 if element.name == "INT4" else code)
    return Fraction(element.values[code])


def four_bits(order, stored, row, k):
    """A code, or a zero point of group k of orders that have eight in each int32."""
    if order == "rows":
        return int(stored[row, k // 2]) >> 4 * (k % 2) & 15
    if order == "gptq":
        return int(stored[k // 8, row]) >> 4 * (k % 8) & 15
    return int(stored[k, row // 8]) >> 4 * AWQ_NIBBLES[row % 8] & 15


def zero_point(matrix, row, k):
    offset, order = matrix.format.offset, matrix.format.order.name
    group = k // offset.extent[1]
    if order == "rows":
        stored = int(matrix.offsets[row, group])
    else:
        nibble = row % 8 if order == "gptq" else AWQ_NIBBLES[row % 8]
        stored = int(matrix.offsets[group, row // 8]) >> 4 * nibble & 15
    return (stored + offset.plus) % 16


def shared(matrix, label, scale, row, k):
    """The number of an array that a weight shares with others; 1 if the format has no such array."""
    if scale is None:
        return Fraction(1)
    at = row // scale.extent[0], k // scale.extent[1]
    return number(scale.kind, getattr(matrix, label)[at if matrix.format.order.name == "rows" else at[::-1]])


def weight_of(matrix, row, k, rounded=False):
    """A weight, without its factor. rounded: to bfloat16."""
    format, offset = matrix.format, matrix.format.offset
    at = (row, k) if format.order.name == "rows" else (k, row)
    if not format.element.values:
        return Fraction(float(matrix.codes[at]))
    code = int(matrix.codes[at]) if format.element.row_bits == 8 else four_bits(format.order.name, matrix.codes, row, k)
    value = value_of(format.element, code) - (zero_point(matrix, row, k) if hasattr(offset, "plus") else 0)
    scaled = value * shared(matrix, "scales", format.scale, row, k)
    scaled *= shared(matrix, "super_scales", format.super_scale, row, k)
    if hasattr(offset, "scale"):
        minimum = shared(matrix, "offsets", offset.scale, row, k) * shared(matrix, "super_offsets", offset.super_scale, row, k)
        return scaled + minimum if offset.added else scaled - minimum
    return nearest_bfloat16(scaled) if rounded else scaled


def factor_of(matrix, row):
    """What multiplies a sum."""
    factor = matrix.format.factor
    if factor is None:
        return Fraction(1)
    value = number("fp32", matrix.factor[row if factor.per_row else 0])
    return 1 / value if factor.divides else value


def int16_step(largest):
    """The step of a group with this maximum."""
    exponent = -126
    while largest >= Fraction(2) ** (exponent + 1):
        exponent += 1
    return Fraction(2) ** (exponent - 14)


def int8_step(largest):
    return nearest_bfloat16(max(largest, Fraction(127, 2**118)) / 127)


def floor_log2(a):
    """floor(log2(a)) of a positive rational number."""
    exponent = a.numerator.bit_length() - a.denominator.bit_length()
    return exponent if a >= Fraction(2) ** exponent else exponent - 1


def mx_step(largest, rule):
    """The scale of a block with this largest magnitude, as the words of a rule for MXFP4 or MXFP8 say it."""
    if largest == 0:
        return Fraction(1, 2**127)
    words = re.fullmatch(
        r"2\^(?:(ceil|round)\(log2\(M / (\d+)\)\)|\(floor\(log2 M'?\) - (\d)\)(?:, M' = M rounded to (\d) bits? .*, ties up)?)",
        rule.scale,
    )
    how, share, less, bits = words.groups()
    if how:
        share = largest / int(share)
        exponent = floor_log2(share)
        beyond = share / Fraction(2) ** exponent  # from 1 to below 2
        exponent += beyond > 1 if how == "ceil" else beyond**2 > 2
    else:
        if bits:
            quantum = Fraction(2) ** (floor_log2(largest) - int(bits))
            largest = math.floor(largest / quantum + Fraction(1, 2)) * quantum
        exponent = floor_log2(largest) - int(less)
    return Fraction(2) ** min(max(exponent, -127), 127)


#: target: the sizes of its element's numbers, in the order of their codes.
MX_SIZES = {"mxfp4": [float_of(code, 2, 1) for code in range(8)], "mxfp8": [e4m3(code) for code in range(127)]}


def mx_number(quotient, rule):
    """The nearest number of a rule's element; of two that are equally near, that which the rule has."""
    sizes = MX_SIZES[rule.target]
    above = min(bisect.bisect_left(sizes, abs(quotient)), len(sizes) - 1)
    below = max(above - 1, 0)
    to_below, to_above = abs(quotient) - sizes[below], sizes[above] - abs(quotient)
    if to_below == to_above:
        code = below if rule.ties == "zero" or below % 2 == 0 else above
    else:
        code = below if to_below < to_above else above
    return sizes[code] if quotient >= 0 else -sizes[code]


def quantised_by_rationals(row, side):
    """What a mode makes of one row of Fractions, one element at a time. side: "int16", "int8", or a rule for an MX format."""
    result = []
    for start in range(0, len(row), 32):
        group = row[start : start + 32]
        largest = max(map(abs, group))
        if isinstance(side, Rule):
            step = mx_step(largest, side)
            result += [mx_number(v / step, side) * step for v in group]
            continue
        step = {"int16": int16_step, "int8": int8_step}[side](largest)
        integers = [round(v / step) for v in group]  # half to even
        assert max(map(abs, integers)) <= {"int16": 32640, "int8": 127}[side]
        result += [q * step for q in integers]
    return result


def naive_forward(experts, x, ids, weights, mask, router_weight, activations="bf16", rounded=()):
    """The definition, one scalar at a time: exact but for the activation, which is Python's float.

    rounded: the names of the matrices whose weights rounding="folded" rounds to bfloat16.
    """

    @functools.cache
    def weights_of(expert, projection):
        """Each row's weights, with their factor."""
        matrix = experts.matrix(expert, projection)
        n, k = matrix.shape
        rows = [[weight_of(matrix, row, i, matrix.name in rounded) for i in range(k)] for row in range(n)]
        return [[w * factor_of(matrix, row) for w in of_row] for row, of_row in enumerate(rows)]

    mode = mode_of(activations)
    sides = dict.fromkeys(("gate", "up"), mode.x) | {"down": mode.h}

    def linear(expert, projection, a):
        matrix = experts.matrix(expert, projection)
        side = activations if activations in ("int16", "int8") else sides[projection]
        a = quantised_by_rationals(a, side) if side else a
        bias = [Fraction(0)] * matrix.shape[0] if matrix.bias is None else [Fraction(float(b)) for b in matrix.bias]
        return [
            b + sum(w * v for w, v in zip(of_row, a, strict=True))
            for b, of_row in zip(bias, weights_of(expert, projection), strict=True)
        ]

    def act(g, u):
        alpha, limit = (float(np.float32(v)) for v in (experts.activation.alpha, experts.activation.limit))
        g, u = min(float(g), limit), max(-limit, min(float(u), limit))
        return Fraction((u + experts.activation.up_offset) * g / (1 + math.exp(min(-alpha * g, 700.0))))

    y = [[Fraction(0)] * experts.hidden for _ in x]
    for t in range(len(x)):
        for expert, r in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if not 0 <= expert < experts.num_experts or not mask[expert]:
                continue
            a, r = [Fraction(float(v)) for v in x[t]], Fraction(r)
            if router_weight == "expert_input":
                a = [nearest_bfloat16(Fraction(float(np.float32(float(v * r))))) for v in a]
            g, u = (linear(expert, p, a) for p in ("gate", "up"))
            h = [act(*pair) for pair in zip(g, u, strict=True)]
            h = [nearest_bfloat16(v * r if router_weight == "down_input" else v) for v in h]
            d = linear(expert, "down", h)
            y[t] = [s + (r * v if router_weight == "down_output" else v) for s, v in zip(y[t], d, strict=True)]
    return np.array([[float(v) for v in row] for row in y])
