"""What many tests share: random experts and batches, a comparison with the float64 reference, and bits to compare."""

from __future__ import annotations

import multiprocessing
import os

import ml_dtypes
import numpy as np

from ktmoe import BF16 as B16
from ktmoe import MXFP4, SILU, ExpertWeights, GatedActivation, Matrix, MoELayer, Scale, WeightFormat, int4, reference
from ktmoe.experts import PROJECTIONS
from ktmoe.machine import numa
from ktmoe.weights.formats import E2M1

BF16 = np.dtype(ml_dtypes.bfloat16)
DEEPSEEK = GatedActivation(limit=10.0)
GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
#: Scale bytes, or exponent fields of bfloat16 numbers, for weights of about 1/sqrt(k) at a k of a few hundred.
SCALES = (119, 124)
#: The groups that may share a bfloat16 scale.
GROUPS = (32, 64, 128)
LONGEST = int4(GROUPS[-1])
FORMATS = {"mxfp4": MXFP4, **{f"int4-{group}": int4(group) for group in GROUPS}, "b16": B16}
#: What to pass to random_experts for weights that kernels treat apart: each format, and formats that differ by projection.
WEIGHTS = {
    "folded": {},
    "unfolded": {"fold": False},
    **{name: {"formats": weight_format} for name, weight_format in FORMATS.items() if weight_format != MXFP4},
    "all three": {"formats": {"gate": MXFP4, "up": LONGEST, "down": B16}},
    "group lengths": {"formats": {"gate": int4(64), "up": LONGEST, "down": MXFP4}},
}
#: More of those that differ by projection.
MIXED = {
    "gate and up alike": {"formats": {"gate": int4(128), "up": int4(128), "down": int4(32)}},
    "b16 and int4": {"formats": {"gate": B16, "up": B16, "down": int4(128)}},
    "int4 and b16": {"formats": {"gate": int4(32), "up": B16, "down": LONGEST}},
    "int4 and mxfp4": {"formats": {"gate": LONGEST, "up": MXFP4, "down": int4(64)}},
    "codebooks": {"formats": {"gate": WeightFormat("q4", E2M1, Scale("bf16", (1, 64))), "up": int4(64), "down": MXFP4}},
    "unfolded and int4": {"formats": {"gate": MXFP4, "up": MXFP4, "down": int4(32)}, "fold": False},
}
MANY_THREADS = 2 * (os.cpu_count() or 1)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes 0 to 15 [..., k] as a checkpoint stores them: two a byte, low nibble = even k."""
    codes = np.asarray(codes, np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def random_bfloat16(rng, shape, low, high) -> np.ndarray:
    """Numbers of both signs whose exponent fields are uniform in [low, high]; one in 16 is a zero of either sign."""
    fields = rng.integers(low, high, shape, dtype=np.uint16, endpoint=True)
    bits_ = fields << 7 | rng.integers(0, 128, shape, dtype=np.uint16)
    return (np.where(rng.integers(0, 16, shape), bits_, 0) | rng.integers(0, 2, shape) << 15).astype(np.uint16).view(BF16)


def random_experts(
    rng,
    num_experts,
    hidden,
    intermediate,
    *,
    formats: WeightFormat | dict[str, WeightFormat] = MXFP4,
    scales=SCALES,
    down_scales=None,
    fold=True,
    biases=False,
    activation=SILU,
) -> ExpertWeights:
    """Uniform codes and scale bytes; random_bfloat16() where scales, or weights of b16, are bfloat16 numbers.

    formats: of all matrices, or by projection. scales: the least and the greatest byte, or exponent field. Not fold: byte 0
    occurs once in every matrix with UE8M0 scales, so that no kernel may fold them.
    """
    formats = dict.fromkeys(PROJECTIONS, formats) if isinstance(formats, WeightFormat) else formats
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}

    def stored(projection, low, high):
        """(codes, scales) of all experts."""
        weight_format, shape = formats[projection], shapes[projection]
        if weight_format.scale is None:
            return random_bfloat16(rng, (num_experts, *shape), low, high), [None] * num_experts
        scales_shape = (num_experts, *weight_format.scale.shape(*shape))
        if weight_format.scale.kind == "bf16":
            scales_ = random_bfloat16(rng, scales_shape, low, high)
        else:
            scales_ = rng.integers(low, high, scales_shape, dtype=np.uint8, endpoint=True)
            if not fold:
                scales_[:, 0, 0] = 0
        return rng.integers(0, 256, (num_experts, *weight_format.codes_shape(*shape)), dtype=np.uint8), scales_

    arrays = {p: stored(p, *((down_scales or scales) if p == "down" else scales)) for p in PROJECTIONS}
    added = {p: rng.standard_normal((num_experts, shapes[p][0])).astype(np.float32) for p in PROJECTIONS} if biases else None

    def read(expert, projection):
        codes, scales_ = (array[expert] for array in arrays[projection])
        bias = added[projection][expert] if added else None
        return Matrix(f"experts.{expert}.{projection}", formats[projection], shapes[projection], codes, scales_, bias)

    return ExpertWeights(num_experts, hidden, intermediate, read, formats, activation)


def reading(experts: ExpertWeights, read) -> ExpertWeights:
    """The same experts, whose matrices are read another way."""
    sizes = experts.num_experts, experts.hidden, experts.intermediate
    return ExpertWeights(*sizes, read, experts.formats, experts.activation, experts.name)


def random_batch(rng, experts, tokens, top_k, dtype=BF16):
    """x, expert_ids, expert_weights; ids may repeat within a token."""
    x = rng.standard_normal((tokens, experts.hidden)).astype(dtype)
    ids = rng.integers(0, experts.num_experts, (tokens, top_k))
    return x, ids, rng.standard_normal((tokens, top_k)).astype(np.float32)


def crowd(layer: MoELayer, tokens, dtype=BF16):
    """x, expert_ids, expert_weights of tokens that all have one expert, 0, so that it has as many rows."""
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, layer.hidden)).astype(dtype)
    return x, np.zeros((tokens, 1), int), rng.standard_normal((tokens, 1)).astype(np.float32)


def bits(array: np.ndarray) -> np.ndarray:
    """An array's bits as unsigned integers, so that NaN equals itself and -0 does not equal 0."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and np.array_equal(bits(a), bits(b))


def folds(layer: MoELayer, fold: bool = True) -> bool:
    """Whether a layer's kernels fold scales that can be folded: those that multiply in bfloat16 do."""
    return fold and layer.backend in ("amx", "avx512_bf16")


def rounds(layer: MoELayer, rounding: str = "folded") -> bool:
    """Whether a layer made with this `rounding` rounds weights whose scales are bfloat16 numbers, where it can."""
    return rounding == "folded" and layer.backend == "amx"


def assert_folds(layer: MoELayer, experts: ExpertWeights, fold: bool = True) -> None:
    """A layer's kernels fold the scales that can be folded, UE8M0's, and no others; fold as in random_experts()."""
    scales = {p: weight_format.scale for p, weight_format in experts.formats.items()}
    expected = {p: folds(layer, fold) and scale is not None and scale.kind == "ue8m0" for p, scale in scales.items()}
    assert layer.packed.kernels() == {(e, p): expected[p] for e in range(experts.num_experts) for p in PROJECTIONS}


def shards_of(layer: MoELayer, experts: ExpertWeights) -> list[tuple[int, int]]:
    """What each of a layer's shards has of the intermediate dimension."""
    return numa.split(experts.intermediate, experts.shard_unit, layer.placement.shards)


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
        rounding=layer.rounding,
        shards=shards_of(layer, experts),
    )
    assert np.isfinite(expected.bound).all()
    actual = y.view(BF16) if y.dtype == np.uint16 else y
    worst = expected.worst(actual)
    assert worst <= 1, f"error is {worst:.3g} of its bound at {np.unravel_index(expected.error(actual).argmax(), y.shape)}"
    return y


def in_child(function, seconds=60):
    """What function returns in a forked child, which may take so long."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(function()))
    child.start()
    sender.close()
    try:
        assert receiver.poll(seconds), "the child hangs"
        return receiver.recv()
    finally:
        child.join(5)
        child.kill()
