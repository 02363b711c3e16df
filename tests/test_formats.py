"""A 4-bit element is data: any 16 bfloat16 numbers compute right, and any others are refused. What a format says of itself."""

from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from helpers import ALL_FORMATS, DEEPSEEK, TURNED, assert_right, folds, integers, random_batch, random_experts

from ktmoe import BF16, MXFP4, ExpertWeights, Matrix, MoELayer, Scale, WeightFormat, backends, int4
from ktmoe._native import core
from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.weights.elements import BFLOAT16, E2M1, E4M3, E5M2, FP16, FP32, INT4, INT8, INT8_PLUS_128, UINT4, Element
from ktmoe.weights.formats import FP8_PER_MATRIX, FP8_PER_ROW, MXFP8, fp8, int8, nvfp4, uint4
from ktmoe.weights.offsets import Minimum, ZeroPoint
from ktmoe.weights.order import AWQ, GPTQ, TRANSPOSED, Order
from ktmoe.weights.scales import Factor

UE8M0 = Scale("ue8m0", (1, 32))
VALUES = {
    "E2M1 in another order": tuple(np.roll(E2M1.values, 5).tolist()),
    "integers": tuple(float(n) for n in range(-8, 8)),
    "NF4-like": (*np.linspace(-1, 1, 15).astype(ml_dtypes.bfloat16).astype(float).tolist(), 0.0),
    "without a zero": tuple(n + 0.5 for n in range(-8, 8)),
    "large": tuple(float(n) * 2.0**60 for n in range(-8, 8)),
    "small": tuple(float(n) * 2.0**-60 for n in range(-8, 8)),
    "positive": tuple(float(n) for n in range(16)),
    "negative": tuple(-float(n) for n in range(16)),
    "sixteens": (-16.0, 16.0, *(float(n) for n in range(-6, 8))),
    "seventeens": (-17.0, 17.0, *(float(n) for n in range(-6, 8))),
    "the least unit": tuple(float(n) * 2.0**-8 for n in range(-8, 8)),
    "less than that": tuple(float(n) * 2.0**-9 for n in range(-8, 8)),
}
ELEMENTS = {name: Element(name, "q4", values) for name, values in VALUES.items()}
#: The elements that int16 and int8 can compute: integers of at most 16 times a power of two from 2**-8 to 1.
WHOLE = {"E2M1 in another order", "integers", "without a zero", "positive", "negative", "sixteens", "the least unit"}
SCALES = {
    "folded": UE8M0,
    "unfolded": UE8M0,
    "bf16": Scale("bf16", (1, 64)),
    "fp16": Scale("fp16", (1, 32)),
    "e4m3": Scale("e4m3", (1, 16)),
    "none": None,
}
#: Scales that such values take to where outputs are moderate: e4m3 and fp16 have few exponents.
GO_TOGETHER = [
    (values, scale)
    for values, scale in product(VALUES, SCALES)
    if values not in ("large", "small") or scale in ("folded", "unfolded", "bf16")
]


def with_elements(experts, **elements):
    """The same bytes, whose codes stand for other values."""
    formats = {p: WeightFormat(elements.get(p, E2M1), UE8M0) for p in ("gate", "up", "down")}

    def read(expert, projection):
        return replace(experts.matrix(expert, projection), format=formats[projection])

    return ExpertWeights(experts.num_experts, experts.hidden, experts.intermediate, read, formats, experts.activation)


@pytest.mark.cover("values")
@pytest.mark.parametrize(("values", "scale"), GO_TOGETHER, ids=str)
def test_values(backend, values, scale):
    """The scales bring an element's values back to where outputs are moderate."""
    rng = np.random.default_rng(1)
    shift = -round(np.log2(np.abs(VALUES[values]).max() / 6))
    weight_format = WeightFormat(ELEMENTS[values], SCALES[scale])
    scales = 119 + shift, 124 + shift
    settings = {"fold": scale != "unfolded", "activation": DEEPSEEK}
    experts = random_experts(rng, 2, 100, 72, formats=weight_format, scales=scales, **settings)
    with MoELayer(experts, backend) as layer:
        first = backends.get(backend).modes[0]
        larger = values == "seventeens" and scale == "fp16"  # with the scales of IQ4_NL, integers of 127 at most
        assert layer.activations == (first if values in WHOLE or larger else "bf16")
        for tokens in (1, 20):
            assert_right(layer, experts, *random_batch(rng, experts, tokens, 2, np.float32))


@pytest.mark.parametrize(("values", "scales"), [("small", (2, 60)), ("small", (50, 120)), ("large", (100, 150))])
def test_a_product_may_leave_the_range_of_its_factors(backend, values, scales):
    """Weights of 2**-185 to 2**-66, or up to 2**86: each factor is a normal number, but folding must know both."""
    rng = np.random.default_rng(4)
    element = ELEMENTS[values]
    experts = with_elements(random_experts(rng, 2, 64, 64, scales=scales, down_scales=(119, 124)), gate=element, up=element)
    x, ids, weights = random_batch(rng, experts, 8, 2, np.float32)
    factor = 2.0 ** -(np.log2(np.abs(element.values).max()) + scales[1] - 127)
    with MoELayer(experts, backend) as layer:
        assert_right(layer, experts, x * np.float32(np.clip(factor, 2.0**-80, 2.0**80)), ids, weights)


@pytest.mark.parametrize("which", [("gate",), ("up",), ("down",), ("gate", "up")])
def test_each_projection_has_an_element_of_its_own(backend, which):
    rng = np.random.default_rng(2)
    element = ELEMENTS["E2M1 in another order"]
    experts = with_elements(random_experts(rng, 2, 64, 64, activation=DEEPSEEK), **dict.fromkeys(which, element))
    with MoELayer(experts, backend) as layer:
        for tokens in (1, 3, 20):
            assert_right(layer, experts, *random_batch(rng, experts, tokens, 2, np.float32))


@pytest.mark.cover("values")
@pytest.mark.parametrize("byte", [1, 2, 126, 128, 252, 253, 254])
@pytest.mark.parametrize("values", ["NF4-like", "with a denormal", "zeros"])
def test_no_scale_byte_is_folded_that_would_not_be_exact(backend, values, byte):
    """Where the largest value is below 2, the range of bytes ends with what the subtraction allows, not with bfloat16's."""
    rng = np.random.default_rng(byte)
    special = {"with a denormal": (*VALUES["NF4-like"][:14], 2.0**-130, 0.0), "zeros": (0.0,) * 16}
    element = Element(values, "q4", special.get(values) or VALUES[values])
    experts = random_experts(rng, 1, 64, 64, scales=(byte, byte), down_scales=(119, 124))
    experts = with_elements(experts, gate=element, up=element)
    x, ids, weights = random_batch(rng, experts, 3, 1, np.float32)
    x *= np.float32(2.0 ** np.clip(127 - byte, -100, 100))
    with MoELayer(experts, backend) as layer:
        assert_right(layer, experts, x, ids, weights)


@pytest.mark.parametrize(("least", "folded"), [(2.0**-126, True), (2.0**-127, False)], ids=["normal", "denormal"])
def test_no_denormal_value_is_folded(backend, least, folded):
    """Its bits have no exponent to which to add the scale's. Results cannot tell: the bound lets denormals be 0."""
    element = Element("small", "q4", (*(least * m for m in range(-7, 8)), 0.0))
    experts = random_experts(np.random.default_rng(5), 1, 64, 64, scales=(200, 253), down_scales=(119, 124))
    experts = with_elements(experts, gate=element, up=element)
    batch = random_batch(np.random.default_rng(6), experts, 3, 1, np.float32)
    with MoELayer(experts, backend) as layer:
        assert core.folded(layer.packed) == {(0, p): folds(layer) and (folded or p == "down") for p in PROJECTIONS}
        assert_right(layer, experts, *batch)


# What is refused


@pytest.mark.parametrize("value", [0.1, 1 + 2.0**-8, float("nan"), float("inf"), 2.0**-140])
def test_a_value_that_is_no_bfloat16_number_is_refused(value):
    """As it could not be computed exactly. 2**-140 is below bfloat16's denormals."""
    with pytest.raises(FormatError, match=r"other: an element's values must be finite bfloat16 numbers, found"):
        Element("other", "q4", (*E2M1.values[:15], value))


def test_elements_that_are_refused():
    with pytest.raises(FormatError, match=r"five: weight family 'q5' is unknown; known are q4, f8, int, b16"):
        Element("five", "q5", E2M1.values)
    with pytest.raises(FormatError, match="short: a q4 element has 16 values, found 15"):
        Element("short", "q4", E2M1.values[:15])
    with pytest.raises(FormatError, match="wide: a f8 element has 256 values, found 16"):
        Element("wide", "f8", E2M1.values)
    with pytest.raises(FormatError, match="given: a b16 element has 0 values, found 16"):
        Element("given", "b16", E2M1.values)
    with pytest.raises(FormatError, match="holes: every code of a q4 element must have a value"):
        Element("holes", "q4", (*E2M1.values[:15], None))
    with pytest.raises(FormatError, match="seven: a int element has 4, 8, 32, 64, 256 values, found 128"):
        Element("seven", "int", tuple(float(v) for v in range(128)))
    of_8_bits = tuple(reversed(INT8.values)), (*INT8.values[:255], None), tuple(v / 2 for v in INT8.values)
    for values in (
        *of_8_bits,
        tuple(float(v) for v in range(256)),
        (1.0, 2.0, 3.0, 4.0),
        (0.0, 1.0, 2.0, 4.0),
        (0.0, -1.0, -2.0, -3.0),
    ):
        with pytest.raises(
            FormatError,
            match="other: an int element's values are neighbouring integers with 0 among them; of 8 bits, -128 to 127, in "
            "two's complement or plus 128",
        ):
            Element("other", "int", values)
    assert Element("mine", "int", INT8.values).padding == 0
    assert Element("mine", "int", INT8_PLUS_128.values).padding == 128
    for bits in (2, 3, 5, 6):
        for zero in (0, 1, (1 << bits) - 1):
            element = integers(bits, zero)
            assert (element.bits, element.row_bits, element.padding) == (bits, 8, zero)


def test_parts_that_do_not_go_together():
    with pytest.raises(FormatError, match=r"kind 'fp3' is unknown.*ue8m0.*e4m3.*bf16.*fp16.*fp32"):
        Scale("fp3", (1, 32))
    for extent in ((1, 0), (0, 32)):
        with pytest.raises(FormatError, match=rf"extent must be at least 1 x 1, found \({extent[0]}, {extent[1]}\)"):
            Scale("bf16", extent)
    for extent in ((2, 32), (1, 0)):
        with pytest.raises(FormatError, match="zero point's extent must be 1 x at least 1, found"):
            ZeroPoint(extent)
    for surplus in ({"scale": UE8M0}, {"offset": Minimum(UE8M0)}):
        for element in (BFLOAT16, FP16, FP32):
            with pytest.raises(FormatError, match=f"{element.name} weights have neither scales nor offsets"):
                WeightFormat(element, **surplus)
    with pytest.raises(FormatError, match="super-scale needs a scale"):
        WeightFormat(E2M1, super_scale=UE8M0)
    for element in (E2M1, E4M3):
        with pytest.raises(FormatError, match=f"zero points need 4-bit integers of at most 16, found {element.name}"):
            WeightFormat(element, UE8M0, offset=ZeroPoint((1, 32)))
    for order in (GPTQ, AWQ):
        with pytest.raises(FormatError, match=f"order '{order.name}' is one of 4-bit codes, found E4M3"):
            WeightFormat(E4M3, UE8M0, order=order)


# What a format says of itself


def test_elements():
    assert E2M1.values[:8] == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert E2M1.values[8:] == tuple(-value for value in E2M1.values[:8])
    assert np.signbit(E2M1.values[8])
    assert INT4.values == tuple(range(-8, 8))
    assert UINT4.values == tuple(range(16))
    for element, dtype in ((E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)):
        expected = np.arange(256, dtype=np.uint8).view(dtype).astype(float)
        found = np.array([np.nan if value is None else value for value in element.values])
        assert np.array_equal(found, np.where(np.isfinite(expected), expected, np.nan), equal_nan=True)
        assert np.signbit(found[128])
    assert [code for code, value in enumerate(E4M3.values) if value is None] == [127, 255]
    assert (E4M3.values[1], E4M3.values[7], E4M3.values[8], E4M3.values[126]) == (2.0**-9, 7 * 2.0**-9, 2.0**-6, 448)
    assert (E2M1.padding, INT4.padding, UINT4.padding, E4M3.padding) == (0, 8, 0, 0)
    assert ELEMENTS["without a zero"].padding == 7
    assert [element.bits for element in (E2M1, E4M3, BFLOAT16)] == [4, 8, 16]


def test_descriptions():
    described = {
        MXFP4: "E2M1 with ue8m0 scales per 1x32",
        int4(128): "INT4 with bf16 scales per 1x128",
        BF16: "BF16",
        WeightFormat(E2M1): "E2M1",
        FP8_PER_ROW: "E4M3 with an fp32 factor per row",
        FP8_PER_MATRIX: "E4M3 with an fp32 factor per matrix",
        int8(): "INT8 with an fp32 factor per row",
        int8(32, "fp16", INT8_PLUS_128): "INT8 + 128 with fp16 scales per 1x32",
        int8(128, "fp32", rows=128): "INT8 with fp32 scales per 128x128",
        fp8("bf16"): "E4M3 with bf16 scales per 128x128",
        nvfp4(divides=True): "E2M1 with e4m3 scales per 1x16, an fp32 divisor per matrix",
        uint4(64, order=GPTQ): "UINT4 with fp16 scales per 1x64, zero points per 1x64, in gptq order",
        int4(128, "fp16", AWQ): "INT4 with fp16 scales per 1x128, in awq order",
        WeightFormat(E5M2, UE8M0, offset=Minimum(Scale("fp16", (1, 64)))): (
            "E5M2 with ue8m0 scales per 1x32, minima, fp16 per 1x64"
        ),
    }
    assert {weight_format.description: weight_format for weight_format in described} == {
        text: weight_format for weight_format, text in described.items()
    }


def test_bytes_and_shapes():
    assert MXFP4.nbytes(2048, 4096) == 2048 * 4096 * 17 // 32
    assert MXFP4.nbytes(3, 34) == 3 * (17 + 2)
    assert MXFP4.arrays(3, 34) == {"codes": (np.uint8, (3, 17)), "scales": (np.uint8, (3, 2))}
    assert MXFP8.nbytes(3, 33) == 3 * (33 + 2)
    assert Scale("ue8m0", (128, 128)).shape(129, 100) == (2, 1)
    assert int4(128).nbytes(7168, 2048) == 7168 * 2048 // 2 + 7168 * 16 * 2
    assert int4(128).nbytes(3, 130) == 3 * (65 + 2 * 2)
    assert BF16.arrays(3, 33) == {"codes": (ml_dtypes.bfloat16, (3, 33))}
    assert nvfp4().nbytes(3, 34) == 3 * (17 + 3) + 4
    assert FP8_PER_ROW.arrays(3, 33) == {"codes": (np.uint8, (3, 33)), "factor": (np.float32, (3,))}
    assert int8(64).arrays(3, 65) == {"codes": (np.uint8, (3, 65)), "scales": (ml_dtypes.bfloat16, (3, 2))}
    assert fp8().arrays(129, 257)["scales"] == (np.float32, (2, 3))
    gptq = uint4(64, order=GPTQ).arrays(24, 72)
    assert gptq == {"codes": (np.int32, (9, 24)), "scales": (np.float16, (2, 24)), "offsets": (np.int32, (2, 3))}
    awq = uint4(64, "bf16", order=AWQ).arrays(24, 72)
    assert awq == {"codes": (np.int32, (72, 3)), "scales": (ml_dtypes.bfloat16, (2, 24)), "offsets": (np.int32, (2, 3))}
    shapes = {MXFP4: (3, 34), int4(64, order=GPTQ): (3, 72), int4(64, order=AWQ): (24, 5), BF16: (3, 5)}
    for weight_format, (n, k) in shapes.items():
        assert weight_format.shape(weight_format.arrays(n, k)["codes"][1]) == (n, k)


def test_units():
    """What may not be cut, and what n and k are multiples of."""
    units = {
        MXFP4: ((1, 32), (1, 2)),
        BF16: ((1, 1), (1, 1)),
        fp8(): ((128, 128), (1, 1)),
        FP8_PER_ROW: ((1, 1), (1, 1)),
        nvfp4(): ((1, 16), (1, 2)),
        uint4(64): ((1, 64), (1, 2)),
        uint4(64, order=GPTQ): ((8, 64), (8, 8)),
        int4(64, order=GPTQ): ((1, 64), (1, 8)),
        uint4(128, order=AWQ): ((8, 128), (8, 8)),
        TURNED["b16 transposed"]: ((1, 1), (1, 1)),
        TURNED["fp8 transposed"]: ((128, 128), (1, 1)),
        int4(64, order=TRANSPOSED): ((8, 64), (8, 8)),
    }
    for weight_format, (unit, code_unit) in units.items():
        assert (weight_format.unit, weight_format.code_unit) == (unit, code_unit), weight_format.description


def test_equal_by_value():
    for name, weight_format in ALL_FORMATS.items():
        components = ("element", "scale", "super_scale", "offset", "factor", "order")
        same = WeightFormat(**{label: getattr(weight_format, label) for label in components})
        assert (same, hash(same)) == (weight_format, hash(weight_format)), name
    others = uint4(64, plus=1), uint4(64, "bf16"), uint4(64, order=GPTQ), uint4(64, order=AWQ), int4(64, "fp16")
    assert len({uint4(64), *others}) == 6
    assert WeightFormat(Element("E2M1", "q4", E2M1.values), UE8M0) == MXFP4
    assert nvfp4() != nvfp4(divides=True)
    assert Factor(per_row=True) != Factor(per_row=False)
    assert Order("gptq", transposed=True) == GPTQ


def test_a_matrix_has_the_arrays_of_its_format_and_no_others():
    arrays = uint4(32).empty(8, 32)
    Matrix("m", uint4(32), (8, 32), **arrays)
    for missing in arrays:
        with pytest.raises(FormatError, match=f"m {missing}: expected a numpy array, found NoneType"):
            Matrix("m", uint4(32), (8, 32), **(arrays | {missing: None}))
    for surplus in ("offsets", "factor", "super_scales"):
        with pytest.raises(FormatError, match=f"m {surplus}: expected none for E2M1 with ue8m0 scales per 1x32, found"):
            Matrix("m", MXFP4, (8, 32), **MXFP4.empty(8, 32), **{surplus: np.ones(1, np.float32)})
