"""What many tests share: random experts and batches, a comparison with the float64 reference, and bits to compare."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np

from ktmoe import SILU, ExpertWeights, GatedActivation, MoELayer, reference

BF16 = np.dtype(ml_dtypes.bfloat16)
DEEPSEEK = GatedActivation(limit=10.0)
GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
#: Scale bytes for weights of about 1/sqrt(k) at a k of a few hundred.
SCALES = (119, 124)
MANY_THREADS = 2 * (os.cpu_count() or 1)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes 0 to 15 [..., k] as a checkpoint stores them: two a byte, low nibble = even k."""
    codes = np.asarray(codes, np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def random_experts(
    rng, num_experts, hidden, intermediate, *, scales=SCALES, down_scales=None, fold=True, biases=False, activation=SILU
) -> ExpertWeights:
    """Uniform codes and scale bytes. scales: the least and the greatest byte. Not fold: byte 0 occurs once in every matrix, so
    that no kernel may fold its scales."""

    def pair(n, k, low, high):
        bytes_ = rng.integers(low, high, (num_experts, n, -(-k // 32)), dtype=np.uint8, endpoint=True)
        if not fold:
            bytes_[:, 0, 0] = 0
        return rng.integers(0, 256, (num_experts, n, k // 2), dtype=np.uint8), bytes_

    gate, up = pair(intermediate, hidden, *scales), pair(intermediate, hidden, *scales)
    down = pair(hidden, intermediate, *(down_scales or scales))
    rows = {"gate": intermediate, "up": intermediate, "down": hidden}
    added = {p: rng.standard_normal((num_experts, n)).astype(np.float32) for p, n in rows.items()} if biases else None
    return ExpertWeights.from_arrays(gate, up, down, biases=added, activation=activation)


def random_batch(rng, experts, tokens, top_k, dtype=BF16):
    """x, expert_ids, expert_weights; ids may repeat within a token."""
    x = rng.standard_normal((tokens, experts.hidden)).astype(dtype)
    ids = rng.integers(0, experts.num_experts, (tokens, top_k))
    return x, ids, rng.standard_normal((tokens, top_k)).astype(np.float32)


def bits(array: np.ndarray) -> np.ndarray:
    """An array's bits as unsigned integers, so that NaN equals itself and -0 does not equal 0."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and np.array_equal(bits(a), bits(b))


def folds(layer: MoELayer, fold: bool = True) -> bool:
    """Whether a layer's kernels fold scales that can be folded: those that multiply in bfloat16 do."""
    return fold and layer.backend == "avx512_bf16"


def assert_right(layer: MoELayer, experts: ExpertWeights, x, ids, weights, y=None) -> np.ndarray:
    """forward() against the reference; returns y. All of the reference's bounds must be finite, or nothing was compared."""
    if y is None:
        y = layer.forward(x, ids, weights)
    expected = reference.forward(
        experts,
        x,
        ids,
        weights,
        expert_mask=layer.expert_mask,
        router_weight=layer.router_weight,
        out_dtype="float32" if x.dtype == np.float32 else "bfloat16",
        activations=layer.activations,
    )
    assert np.isfinite(expected.bound).all()
    actual = y.view(BF16) if y.dtype == np.uint16 else y
    worst = expected.worst(actual)
    assert worst <= 1, f"error is {worst:.3g} of its bound at {np.unravel_index(expected.error(actual).argmax(), y.shape)}"
    return y
