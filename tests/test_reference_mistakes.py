"""No mistake hides in the float64 reference's bound: one wrong code, scale or row, or another way of rounding, leaves it."""

from dataclasses import replace

import numpy as np
import pytest
from reference_experts import BFLOAT16, random_batch, random_experts
from simulated import label, options, simulated_forward

from ktmoe.experts import ExpertWeights
from ktmoe.reference import dequantize, forward, round_bfloat16
from ktmoe.weights.elements import E5M2, UINT4
from ktmoe.weights.formats import BF16, FP8_PER_ROW, MXFP4, MXFP8, WeightFormat, fp8, int4, nvfp4, uint4
from ktmoe.weights.offsets import Minimum
from ktmoe.weights.order import AWQ, GPTQ, Order
from ktmoe.weights.scales import Scale


def differ_somewhere(rng, arrays, where):
    """Codes and scales of one expert, as from_arrays takes them, with one mistake."""
    codes, *scales = (array.copy() for array in arrays)
    row = rng.integers(codes.shape[1])
    if where == "row":
        codes[0, [row, row - 1]] = codes[0, [row - 1, row]]
        return codes, *scales
    array = scales[0] if where == "scale" else codes
    bits = array.view(np.uint16) if array.dtype == BFLOAT16 else array
    at = 0, row, rng.integers(array.shape[2])
    if bits.dtype == np.uint16:
        bits[at] ^= 1 << rng.integers(4, 7)  # one of the significand's upper bits
    else:
        bits[at] ^= 1 if where == "scale" else 1 << rng.integers(8)
    return codes, *scales


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
@pytest.mark.parametrize(
    ("format", "kind"),
    [
        *((MXFP4, kind) for kind in ("vdpbf16ps", "amx", "int16", "int8")),
        *((int4(32), kind) for kind in ("fma", "int16", "int8", "amx folded")),
        *((replace(nvfp4(), factor=None), kind) for kind in ("int16", "int8")),
        (BF16, "fma"),
        (BF16, "amx"),
    ],
    ids=label,
)
def test_one_mistake_leaves_the_bound(format, kind, projection):
    rng = np.random.default_rng(5)
    experts = random_experts(rng, 1, 64, 64, format=format)
    tokens = 128 if kind == "int8" else 16  # of 8 bits, many an h stays the same
    x, ids, _ = random_batch(rng, experts, tokens, top_k=1)
    weights = np.ones((tokens, 1))
    reference = forward(experts, x, ids, weights, out_dtype="float32", **options(kind))
    matrices = {p: experts.matrix(0, p) for p in ("gate", "up", "down")}
    arrays = {p: tuple(v[None] for v in (m.codes, m.scales) if v is not None) for p, m in matrices.items()}

    def error(changed):
        wrong = ExpertWeights.from_arrays(**arrays | {projection: changed}, format=format)
        if np.allclose(dequantize(wrong.matrix(0, projection)), dequantize(matrices[projection]), rtol=0, atol=1e-30):
            return np.inf  # -0 or a denormal instead of 0, or a mistake that a scale of 0 hides
        return reference.worst(simulated_forward(wrong, x, ids, weights, "down_output", kind, rng))

    for where in ("code", "scale", "row"):
        if where != "scale" or format.scale:
            for _ in range(4):
                assert error(differ_somewhere(rng, arrays[projection], where)) > 1, where


def with_stored(experts, format=None, **change):
    """The same experts, read as another format, or with other arrays of every matrix: change(matrix), by name."""
    format = format or experts.formats["up"]

    def read(expert, projection):
        matrix = experts.matrix(expert, projection)
        return replace(matrix, format=format, **{label: of(matrix) for label, of in change.items()})

    sizes = experts.num_experts, experts.hidden, experts.intermediate
    return ExpertWeights(*sizes, read, format, experts.activation)


def rolled(label, axis):
    return {label: lambda matrix: np.ascontiguousarray(np.roll(getattr(matrix, label), 1, axis=axis))}


def exchanged_nibbles(matrix):
    return (matrix.codes >> 4 | matrix.codes << 4).astype(matrix.codes.dtype)


GPTQ_64, AWQ_64 = uint4(64, order=GPTQ, plus=1), uint4(64, order=AWQ)
FP32_MINIMA = WeightFormat(UINT4, Scale("fp32", (1, 32)), offset=Minimum(Scale("fp32", (1, 32))))

#: name: (format, what is wrong: another format, or other arrays)
MISREAD = {
    "a factor that divides": (nvfp4(), {"format": nvfp4(divides=True)}),
    "a divisor that multiplies": (nvfp4(divides=True), {"format": nvfp4()}),
    "no factor": (nvfp4(), {"factor": lambda matrix: np.ones_like(matrix.factor)}),
    "factors of other rows": (FP8_PER_ROW, rolled("factor", 0)),
    "scales of other rows": (fp8(), rolled("scales", 0)),
    "scales of other columns": (fp8(), rolled("scales", 1)),
    "scales of 16 beside": (nvfp4(), rolled("scales", 1)),
    "scales of other groups": (GPTQ_64, rolled("scales", 0)),
    "e5m2": (MXFP8, {"format": replace(MXFP8, element=E5M2), "codes": lambda matrix: matrix.codes & 0xBF}),
    "zero points off by one": (GPTQ_64, {"format": uint4(64, order=GPTQ)}),
    "zero points off by one, awq": (AWQ_64, {"format": uint4(64, order=AWQ, plus=1)}),
    "zero points of other groups": (AWQ_64, rolled("offsets", 0)),
    "zero points of other rows": (GPTQ_64, rolled("offsets", 1)),
    "nibbles in order": (AWQ_64, {"format": replace(AWQ_64, order=Order("in order", "n", True))}),
    "nibbles out of order": (GPTQ_64, {"format": replace(GPTQ_64, order=Order("mixed", "k", True, AWQ.nibbles))}),
    "low nibble, odd k": (nvfp4(), {"codes": exchanged_nibbles}),
    "minima that are added": (FP32_MINIMA, {"offsets": lambda matrix: -matrix.offsets}),
    "minima of other groups": (FP32_MINIMA, rolled("offsets", 1)),
}


@pytest.mark.parametrize("mistake", MISREAD)
def test_what_is_misread_leaves_the_bound(mistake):
    format, wrong = MISREAD[mistake]
    rng = np.random.default_rng(21)
    experts = random_experts(rng, 1, 256, 256, format=format)
    x, ids, _ = random_batch(rng, experts, 8, top_k=1)
    weights = np.ones((8, 1))
    reference = forward(experts, x, ids, weights, out_dtype="float32")
    for kind in ("fma", "amx"):
        right, misread = (
            simulated_forward(of, x, ids, weights, "down_output", kind, rng) for of in (experts, with_stored(experts, **wrong))
        )
        assert reference.worst(right) <= 1
        assert np.median(reference.error(misread)) > 10


@pytest.mark.parametrize("mistake", ["none", "no rounding", "truncated", "ties away", "coarser", "one maximum a row"])
def test_a_mistake_in_int16_leaves_the_bound(mistake, monkeypatch):
    def mistaken(a):
        groups = a.astype(np.float64).reshape(len(a), -1, 32)
        largest = np.abs(groups).max(axis=2 if mistake != "one maximum a row" else (1, 2), keepdims=True)
        steps = np.ldexp(1.0, np.frexp(largest)[1] - 15 + (mistake == "coarser")) * np.ones((1, groups.shape[1], 1))
        nearest = {"truncated": np.trunc, "ties away": lambda v: np.copysign(np.floor(np.abs(v) + 0.5), v)}.get(
            mistake, np.rint
        )
        return nearest(groups / steps).astype(np.int64).reshape(a.shape), steps[..., 0].astype(np.float32)

    rng = np.random.default_rng(18)
    experts = random_experts(rng, 1, 128, 64)
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=1)
    x = (x.astype(np.float32) ** 3).astype(BFLOAT16)
    reference = forward(experts, x, ids, weights, out_dtype="float32", activations="int16")
    monkeypatch.setattr("simulated.int16_rows", mistaken)
    kind = "fma" if mistake == "no rounding" else "int16"
    ratio = reference.worst(simulated_forward(experts, x, ids, weights, "down_output", kind, rng))
    assert ratio <= 1 if mistake == "none" else ratio > 1


@pytest.mark.parametrize(
    "mistake", ["none", "no rounding", "truncated", "ties away", "step not rounded", "128", "one maximum a row"]
)
def test_a_mistake_in_int8_leaves_the_bound(mistake, monkeypatch):
    def mistaken(a):
        groups = a.astype(np.float64).reshape(len(a), -1, 32)
        largest = np.abs(groups).max(axis=2 if mistake != "one maximum a row" else (1, 2), keepdims=True)
        steps = largest / (128 if mistake == "128" else 127) * np.ones((1, groups.shape[1], 1))
        steps = steps if mistake == "step not rounded" else round_bfloat16(steps)
        nearest = {"truncated": np.trunc, "ties away": lambda v: np.copysign(np.floor(np.abs(v) + 0.5), v)}.get(
            mistake, np.rint
        )
        return nearest(groups / steps).astype(np.int64).reshape(a.shape), steps[..., 0].astype(np.float32)

    rng = np.random.default_rng(18)
    experts = random_experts(rng, 1, 128, 64)
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=1)
    x = np.rint(8 * x.astype(np.float64)) / 2  # halves, of which many are ties
    x[:, ::32] = 127.0
    reference = forward(experts, x, ids, weights, out_dtype="float32", activations="int8")
    monkeypatch.setattr("simulated.int8_rows", mistaken)
    kind = "fma" if mistake == "no rounding" else "int8"
    ratio = reference.worst(simulated_forward(experts, x, ids, weights, "down_output", kind, rng))
    assert ratio <= 1 if mistake == "none" else ratio > 1
