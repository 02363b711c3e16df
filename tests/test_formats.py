"""A codebook is data: any 16 bfloat16 numbers with a zero among them compute right, and any others are refused."""

import ml_dtypes
import numpy as np
import pytest
from helpers import DEEPSEEK, assert_right, random_batch, random_experts

from ktmoe import BF16, MXFP4, ExpertWeights, Matrix, MoELayer, Scale, WeightFormat, backends, int4
from ktmoe.errors import FormatError
from ktmoe.weights.formats import E2M1

UE8M0 = Scale("ue8m0", (1, 32))
CODEBOOKS = {
    "E2M1 in another order": tuple(np.roll(E2M1, 5).tolist()),
    "integers": tuple(float(n) for n in range(-8, 8)),
    "NF4-like": (*np.linspace(-1, 1, 15).astype(ml_dtypes.bfloat16).astype(float).tolist(), 0.0),
    "large": tuple(float(n) * 2.0**60 for n in range(-8, 8)),
    "small": tuple(float(n) * 2.0**-60 for n in range(-8, 8)),
    "positive": tuple(float(n) for n in range(16)),
    "negative": tuple(-float(n) for n in range(16)),
    "sixteens": (-16.0, 16.0, *(float(n) for n in range(-6, 8))),
    "seventeens": (-17.0, 17.0, *(float(n) for n in range(-6, 8))),
    "the least unit": tuple(float(n) * 2.0**-8 for n in range(-8, 8)),
    "less than that": tuple(float(n) * 2.0**-9 for n in range(-8, 8)),
}
#: Those that int16 and int8 can compute: integers of at most 16 times a power of two from 2**-8 to 1.
WHOLE = {"E2M1 in another order", "integers", "positive", "negative", "sixteens", "the least unit"}
SCALES = {"folded": UE8M0, "unfolded": UE8M0, "bf16": Scale("bf16", (1, 64))}


def with_codebooks(experts, **codebooks):
    """The same bytes, read through other codebooks."""
    formats = {p: WeightFormat("q4", codebooks.get(p, E2M1), UE8M0) for p in ("gate", "up", "down")}

    def read(expert, projection):
        m = experts.matrix(expert, projection)
        return Matrix(m.name, formats[projection], m.shape, m.codes, m.scales, m.bias)

    return ExpertWeights(experts.num_experts, experts.hidden, experts.intermediate, read, formats, experts.activation)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_codebooks(backend, codebook, scale):
    """The scales bring a codebook's values back to where outputs are moderate."""
    rng = np.random.default_rng(1)
    values = CODEBOOKS[codebook]
    shift = -round(np.log2(np.abs(values).max() / 6))
    weight_format = WeightFormat("q4", values, SCALES[scale])
    scales = 119 + shift, 124 + shift
    experts = random_experts(rng, 2, 100, 72, formats=weight_format, scales=scales, fold=scale == "folded", activation=DEEPSEEK)
    with MoELayer(experts, backend) as layer:
        first = backends.get(backend).modes[0]
        assert layer.activations == (first if codebook in WHOLE else "bf16")
        for tokens in (1, 20):
            assert_right(layer, experts, *random_batch(rng, experts, tokens, 2, np.float32))


@pytest.mark.parametrize(("codebook", "scales"), [("small", (2, 60)), ("small", (50, 120)), ("large", (100, 150))])
def test_a_product_may_leave_the_range_of_its_factors(backend, codebook, scales):
    """Weights of 2**-185 to 2**-66, or up to 2**86: each factor is a normal number, but folding must know both."""
    rng = np.random.default_rng(4)
    codebook = CODEBOOKS[codebook]
    experts = with_codebooks(random_experts(rng, 2, 64, 64, scales=scales, down_scales=(119, 124)), gate=codebook, up=codebook)
    x, ids, weights = random_batch(rng, experts, 8, 2, np.float32)
    factor = 2.0 ** -(np.log2(np.abs(codebook).max()) + scales[1] - 127)
    with MoELayer(experts, backend) as layer:
        assert_right(layer, experts, x * np.float32(np.clip(factor, 2.0**-80, 2.0**80)), ids, weights)


@pytest.mark.parametrize("which", [("gate",), ("up",), ("down",), ("gate", "up")])
def test_each_projection_has_a_codebook_of_its_own(backend, which):
    rng = np.random.default_rng(2)
    codebook = CODEBOOKS["E2M1 in another order"]
    experts = with_codebooks(random_experts(rng, 2, 64, 64, activation=DEEPSEEK), **dict.fromkeys(which, codebook))
    with MoELayer(experts, backend) as layer:
        for tokens in (1, 3, 20):
            assert_right(layer, experts, *random_batch(rng, experts, tokens, 2, np.float32))


@pytest.mark.parametrize("value", [0.1, 1 + 2.0**-8, float("nan"), float("inf"), 2.0**-140])
def test_a_value_that_is_no_bfloat16_number_is_refused(value):
    """As it could not be computed exactly. 2**-140 is below bfloat16's denormals."""
    with pytest.raises(FormatError, match=r"codebook.*bfloat16.*found"):
        WeightFormat("q4", (*E2M1[:15], value), UE8M0)


def test_a_codebook_needs_a_zero_to_pad_with():
    with pytest.raises(FormatError, match="codebook must contain 0"):
        WeightFormat("q4", tuple(float(n) for n in range(1, 17)), UE8M0)


def test_what_a_format_says_of_itself():
    assert MXFP4.description == "q4 with ue8m0 scales per 1x32"
    assert MXFP4.nbytes(2048, 4096) == 2048 * 4096 * 17 // 32
    assert MXFP4.nbytes(3, 34) == 3 * (17 + 2)
    assert MXFP4.codes_shape(3, 34) == (3, 17)
    assert Scale("ue8m0", (128, 128)).shape(129, 100) == (2, 1)
    assert int4(128).description == "q4 with bf16 scales per 1x128"
    assert int4(128).nbytes(7168, 2048) == 7168 * 2048 // 2 + 7168 * 16 * 2
    assert int4(128).nbytes(3, 130) == 3 * (65 + 2 * 2)
    assert int4(32).codebook == tuple(range(-8, 8))
    assert BF16.description == "b16"
    assert BF16.nbytes(3, 33) == 2 * 3 * 33
    assert BF16.codes_shape(3, 33) == (3, 33)
    assert (MXFP4.codes_per_item, int4(64).codes_per_item, BF16.codes_per_item) == (2, 2, 1)
    with pytest.raises(FormatError, match=r"family 'q5' is unknown"):
        WeightFormat("q5", E2M1, UE8M0)
    with pytest.raises(FormatError, match="16 entries, found 15"):
        WeightFormat("q4", E2M1[:15], UE8M0)
    with pytest.raises(FormatError, match=r"kind 'fp3' is unknown.*ue8m0.*bf16"):
        Scale("fp3", (1, 32))
    with pytest.raises(FormatError, match=r"extent must be at least 1 x 1, found \(1, 0\)"):
        int4(0)
    with pytest.raises(FormatError, match="q4 weights need a scale"):
        WeightFormat("q4", E2M1)
    for surplus in ({"codebook": E2M1}, {"scale": UE8M0}):
        with pytest.raises(FormatError, match="b16 weights have neither a codebook nor a scale"):
            WeightFormat("b16", **surplus)


@pytest.mark.parametrize("byte", [1, 2, 126, 128, 252, 253, 254])
@pytest.mark.parametrize("codebook", ["NF4-like", "with a denormal", "zeros"])
def test_no_scale_byte_is_folded_that_would_not_be_exact(backend, codebook, byte):
    """Where the largest entry is below 2, the range of bytes ends with what the subtraction allows, not with bfloat16's."""
    rng = np.random.default_rng(byte)
    values = {"with a denormal": (*CODEBOOKS["NF4-like"][:14], 2.0**-130, 0.0), "zeros": (0.0,) * 16}.get(codebook)
    values = values or CODEBOOKS[codebook]
    experts = random_experts(rng, 1, 64, 64, scales=(byte, byte), down_scales=(119, 124))
    experts = with_codebooks(experts, gate=values, up=values)
    x, ids, weights = random_batch(rng, experts, 3, 1, np.float32)
    x *= np.float32(2.0 ** np.clip(127 - byte, -100, 100))
    with MoELayer(experts, backend) as layer:
        assert_right(layer, experts, x, ids, weights)
