"""What many tests share: random experts and batches, a comparison with the float64 reference, and bits to compare."""

from __future__ import annotations

import math
import multiprocessing
import os
from dataclasses import replace

import ml_dtypes
import numpy as np

from ktmoe import BF16 as B16
from ktmoe import MXFP4, SILU, ExpertWeights, GatedActivation, Matrix, MoELayer, Scale, WeightFormat, int4, reference
from ktmoe._native import core
from ktmoe.experts import PROJECTIONS
from ktmoe.machine import numa
from ktmoe.weights import formats
from ktmoe.weights.elements import E2M1, E4M3, E5M2, INT4, INT8_PLUS_128, UINT4, Element
from ktmoe.weights.formats import F16, F32, FP8_PER_ROW, MXFP8, fp8, int8, nvfp4, uint4
from ktmoe.weights.offsets import Minimum, ZeroPoint
from ktmoe.weights.order import AWQ, GPTQ, TRANSPOSED
from ktmoe.weights.scales import Factor

BF16 = np.dtype(ml_dtypes.bfloat16)
DEEPSEEK = GatedActivation(limit=10.0)
GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
#: Scale bytes, or exponent fields of bfloat16 numbers, for weights of about 1/sqrt(k) at a k of a few hundred.
SCALES = (119, 124)
#: The groups that may share a bfloat16 or an fp16 scale.
GROUPS = (32, 64, 128)
LONGEST = int4(GROUPS[-1])
#: What git-lfs leaves in the place of a file that it has not fetched.
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


def integers(bits: int, zero: int) -> Element:
    """Integers of so many bits, stored plus `zero`."""
    return Element(f"{bits} bits less {zero}", "int", tuple(float(code - zero) for code in range(1 << bits)))


def minima_of(element: Element) -> WeightFormat:
    """fp16 scales and minima of 32, which are added."""
    scale = Scale("fp16", (1, 32))
    return WeightFormat(element, scale, offset=Minimum(scale, added=True))


def super_scaled(element: Element, group: int, minima: bool = False, kind: str = "int8") -> WeightFormat:
    """Integers as scales, and as minima, with fp16 super-scales of 256."""
    scales = Scale(kind, (1, group)), Scale("fp16", (1, 256))
    return WeightFormat(element, *scales, offset=Minimum(*scales) if minima else None)


#: Minima and super-scales: what rows carry sums for, or has headers of two levels. Integers of fewer than 8 bits, in planes.
SUPER_SCALED = {
    "fp16 minima": minima_of(UINT4),
    "super-32": super_scaled(INT4, 32),
    "super-32 minima": super_scaled(UINT4, 32, True),
    "int6 super-16": super_scaled(integers(6, 32), 16),
    "int5 fp16": WeightFormat(integers(5, 16), Scale("fp16", (1, 32))),
    "int5 fp16 minima": minima_of(integers(5, 0)),
    "int5 super-32 minima": super_scaled(integers(5, 0), 32, True),
    "int3 super-16": super_scaled(integers(3, 4), 16, kind="int6"),
    "int2 super-16 minima": super_scaled(integers(2, 0), 16, True, "uint4"),
    "int2 super-256": WeightFormat(integers(2, 1), Scale("fp16", (1, 256))),
}
#: What ktmoe's kernels have.
FORMATS = {
    "mxfp4": MXFP4,
    **{f"int4-{group}": int4(group) for group in GROUPS},
    "int4-fp16": int4(32, "fp16"),
    **{f"gptq-{group}": uint4(group, order=GPTQ, plus=1) for group in GROUPS},
    "gptq-sym-128": int4(128, "fp16", GPTQ),
    "awq-128": uint4(128, order=AWQ),
    "nvfp4": nvfp4(),
    "nvfp4 divided": nvfp4(divides=True),
    "mxfp8": MXFP8,
    "fp8": fp8(),
    "fp8-bf16": fp8("bf16"),
    "fp8-row": FP8_PER_ROW,
    "int8-row": int8(),
    "int8-64": int8(64),
    "int8+128": int8(128, "fp16", INT8_PLUS_128),
    "int8-block": int8(128, "fp32", rows=128),
    **SUPER_SCALED,
    "b16": B16,
    "f16": F16,
    "f32": F32,
}
#: Codes of 8 bits and more in the other order that they may have: packing differs, kernels do not.
TURNED = {
    f"{name} transposed": replace(FORMATS[name], order=TRANSPOSED)
    for name in ("b16", "f16", "f32", "fp8", "fp8-bf16", "fp8-row", "mxfp8", "int8-64", "int5 fp16")
}
#: All formats: FORMATS, TURNED and the loaders' own, and some of no loader and no kernel, which the reference has.
ALL_FORMATS = {
    **formats.FORMATS,
    **FORMATS,
    **TURNED,
    "minima": WeightFormat(
        UINT4, Scale("fp16", (1, 32)), Scale("fp32", (1, 256)), Minimum(Scale("fp16", (1, 32))), Factor(per_row=True)
    ),
    "zero points in rows": WeightFormat(UINT4, Scale("bf16", (1, 32)), offset=ZeroPoint((1, 64))),
    "e5m2": WeightFormat(E5M2, Scale("ue8m0", (2, 32)), factor=Factor(per_row=False, divides=True)),
    "e4m3 scales alone": WeightFormat(E4M3, Scale("e4m3", (1, 16))),
}
#: What to pass to random_experts for weights that kernels treat apart: each format, and formats that differ by projection.
WEIGHTS = {
    "folded": {},
    "unfolded": {"fold": False},
    **{name: {"formats": weight_format} for name, weight_format in FORMATS.items() if weight_format != MXFP4},
    "mxfp8 unfolded": {"formats": MXFP8, "fold": False},
    "all three": {"formats": {"gate": MXFP4, "up": LONGEST, "down": B16}},
    "group lengths": {"formats": {"gate": int4(64), "up": LONGEST, "down": MXFP4}},
}
#: One for each kind of kernel, for tests that are not about formats.
KINDS = {
    name: WEIGHTS[name]
    for name in (
        *("folded", "unfolded", "int4-64", "gptq-128", "nvfp4", "super-32 minima", "mxfp8", "fp8", "int8-row", "int6 super-16"),
        *("int3 super-16", "int2 super-16 minima", "b16", "all three"),
    )
}
#: More of those that differ by projection.
MIXED = {
    "gate and up alike": {"formats": {"gate": int4(128), "up": int4(128), "down": int4(32)}},
    "b16 and int4": {"formats": {"gate": B16, "up": B16, "down": int4(128)}},
    "int4 and b16": {"formats": {"gate": int4(32), "up": B16, "down": LONGEST}},
    "int4 and mxfp4": {"formats": {"gate": LONGEST, "up": MXFP4, "down": int4(64)}},
    "codebooks": {"formats": {"gate": WeightFormat(E2M1, Scale("bf16", (1, 64))), "up": int4(64), "down": MXFP4}},
    "unfolded and int4": {"formats": {"gate": MXFP4, "up": MXFP4, "down": int4(32)}, "fold": False},
    "f8": {"formats": {"gate": fp8(), "up": FP8_PER_ROW, "down": MXFP8}},
    "q4 and f8": {"formats": {"gate": nvfp4(), "up": fp8("bf16"), "down": nvfp4(divides=True)}},
    "int": {
        "formats": {
            "gate": SUPER_SCALED["int5 super-32 minima"],
            "up": SUPER_SCALED["int3 super-16"],
            "down": SUPER_SCALED["int2 super-256"],
        }
    },
    "int8": {"formats": {"gate": int8(), "up": int8(32), "down": int8(64, "fp16", INT8_PLUS_128)}},
    "orders": {"formats": {"gate": uint4(64, order=GPTQ, plus=1), "up": uint4(128, order=AWQ), "down": int4(32, "fp16")}},
    "sums of x and none": {
        "formats": {"gate": SUPER_SCALED["super-32 minima"], "up": int4(32), "down": SUPER_SCALED["int6 super-16"]}
    },
    "transposed": {"formats": {"gate": TURNED["b16 transposed"], "up": B16, "down": TURNED["fp8-row transposed"]}},
}
#: Scale kinds that are floats: dtype as stored, bits of the exponent and of the significand.
FLOATS = {
    "bf16": (BF16, 8, 7),
    "fp16": (np.dtype(np.float16), 5, 10),
    "fp32": (np.dtype(np.float32), 8, 23),
    "e4m3": (np.dtype(np.uint8), 4, 3),
}
#: Scale kinds that are integers: the least and the greatest.
WHOLE = {"int8": (-128, 127), "int6": (-32, 31), "uint4": (0, 15)}
#: The same of codes that are numbers, by family.
NUMBERS = {"b16": "bf16", "f16": "fp16", "f32": "fp32"}
MANY_THREADS = 2 * (os.cpu_count() or 1)


def group_extents(weight_format: WeightFormat) -> dict[str, tuple[int, int]]:
    """(rows, columns) that share a number, by the names of the arrays that a format has besides codes and factor."""
    offset = weight_format.offset
    levels = {"scales": weight_format.scale, "super_scales": weight_format.super_scale, "offsets": offset}
    if isinstance(offset, Minimum):
        levels |= {"offsets": offset.scale, "super_offsets": offset.super_scale}
    return {label: level.extent for label, level in levels.items() if level}


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes 0 to 15 [..., k] as a checkpoint stores them: two a byte, low nibble = even k."""
    codes = np.asarray(codes, np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def random_floats(rng, kind, shape, low, high, zeros=True) -> np.ndarray:
    """Numbers of both signs of a scale kind that is a float, as a checkpoint stores them.

    low, high: their exponents, as bfloat16's exponent fields have them, cut off at the kind's least and greatest.
    zeros: whether one in 16 is a zero of either sign.
    """
    dtype, exponents, significand = FLOATS[kind]
    bias = (1 << exponents - 1) - 1
    bottom, top = np.clip(np.array([low, high]) - 127 + bias, 0, (1 << exponents) - (1 if kind == "e4m3" else 2))
    unsigned = np.dtype(f"u{dtype.itemsize}")
    fields = rng.integers(bottom, top, shape, dtype=unsigned, endpoint=True)
    bits_ = fields << significand | rng.integers(0, 1 << significand, shape, dtype=unsigned)
    if kind == "e4m3":
        bits_ = np.where(bits_ == 0x7F, 0x7E, bits_)  # NaN
    if zeros:
        bits_ = np.where(rng.integers(0, 16, shape), bits_, 0)
    return (bits_ | rng.integers(0, 2, shape) << 8 * dtype.itemsize - 1).astype(unsigned).view(dtype)


def random_bfloat16(rng, shape, low, high) -> np.ndarray:
    """Numbers of both signs whose exponent fields are uniform in [low, high]; one in 16 is a zero of either sign."""
    return random_floats(rng, "bf16", shape, low, high)


def random_arrays(rng, weight_format: WeightFormat, count, n, k, scales=SCALES, fold=True) -> dict[str, np.ndarray]:
    """The arrays of so many matrices [n, k] of any format, by name, [count, ...] each; scales, fold: random_experts()'s."""
    low, high = scales
    element, expected = weight_format.element, weight_format.arrays(n, k)
    if element.family in ("f8", "int"):  # as large weights as q4's
        shift = int(np.log2(max(abs(value) for value in element.values if value is not None))) - 2
        low, high = max(low - shift, 0), max(high - shift, 0)
    middle = 127
    if weight_format.factor and weight_format.scale and weight_format.scale.kind == "e4m3":
        middle = (low + high) // 2  # is the factor's affair, as E4M3 has no such small numbers
        low, high = low - middle + 127, high - middle + 127

    def numbers(label, scale, low, high):
        shape = count, *expected[label][1]
        if scale.kind in FLOATS:
            # a zero for many rows would hide too much
            return random_floats(rng, scale.kind, shape, low, high, zeros=scale.extent[0] == 1)
        if scale.kind in WHOLE:  # its super-scale is as much smaller
            return rng.integers(*WHOLE[scale.kind], shape, dtype=scale.dtype, endpoint=True)
        stored = rng.integers(low, high, shape, dtype=np.uint8, endpoint=True)
        if label == "scales" and not fold:
            stored[:, 0, 0] = 0
        return stored

    def supers(scale):
        less = int(WHOLE[scale.kind][1]).bit_length() if scale.kind in WHOLE else 0
        return (low - less, high - less) if less else (125, 126)

    def any_bits(label):
        dtype, shape = expected[label]
        unsigned = np.dtype(f"u{dtype.itemsize}")
        return rng.integers(0, 1 << 8 * unsigned.itemsize, (count, *shape), dtype=unsigned).view(dtype)

    arrays = {}
    if weight_format.scale:
        arrays["scales"] = numbers("scales", weight_format.scale, low, high)
    if element.family in NUMBERS:
        arrays["codes"] = random_floats(rng, NUMBERS[element.family], (count, *expected["codes"][1]), low, high)
    elif None in element.values:
        known = np.array([code for code, value in enumerate(element.values) if value is not None], np.uint8)
        arrays["codes"] = rng.choice(known, (count, *expected["codes"][1]))
    else:
        arrays["codes"] = any_bits("codes")
        if element.family == "int":
            arrays["codes"] &= arrays["codes"].dtype.type((1 << element.bits) - 1)
    if weight_format.super_scale:
        arrays["super_scales"] = numbers("super_scales", weight_format.super_scale, *supers(weight_format.scale))
    if isinstance(weight_format.offset, Minimum):
        arrays["offsets"] = numbers("offsets", weight_format.offset.scale, low, high)
        if weight_format.offset.super_scale:
            ends = supers(weight_format.offset.scale)
            arrays["super_offsets"] = numbers("super_offsets", weight_format.offset.super_scale, *ends)
    elif isinstance(weight_format.offset, ZeroPoint):
        arrays["offsets"] = any_bits("offsets")
        if arrays["offsets"].dtype == np.uint8:
            arrays["offsets"] &= 15
    if weight_format.factor:
        ends = (low, high) if weight_format.scale is None and element.family not in NUMBERS else (middle - 1, middle)
        shape = count, *expected["factor"][1]
        exponents = np.clip(rng.integers(*ends, shape, endpoint=True) - 127, -126, 126)
        significands = rng.integers(1 << 23, 1 << 24, shape) / (1 << 23) * rng.choice([-1, 1], shape)
        divides = weight_format.factor.divides
        arrays["factor"] = np.ldexp(significands, -exponents if divides else exponents).astype(np.float32)
    return {label: arrays[label] for label in expected}


def whole(hidden, intermediate, formats) -> tuple[int, int]:
    """Both sizes, rounded up to whole items of the codes' arrays of all three matrices."""
    gate, up, down = (formats[projection].code_unit for projection in PROJECTIONS)
    units = math.lcm(down[0], gate[1], up[1]), math.lcm(gate[0], up[0], down[1])
    return tuple(-(-size // unit) * unit for size, unit in zip((hidden, intermediate), units, strict=True))


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
    """Uniform codes and scale bytes; random_floats() where scales, or weights of b16, are such numbers. Factors are of either
    sign and not zero.

    hidden, intermediate: rounded up to whole items of the formats' arrays, see whole().
    formats: of all matrices, or by projection.
    scales: the least and the greatest byte of scales, or exponent field as bfloat16 has it; of weights of b16, too. For codes
    of 8 bits, whose values are larger, so much less that weights are as large as q4's. Where a factor is the only scale, it has
    these.
    fold: if not, byte 0 occurs once in every matrix with UE8M0 scales, so that no kernel may fold them.
    """
    formats = dict.fromkeys(PROJECTIONS, formats) if isinstance(formats, WeightFormat) else formats
    hidden, intermediate = whole(hidden, intermediate, formats)
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    ends = {"gate": scales, "up": scales, "down": down_scales or scales}
    arrays = {p: random_arrays(rng, formats[p], num_experts, *shapes[p], ends[p], fold) for p in PROJECTIONS}
    added = {p: rng.standard_normal((num_experts, shapes[p][0])).astype(np.float32) for p in PROJECTIONS} if biases else None

    def read(expert, projection):
        stored = {label: array[expert] for label, array in arrays[projection].items()}
        bias = added[projection][expert] if added else None
        return Matrix(f"experts.{expert}.{projection}", formats[projection], shapes[projection], bias=bias, **stored)

    return ExpertWeights(num_experts, hidden, intermediate, read, formats, activation)


def unsigned(experts: ExpertWeights, keys=None) -> ExpertWeights:
    """The same experts, but for the signs of scales that are floats: none has one, of all matrices or of some."""

    def read(*key):
        matrix = experts.matrix(*key)
        return matrix if keys is not None and key not in keys else replace(matrix, scales=np.abs(matrix.scales))

    return reading(experts, read)


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


def unaligned(array: np.ndarray) -> np.ndarray:
    """The same numbers, one byte behind where they should be."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = memory[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    assert not array.size or moved.flags.aligned == (array.dtype.alignment == 1)
    return moved


def folds(layer: MoELayer, fold: bool = True) -> bool:
    """Whether a layer's kernels fold scales that can be folded: those that multiply in bfloat16 do."""
    return fold and layer.backend in ("amx", "avx512_bf16")


def rounds(layer: MoELayer, rounding: str = "folded") -> bool:
    """Whether a layer made with this `rounding` rounds weights whose scales are bfloat16 numbers, where it can."""
    return rounding == "folded" and layer.backend == "amx"


def folds_format(layer: MoELayer, weight_format: WeightFormat, fold: bool = True) -> bool:
    """Whether a layer's kernels fold the scales of a matrix of this format: UE8M0's where their bytes allow it, which is what
    fold says; E4M3's always, but on amx alone."""
    kind = weight_format.scale.kind if weight_format.scale else None
    return (kind == "ue8m0" and folds(layer, fold)) or (kind == "e4m3" and layer.backend == "amx")


def assert_folds(layer: MoELayer, experts: ExpertWeights, fold: bool = True) -> None:
    """A layer's kernels fold the scales that can be folded exactly, and no others; fold as in random_experts()."""
    expected = {p: folds_format(layer, weight_format, fold) for p, weight_format in experts.formats.items()}
    assert core.folded(layer.packed) == {(e, p): expected[p] for e in range(experts.num_experts) for p in PROJECTIONS}


def shards_of(layer: MoELayer, experts: ExpertWeights) -> list[tuple[int, int]]:
    """What each of a layer's shards has of the intermediate dimension."""
    return numa.split(experts.intermediate, experts.shard_unit, layer.placement.shards)


def settings_of(layer: MoELayer, experts: ExpertWeights, dtype) -> dict:
    """What the reference has to be told of a layer, for x of this dtype; all of it but the mask."""
    return {
        "router_weight": layer.router_weight,
        "out_dtype": "float32" if dtype == np.float32 else "bfloat16",
        "activations": layer.activations,
        "rounding": layer.rounding,
        "tuned_for": layer.tuned_for,
        "shards": shards_of(layer, experts),
    }


def assert_right(layer: MoELayer, experts: ExpertWeights, x, ids, weights, y=None, computed=None) -> np.ndarray:
    """forward() against the reference; returns y. All of the reference's bounds must be finite, or nothing was compared.

    computed: a dictionary of what the reference has computed for these experts and this batch; no expert is masked then."""
    if y is None:
        y = layer.forward(x, ids, weights)
    settings, computed = settings_of(layer, experts, x.dtype), {} if computed is None else computed
    if repr(settings) not in computed:
        computed[repr(settings)] = reference.forward(experts, x, ids, weights, expert_mask=layer.expert_mask, **settings)
    expected = computed[repr(settings)]
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
