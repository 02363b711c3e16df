"""Random experts for the tests of the float64 reference, with zeros, scales and biases of either sign."""

import ml_dtypes
import numpy as np
from helpers import GPT_OSS, pack_nibbles, random_arrays, whole

from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.matrix import Matrix
from ktmoe.weights.activation import SILU
from ktmoe.weights.formats import BF16, MXFP4

BFLOAT16 = ml_dtypes.bfloat16


def random_experts(
    rng,
    num_experts,
    hidden,
    intermediate,
    *,
    format=MXFP4,
    scale_bytes=(119, 124),
    down_bytes=None,
    activation=SILU,
    bias=False,
):
    """scale_bytes: the least and the greatest exponent of scales, or of b16 weights, as UE8M0 has it; bfloat16s may be <= 0.

    Other formats than 4 bits with UE8M0 or bfloat16 scales, and b16: as helpers.random_arrays() has them. Sizes are rounded up
    to whole items of the arrays.
    """
    hidden, intermediate = whole(hidden, intermediate, dict.fromkeys(PROJECTIONS, format))

    def numbers(shape, low, high):
        value = np.ldexp(rng.integers(128, 256, shape) / 128, rng.integers(low, high, shape, endpoint=True) - 127)
        return (value * rng.choice([-1, 1, 0], shape, p=[0.48, 0.48, 0.04])).astype(BFLOAT16)

    def matrices(n, k, low, high):
        if format == BF16:
            return (numbers((num_experts, n, k), low, high),)
        if format.element.bits != 4 or set(format.arrays(8, 8)) != {"codes", "scales"} or not format.order.rows:
            return tuple(random_arrays(rng, format, num_experts, n, k, (low, high)).values())
        codes, shape = rng.integers(0, 256, (num_experts, n, k // 2), dtype=np.uint8), (num_experts, *format.scale.shape(n, k))
        if format.scale.kind == "bf16":
            return codes, numbers(shape, low, high)
        if format.scale.kind == "ue8m0":
            return codes, rng.integers(low, high, shape, dtype=np.uint8, endpoint=True)
        return tuple(random_arrays(rng, format, num_experts, n, k, (low, high)).values())

    shapes = {"gate": intermediate, "up": intermediate, "down": hidden}
    biases = {p: rng.standard_normal((num_experts, n)).astype(np.float32) for p, n in shapes.items()} if bias else None
    gate, up = matrices(intermediate, hidden, *scale_bytes), matrices(intermediate, hidden, *scale_bytes)
    down = matrices(hidden, intermediate, *(down_bytes or scale_bytes))
    return ExpertWeights.from_arrays(gate, up, down, biases=biases, format=format, activation=activation)


def odd_experts(rng, format, activation, large_scales):
    """Two experts whose sizes are no multiples of 32, with biases if the activation is gpt-oss's."""
    return random_experts(
        rng,
        2,
        163 if format is BF16 else 164,
        70,
        format=format,
        scale_bytes=(122, 127) if large_scales else (119, 122),
        activation=activation,
        bias=activation is GPT_OSS,
    )


def random_batch(rng, experts, tokens=6, top_k=3):
    x = rng.standard_normal((tokens, experts.hidden)).astype(BFLOAT16)
    ids = rng.integers(0, experts.num_experts, (tokens, top_k))
    return x, ids, rng.random((tokens, top_k), dtype=np.float32)


def from_codes(gate, up, down, activation=SILU):
    """One expert with all scales 1 from the codes, [n, k] each."""

    def pair(codes):
        stored = pack_nibbles(codes)
        return stored[None], np.full((1, len(stored), -(-2 * stored.shape[1] // 32)), 127, np.uint8)

    return ExpertWeights.from_arrays(pair(gate), pair(up), pair(down), activation=activation)


def ones(format, n, k):
    """[n, k] that is all 1."""
    arrays = {label: np.zeros(shape, dtype) for label, (dtype, shape) in format.arrays(n, k).items()}
    code = format.element.values.index(1.0)
    arrays["codes"][:] = code | code << 4 if format.element.bits == 4 else code
    if format.scale:
        arrays["scales"][:] = {"e4m3": 0x38, "ue8m0": 127}.get(format.scale.kind, 1)
    if format.factor:
        arrays["factor"][:] = 1
    return Matrix("w", format, (n, k), **arrays)
