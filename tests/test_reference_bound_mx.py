"""The reference's bound where x and h are MXFP4 or MXFP8: each form of rows stays within it, mistakes do not."""

import numpy as np
import pytest
from helpers import DEEPSEEK, GPT_OSS
from reference_experts import BFLOAT16, odd_experts, random_batch, random_experts
from simulated import EDGES, FORMATS, INTEGERS, edges_of, kinds_of, label, mx_rows, mx_scales, simulated_forward, worst

from ktmoe.machine.numa import split
from ktmoe.modes import mode_of
from ktmoe.quantization.rules import RULES
from ktmoe.reference import ROUTER_WEIGHTS, forward, integer_unit, linear, operand
from ktmoe.weights.activation import SILU

MODES = ("mxfp4", "mxfp8", "mxfp8/mxfp4", "mxfp4:gguf/mxfp8:round", "mxfp4/bf16", "bf16/mxfp8")


#: Forms of integers hold the numbers of MXFP4 alone.
OF_INTEGERS = ("int16", "int8 powers")


def ways(format):
    """Kinds of simulated backends, each with one of MODES; together they have each mode."""
    kinds = kinds_of(format)
    of_bf16 = [kind for kind in kinds if kind not in INTEGERS]
    first = FORMATS.index(format)
    return [(kind, MODES[(first + at) % len(MODES)]) for at, kind in enumerate(of_bf16)] + [
        (kind, "mxfp4") for kind in OF_INTEGERS if "int8" in kinds
    ]


@pytest.mark.cover("values")
@pytest.mark.parametrize(("format", "kind", "mode"), [(format, *way) for format in FORMATS for way in ways(format)], ids=label)
@pytest.mark.parametrize("seed", range(len(ROUTER_WEIGHTS)), ids=ROUTER_WEIGHTS)
def test_a_simulated_backend_stays_within_the_bound(seed, format, kind, mode):
    rng, router_weight = np.random.default_rng(seed), ROUTER_WEIGHTS[seed]
    activation = (SILU, DEEPSEEK, GPT_OSS)[(seed + len(kind)) % 3]
    experts = odd_experts(rng, format, activation, large_scales=seed % 2 == 0)
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=2)
    ratio, of_all = worst(experts, x, ids, weights, kind, rng, router_weight, mode=mode)
    assert ratio <= 1
    assert np.isfinite(of_all.bound).all()


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    ("format", "case", "kind", "mode"),
    [
        (format, case, *way)
        for format in FORMATS
        for at, case in enumerate(edges_of(format))
        for way in (ways(format)[at % len(ways(format))], ways(format)[-1])
    ],
    ids=label,
)
def test_a_simulated_backend_stays_within_the_bound_at_the_edges(case, format, kind, mode):
    scale_bytes, down_bytes, exponents = EDGES[case]
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 1, 72, 36, format=format, scale_bytes=scale_bytes, down_bytes=down_bytes)
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=1)
    x = (x.astype(np.float64) * np.ldexp(1.0, rng.integers(*exponents, x.shape))).astype(BFLOAT16)
    ratio, of_all = worst(experts, x, ids, weights, kind, rng, mode=mode)
    assert ratio <= 1
    bounded = np.isfinite(of_all.bound)
    assert bounded.any() or case == "overflow"
    assert bounded.all() or "overflow" in case


@pytest.mark.parametrize(("kind", "mode"), [("fma", "mxfp8"), ("amx", "mxfp8/mxfp4"), ("int8 powers", "mxfp4")])
def test_with_shards_a_simulated_backend_stays_within_the_bound(kind, mode):
    rng = np.random.default_rng(7)
    experts = random_experts(rng, 1, 96, 160)
    x, ids, weights = random_batch(rng, experts, tokens=8, top_k=1)
    ratio, sharded = worst(experts, x, ids, weights, kind, rng, shards=split(160, 32, 3), mode=mode)
    assert ratio <= 1
    assert np.array_equal(sharded.y, forward(experts, x, ids, weights, activations=mode).y)


@np.errstate(invalid="ignore")
@pytest.mark.parametrize("format", [f for f in FORMATS if integer_unit(f)], ids=label)
@pytest.mark.parametrize("scale_bytes", [(119, 124), (1, 8)], ids=["ordinary", "tiny"])
def test_the_bound_of_mxfp4_is_that_of_bf16_rows_and_covers_integers(format, scale_bytes):
    rng = np.random.default_rng(8)
    gate = random_experts(rng, 1, 164, 32, format=format, scale_bytes=scale_bytes).matrix(0, "gate")
    x = np.ldexp(rng.standard_normal((4, gate.shape[1])), 100 if scale_bytes[0] == 1 else 0)
    x = operand(*(x.astype(BFLOAT16).astype(np.float64),) * 3, mode_of("mxfp4").x)[0]
    y, bound = linear(gate, x, np.zeros_like(x), activations="mxfp4")
    assert np.isfinite(bound).all()
    for activations in ("bf16", "int16", "int8"):
        same, other = linear(gate, x, np.zeros_like(x), activations=activations)
        assert np.array_equal(same, y)
        assert (other <= bound * (1 + 2.0**-20)).all()  # it allows an integer's tiny scale to be off by twice what it can be
        assert activations != "bf16" or np.array_equal(other, bound)


def scaled(scales):
    """Rows whose blocks have other scales than they should."""
    return lambda a, rule: mx_rows(a, rule, lambda blocks, rule: scales(blocks, rule) * np.ones_like(blocks))


def halves(blocks, rule):
    tokens, count, k = blocks.shape
    return np.repeat(mx_scales(blocks.reshape(tokens, 2 * count, k // 2), rule), k // 2, axis=2).reshape(blocks.shape)


def one_number_off(a, rule):
    """Rows that are wrong: in each, the largest of the first block becomes a smaller number."""
    rows = mx_rows(a, rule)
    at = np.arange(len(rows)), np.abs(rows[:, :32]).argmax(axis=1)
    rows[at] *= np.float32(0.75 if rule.target == "mxfp4" else 0.875)
    return rows


#: What simulated.mx_rows() is, if it is wrong.
MISTAKES = {
    "scales of the blocks beside": scaled(lambda blocks, rule: np.roll(mx_scales(blocks, rule), 1, axis=1)),
    "a scale too large": scaled(lambda blocks, rule: 2 * mx_scales(blocks, rule)),
    "one scale a row": scaled(lambda blocks, rule: mx_scales(blocks.reshape(len(blocks), 1, -1), rule)),
    "blocks of 16": scaled(halves),
    "one number off": one_number_off,
    "ties down": lambda a, rule: mx_rows(np.nextafter(a.astype(np.float32), np.float32(0)), rule),
    "ties away": lambda a, rule: mx_rows(a.astype(np.float32) * np.float32(1 + 2.0**-20), rule),
    "another rule": lambda a, rule: mx_rows(a, RULES[rule.target, "floor"]),
    "x not rounded": None,
    "h not rounded": None,
    "x before bfloat16": None,
    "h before bfloat16": None,
}


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("mistake", ["none", *MISTAKES])
def test_a_mistake_leaves_the_bound(mistake, mode, monkeypatch):
    rng = np.random.default_rng(18)
    experts = random_experts(rng, 1, 128, 64)
    x, ids, weights = random_batch(rng, experts, tokens=64, top_k=1)
    x = x.astype(np.float32)
    if mistake == "x before bfloat16":
        x = rng.standard_normal(x.shape, np.float32)
    reference = forward(experts, x, ids, weights, out_dtype="float32", activations=mode)
    if MISTAKES.get(mistake):
        monkeypatch.setattr("simulated.mx_rows", MISTAKES[mistake])
    if mistake == "h before bfloat16":
        monkeypatch.setattr("simulated.BFLOAT16", np.float32)
    of_x, of_h = mode_of(mode).x, mode_of(mode).h
    rules = None if mistake == "x not rounded" else of_x, None if mistake == "h not rounded" else of_h
    ratio = reference.worst(simulated_forward(experts, x, ids, weights, "down_output", "fma", rng, rules=rules))
    assert ratio <= 1 if mistake == "none" else ratio > 1
