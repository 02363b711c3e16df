"""The float64 reference's bound against backends simulated in float32 numpy: none leaves it, and it is tight."""

from fractions import Fraction

import numpy as np
import pytest
from helpers import DEEPSEEK, GPT_OSS, pack_nibbles
from reference_experts import BFLOAT16, from_codes, odd_experts, random_batch, random_experts
from simulated import EDGES, KINDS, PAIRS, edges_of, label, linear, linear_ratio, simulated_forward, simulated_linear, worst

from ktmoe.matrix import Matrix
from ktmoe.reference import EXP_RELATIVE_ERROR, ROUTER_WEIGHTS, TINY, UNIT, activate, forward, round_bfloat16
from ktmoe.weights.activation import SILU
from ktmoe.weights.elements import Element
from ktmoe.weights.formats import BF16, MXFP4, WeightFormat, int4
from ktmoe.weights.scales import Scale


@pytest.mark.cover("values")
@pytest.mark.parametrize(("format", "kind"), PAIRS, ids=label)
@pytest.mark.parametrize("seed", range(len(ROUTER_WEIGHTS)), ids=ROUTER_WEIGHTS)
def test_a_simulated_backend_stays_within_the_bound(seed, format, kind):
    rng, router_weight = np.random.default_rng(seed), ROUTER_WEIGHTS[seed]
    activation = (SILU, DEEPSEEK, GPT_OSS)[(seed + KINDS.index(kind)) % 3]
    experts = odd_experts(rng, format, activation, large_scales=seed % 2 == 0)
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=2)
    x[::2] = (x[::2].astype(np.float32) ** 3).astype(BFLOAT16)  # further apart: int16 rounds more of them
    ratio, reference = worst(experts, x, ids, weights, kind, rng, router_weight)
    assert ratio <= 1
    assert np.isfinite(reference.bound).all()


@pytest.mark.cover("values")
@pytest.mark.parametrize(("format", "kind", "case"), [(*pair, case) for pair in PAIRS for case in edges_of(pair[0])], ids=label)
def test_a_simulated_backend_stays_within_the_bound_at_the_edges(case, format, kind):
    scale_bytes, down_bytes, exponents = EDGES[case]
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 1, 72, 36, format=format, scale_bytes=scale_bytes, down_bytes=down_bytes)
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=1)
    x = (x.astype(np.float64) * np.ldexp(1.0, rng.integers(*exponents, x.shape))).astype(BFLOAT16)
    ratio, reference = worst(experts, x, ids, weights, kind, rng)
    assert ratio <= 1
    bounded = np.isfinite(reference.bound)
    assert bounded.any() or case == "overflow"
    assert bounded.all() or "overflow" in case
    assert case != "overflow" or not bounded.all()


# the bound is tight


def one_expert(gate, up, down, x):
    """forward and a simulated backend on one token and one expert, whose router weight is 1."""
    experts = from_codes(gate, up, down)
    arguments = experts, np.array([x]), np.zeros((1, 1), int), np.ones((1, 1), np.float32)
    simulated = simulated_forward(*arguments, "down_output", "vdpbf16ps", np.random.default_rng(0))
    return forward(*arguments, out_dtype="float32"), simulated


def test_the_accumulation_bound_is_almost_attained():
    # h = 4096, then 63 times 4096 u, each of which the float32 sum loses as a tie to even
    ones, zeros = np.full((64, 64), 2), np.zeros((64, 64), int)
    gate, up = zeros.copy(), zeros.copy()
    gate[:, 0] = 2
    up[0, 0] = 2
    up[1:, 1] = 2
    reference, simulated = one_expert(gate, up, ones, [64.0, 64 * UNIT] + [0.0] * 62)
    assert reference.y[0, 0] == 4096 + 63 * 4096 * UNIT
    assert simulated[0, 0] == 4096
    assert 0.9 < reference.worst(simulated) <= 1


def test_half_of_the_bound_within_32_k_is_attained_by_two_chains():
    # each chain is 1, then u many times, each of which it loses; the odd one ends by 2 u, which the sum of the two loses: of 31
    # roundings each loses all it can, but a product goes through 17 at most, where the bound has 33 for one chain
    a = np.array([[1.0, 1.0] + [UNIT, UNIT] * 15])
    a[0, 31] = 2 * UNIT
    matrix = Matrix("w", BF16, (1, 32), np.ones((1, 32), BFLOAT16))
    assert simulated_linear(matrix, a, "amx") == 2
    assert 0.46 < linear_ratio(matrix, a, "amx") < 0.5


def ones_int4(group, k):
    """int4 [1, k] that is all 1."""
    return Matrix("w", int4(group), (1, k), np.full((1, k // 2), 0x99, np.uint8), np.ones((1, -(-k // group)), BFLOAT16))


def test_the_bound_within_a_group_is_almost_attained():
    # a group's sum is 1, then 127 times u, each of which it loses; the total before is no part of that, however large it is
    a = np.array([[1.0] + [UNIT] * 127])
    assert 0.9 < linear_ratio(ones_int4(128, 128), a, "fma") <= 1
    two = ones_int4(128, 256)
    two.scales[0, 1] = 0.0
    y, bound = linear(two, np.hstack([a, a]))
    assert y == 1 + 127 * UNIT
    assert bound <= 1.1 * linear(ones_int4(128, 128), a)[1]


@pytest.mark.parametrize("kind", ["fma", "int16"])
def test_the_bound_of_the_sum_over_groups_is_almost_attained(kind):
    # the total is 1, then 511 groups whose sums are u, each of which it loses
    a = np.zeros((1, 32 * 512))
    a[0, ::32] = [1.0] + [UNIT] * 511
    assert 0.9 < linear_ratio(ones_int4(32, 32 * 512), a, kind) <= 1
    if kind == "int16":
        assert linear_ratio(ones_int4(32, 32 * 512), a, kind) > 0.99


def test_the_bound_of_the_sum_over_slots_is_almost_attained():
    # d = 1; the router weights are 1, then 127 times u, each of which the float32 sum loses
    experts = from_codes([[2, 0], [0, 0]], [[0, 2], [0, 0]], [[2, 0], [0, 0]])
    arguments = experts, np.array([[64.0, 1 / 64]]), np.zeros((1, 128), int), np.array([[1.0] + [UNIT] * 127])
    reference = forward(*arguments, out_dtype="float32")
    simulated = simulated_forward(*arguments, "down_output", "fma", np.random.default_rng(0))
    assert reference.y[0, 0] == 1 + 127 * UNIT
    assert simulated[0, 0] == 1
    assert 0.9 < reference.worst(simulated) <= 1


@pytest.mark.parametrize(("byte", "kind"), [(127, "vdpbf16ps"), (254, "vdpbf16ps"), (127, "amx")])
def test_a_flushed_partial_sum_is_within_the_bound(byte, kind):
    # the products +-2**-126 and their neighbours are normal numbers, their difference is not
    scale = Fraction(2) ** (byte - 127)
    a = np.ldexp([[1 + 2.0**-7, -1.0]], -120 if byte == 254 else -126)
    matrix = Matrix("w", MXFP4, (1, 2), pack_nibbles([[2, 2]]), np.array([[byte]], np.uint8))
    y, bound = linear(matrix, a)
    assert Fraction(float(y[0, 0])) == Fraction(float(a.sum())) * scale
    assert simulated_linear(matrix, a, kind) == 0
    assert y <= bound <= float(4 * Fraction(TINY) * max(scale, 1)) * 1.01


@pytest.mark.parametrize("kind", ["vdpbf16ps", "amx"])
def test_the_bound_of_flushed_sums_is_almost_attained(kind):
    # each product is the greatest below 2**-126 that two bfloat16 numbers have, and is lost
    a = np.full((1, 96), 255 / 128 * 2.0**-64)
    matrix = Matrix("w", BF16, (1, 96), np.full((1, 96), 255 / 128 * 2.0**-64, BFLOAT16))
    assert simulated_linear(matrix, a, kind) == 0
    assert 0.95 < linear_ratio(matrix, a, kind) <= 1


def test_a_total_is_flushed_by_amx_only_where_the_step_that_it_adds_is_not():
    tiny = np.zeros((1, 64))
    for values, lost in (
        ({0: 1 + 2.0**-7, 1: -1.0}, 2.0**-7),  # the chains' sum
        ({0: 1 + 2.0**-7, 32: -1.0}, 2.0**-7),  # the total
        ({0: 1.0, 32: 1 + 2.0**-7, 33: -1.0}, 2.0**-7),  # the chains' sum; the total then gets zero
        ({0: 1 + 2.0**-7, 2: -1.0, 1: 1.5, 3: -1.0, 32: 1.0}, 2.0**-7 + 0.5),  # both chains
    ):
        a = tiny.copy()
        a[0, list(values)] = list(values.values())
        matrix = Matrix("w", BF16, (1, 64), np.full((1, 64), TINY, BFLOAT16))
        y, bound = linear(matrix, a)
        assert np.abs(y - simulated_linear(matrix, a, "amx")) == lost * TINY < bound


def test_a_group_whose_unscaled_sum_overflows_has_no_bound():
    matrix = Matrix("w", MXFP4, (2, 2), pack_nibbles([[7, 7], [2, 0]]), np.array([[0], [0]], np.uint8))
    a = np.full((1, 2), 2.0**126)
    y, bound = linear(matrix, a)
    assert y.tolist() == [[6.0, 0.5]]
    assert simulated_linear(matrix, a, "portable").tolist() == [[np.inf, 0.5]]
    assert np.isinf(bound[0, 0])
    assert np.isfinite(bound[0, 1])


def test_a_zero_scale_does_not_undo_an_overflow():
    # a scale of 0 makes the group's infinite sum NaN; a finite one 0
    matrix = ones_int4(32, 64)
    matrix.scales[0, 0] = 0.0
    for exponent, finite in ((122, True), (123, False)):
        a = np.hstack([np.full((1, 32), 2.0**exponent), np.ones((1, 32))])
        y, bound = linear(matrix, a)
        assert y == 32
        assert np.isfinite(simulated_linear(matrix, a, "fma")) == finite
        assert not np.isfinite(bound) or finite
    assert np.isfinite(linear(matrix, np.full((1, 64), 2.0**119))[1])


@pytest.mark.parametrize("exponent", [126, 127])
def test_int16_overflows_where_the_sum_in_units_does(exponent):
    # E2M1's unit is 1/2, so that the sum of 2**127 * 1 is formed as 2 * 2**127
    matrix = Matrix("w", MXFP4, (1, 2), pack_nibbles([[2, 0]]), np.array([[100]], np.uint8))
    a = np.array([[2.0**exponent, 0.0]])
    for kind, finite in (("fma", True), ("int16", exponent < 127)):
        y, bound = linear(matrix, a, "int16" if kind == "int16" else "bf16")
        assert y == 2.0 ** (exponent - 27)
        assert np.isfinite(simulated_linear(matrix, a, kind)) == finite
        assert np.isfinite(bound) == finite


def test_a_flushed_weight_is_within_the_bound_of_bf16_only():
    numbers = np.ldexp([[1.0, 127 / 128, 1.0]], -126)  # the middle one is denormal
    a = np.ldexp([[1.0, 1.0, -1.0]], 120)
    small = WeightFormat(Element("small", "q4", (TINY, TINY * 127 / 128, -TINY) + (0.0,) * 13), Scale("ue8m0", (1, 32)))
    lost = 127 / 128 * 2.0**-6
    b16 = Matrix("w", BF16, (1, 3), numbers.astype(BFLOAT16))
    q4 = Matrix("w", small, (1, 4), pack_nibbles([[0, 1, 0, 3]]), np.array([[127]], np.uint8))
    for matrix, rows in ((b16, a), (q4, np.hstack([a, a[:, :1]]))):
        y, bound = linear(matrix, rows)
        simulated = simulated_linear(matrix, rows, "vdpbf16ps")
        assert np.abs(y - simulated) == lost
        assert lost <= bound <= 1.001 * lost
    normal = Matrix("w", BF16, (1, 3), np.abs(numbers + TINY).astype(BFLOAT16))
    assert linear(normal, a)[1] < 1e-6


def test_the_rounding_of_a_bias_is_within_the_bound():
    matrix = Matrix("w", MXFP4, (1, 2), pack_nibbles([[2, 0]]), np.array([[127]], np.uint8), np.ones(1, np.float32))
    a = np.array([[UNIT, 0.0]])
    y, bound = linear(matrix, a)
    assert y == 1 + UNIT
    assert simulated_linear(matrix, a, "portable") == 1
    assert UNIT <= bound <= 1.001 * UNIT


def test_a_router_weight_on_the_experts_input_rounds_to_float32_and_then_to_bfloat16():
    rng = np.random.default_rng(13)
    x = rng.integers(128, 256, 1_000_000) / 128  # all significands of bfloat16
    r = rng.random(len(x), dtype=np.float32)
    twice, once = round_bfloat16((x * r).astype(np.float32)), round_bfloat16(x * r)
    at = np.nonzero(twice != once)[0][0]
    experts = from_codes([[0, 2], [0, 0]], [[2, 0], [0, 0]], [[2, 0], [0, 0]])
    reference = forward(
        experts, [[x[at], 2.0**120]], [[0]], [[r[at]]], router_weight="expert_input", out_dtype="float32", columns=[0]
    )
    g = round_bfloat16(np.float32(2.0**120 * r[at]))
    assert reference.y == round_bfloat16(g * twice[at])


def test_a_sum_that_overflows_float32_has_no_bound():
    experts = from_codes([[2, 0], [0, 0]], [[0, 2], [0, 0]], [[2, 0], [0, 0]])
    for r, finite in ((1e36, True), (1e37, False)):
        reference = forward(experts, [[64.0, 1.0]], [[0]], [[r]], out_dtype="float32")
        assert np.isfinite(reference.bound[0, 0]) == finite


@pytest.mark.parametrize("activation", [SILU, DEEPSEEK, GPT_OSS], ids=["silu", "deepseek", "gpt-oss"])
@pytest.mark.parametrize("sign", [-1, 0, 1])
def test_the_activation_bound_holds_and_is_almost_attained(activation, sign):
    # every exp errs by the most that is allowed; g and u err by their own eps, which is 0 or larger than all other errors
    rng = np.random.default_rng(12)
    size = np.ldexp(1.0, rng.integers(-140, 12, 200_000)) * rng.uniform(1, 2, 200_000)
    g = (size * rng.choice([-1, 1], size.shape)).astype(np.float32)
    u = (8 * rng.standard_normal(size.shape)).astype(np.float32)
    alpha, limit, offset = (np.float32(getattr(activation, v)) for v in ("alpha", "limit", "up_offset"))
    for eps in (0.0, 1e-4):
        eps_g, eps_u = eps * np.abs(g.astype(np.float64)), eps * np.abs(u.astype(np.float64))
        with np.errstate(all="ignore"):
            h, bound = activate(activation, g.astype(np.float64), eps_g, u.astype(np.float64), eps_u)
            g_near = (g + 0.99 * rng.choice([-1, 1], g.shape) * eps_g).astype(np.float32) if eps else g
            u_near = (u + 0.99 * rng.choice([-1, 1], u.shape) * eps_u).astype(np.float32) if eps else u
            g_near, u_near = np.minimum(g_near, limit), np.clip(u_near, -limit, limit) + offset
            e = np.exp((-alpha * g_near).astype(np.float64)) * (1 + sign * 0.75 * EXP_RELATIVE_ERROR)
            e = np.where(e < TINY, 0, e).astype(np.float32)  # 0.75: the rest is the rounding to float32
            one = np.float32(1)
            sigmoid = one / (one + e)
            for simulated in (u_near * (g_near / (one + e)), u_near * (g_near * sigmoid), u_near * g_near * sigmoid):
                ratio = np.abs(simulated - h) / bound
                assert ratio.max() <= 1
                assert eps or not sign or ratio.max() > 0.5


@pytest.mark.parametrize("distance", [0, 2.0**-9])
def test_the_bound_allows_a_bfloat16_flip_at_a_tie_and_only_there(distance):
    # sigmoid(64) is 1 to within 2**-92, so that h = 64 u, and u = 1 + 2**-8 lies between the bfloat16 numbers 1 and 1 + 2**-7
    gate, up, down = ([[2, 0, 0, 0], [0, 0, 0, 0]], [[0, 2, 2, 2], [0, 0, 0, 0]], [[2, 0], [4, 0], [0, 0], [0, 0]])
    reference, simulated = one_expert(gate, up, down, [64.0, 1.0, 2.0**-8, -distance])
    assert reference.y.tolist() == simulated.tolist() == [[64, 128, 0, 0]]
    flipped = np.array([[64.5, 129, 0, 0]])
    if distance:
        assert reference.worst(flipped) > 1e4
    else:
        assert 0.999 < reference.worst(flipped) <= 1
        assert reference.worst(np.array([[65, 129, 0, 0]])) > 1.9


def test_the_bound_is_mostly_the_rounding_of_the_output():
    rng = np.random.default_rng(3)
    experts = random_experts(rng, 2, 256, 256)
    reference = forward(experts, *random_batch(rng, experts))
    half_ulp = 2.0**-9 * np.median(np.abs(reference.y))
    assert half_ulp / 2 <= np.median(reference.bound) <= 2 * half_ulp


def test_a_backend_that_adds_in_any_order_has_a_larger_bound():
    rng = np.random.default_rng(4)
    experts = random_experts(rng, 1, 1024, 64)
    arguments = experts, *random_batch(rng, experts, tokens=4, top_k=1)
    chain, any_order = (forward(*arguments, out_dtype="float32", block=block) for block in (32, 1024))
    assert np.allclose(chain.y, any_order.y, rtol=0, atol=1e-12 * np.abs(chain.y).max())
    assert np.median(any_order.bound / chain.bound) > 2
    assert 0 < any_order.worst(simulated_forward(*arguments, "down_output", "descending", rng)) <= 1
