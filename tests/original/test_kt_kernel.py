"""kt-kernel itself beside the numpy model of its roundings and beside ktmoe, where tools/test_kt_kernel.py has installed it."""

from __future__ import annotations

import numpy as np
import pytest
import rounding
from cases import (
    CLAMPS,
    EXPERTS,
    FORMATS,
    KINDS,
    MOST_TOKENS,
    MOVED,
    ON_GPU,
    TOP_K,
    batches,
    expected,
    experts,
    forward,
)
from helpers import BF16, random_experts
from original import Original, exported, needed, sizes

from ktmoe import MXFP4, MoELayer

pytestmark = needed
IDENTITY = np.arange(EXPERTS)
CASES = [(kind, clamps) for kind, (name, _) in KINDS.items() for clamps in (CLAMPS if name == "MXFP4" else ["silu"])]


def add_layer(original: Original, kind: str, clamps: str = "silu", **options) -> None:
    group = FORMATS[KINDS[kind][0]].group
    keywords = {"mask": ON_GPU, "logical": IDENTITY} | options
    limit, alpha = CLAMPS[clamps].limit, CLAMPS[clamps].alpha
    original.layer(
        name="layer", kind=kind, top_k=TOP_K, most_tokens=MOST_TOKENS, group=group, limit=limit, alpha=alpha, **keywords
    )


@pytest.fixture(scope="module")
def theirs(exists, tmp_path_factory):
    """What kt-kernel returns for batch(), float64, by class and clamps, each in a process of its own."""

    def run(kind, clamps):
        if kind not in exists:
            pytest.skip(f"this CPU lacks what kt-kernel's {kind} needs")
        if (kind, clamps) not in done:
            original = Original(experts(KINDS[kind][0], clamps))
            add_layer(original, kind, clamps)
            for part, (x, ids, weights) in enumerate(batches()):
                original.forward(layer="layer", x=x, ids=ids, weights=weights, out=str(part))
            answer = original.run(tmp_path_factory.mktemp("forward"))
            done[kind, clamps] = np.concatenate([answer[str(part)] for part in range(len(batches()))]).view(BF16)
        return done[kind, clamps].astype(np.float64)

    done = {}
    return run


@pytest.mark.parametrize(("kind", "clamps"), CASES)
def test_the_model_is_kt_kernel(theirs, kind, clamps):
    """All of its classes: token counts, a mask, ids of nobody and repeated ones, clamps."""
    name, roundings = KINDS[kind]
    model, _ = expected(name, clamps, roundings)
    assert np.isfinite(model.bound).all()
    assert model.worst(theirs(kind, clamps)) <= 1


@pytest.mark.parametrize(("kind", "clamps"), CASES)
def test_ktmoe_agrees(backend, theirs, kind, clamps):
    """Within the sum of both bounds, on every backend."""
    name, roundings = KINDS[kind]
    ours, off = forward(name, clamps, backend)
    assert (np.abs(ours - theirs(kind, clamps)) <= expected(name, clamps, roundings)[1] + off).all()


@pytest.mark.parametrize("kind", ["AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE", "AMXBF16_MOE"])
def test_parts_and_what_was_there_before(exists, tmp_path, kind):
    """Two parts, as for two NUMA nodes; and a result that is added to bfloat16 numbers, as deferred experts' are."""
    if kind not in exists:
        pytest.skip(f"this CPU lacks what kt-kernel's {kind} needs")
    name, roundings = KINDS[kind]
    (x, ids, weights), rng = batches()[2], np.random.default_rng(1)
    before = (8 * rng.standard_normal(x.shape)).astype(BF16)
    original = Original(experts(name))
    add_layer(original, kind, parts=2)
    for out, more in (("plain", {}), ("added", {"before": before})):
        original.forward(layer="layer", x=x, ids=ids, weights=weights, out=out, **more)
    answer = original.run(tmp_path)
    for out, more in (("plain", {}), ("added", {"before": before})):
        model = rounding.forward(experts(name), x, ids, weights, roundings, skip=ON_GPU, parts=2, **more)
        assert model.worst(answer[out].view(BF16)) <= 1, out


def test_a_mask_that_changes(exists, tmp_path):
    if "AMXFP4_KGroup_MOE" not in exists:
        pytest.skip("this CPU lacks what kt-kernel's AMXFP4_KGroup_MOE needs")
    batch, other = batches()[2], IDENTITY % 3 == 0
    original = Original(experts("MXFP4"))
    add_layer(original, "AMXFP4_KGroup_MOE")
    original.mask(layer="layer", mask=other)
    original.forward(layer="layer", **dict(zip(("x", "ids", "weights"), batch, strict=True)), out="y")
    y = original.run(tmp_path)["y"].view(BF16)
    assert rounding.forward(experts("MXFP4"), *batch, rounding.KT_KERNEL, skip=other).worst(y) <= 1
    assert rounding.forward(experts("MXFP4"), *batch, rounding.KT_KERNEL, skip=ON_GPU).worst(y) > 1


# Export


@pytest.mark.parametrize("cpu_parts", [1, 2])
@pytest.mark.parametrize("kind", ["AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE", "AMXInt4_KGroup_MOE", "AMXBF16_MOE"])
def test_export(exists, tmp_path, kind, cpu_parts):
    """Bit for bit, every scale byte but 0, which kt-kernel takes for zero, for 1, 2 and 4 GPUs; ids are the slots'."""
    if kind not in exists:
        pytest.skip(f"this CPU lacks what kt-kernel's {kind} needs")
    form, rng = FORMATS[KINDS[kind][0]], np.random.default_rng(2)
    weights = random_experts(
        rng, EXPERTS, 128, 256, formats=form.weights, scales=(0, 255) if form.weights == MXFP4 else (1, 254)
    )
    original = Original(weights)
    add_layer(original, kind, logical=MOVED, parts=cpu_parts)
    slots, gpus = (0, 4), (1, 2, 4)
    for slot in slots:
        for parts in gpus:
            original.export(
                layer="layer", expert=slot, parts=parts, sizes=sizes(exported(weights, 0, parts)), out=f"{slot} {parts}"
            )
    answer = original.run(tmp_path)
    for slot in slots:
        for parts in gpus:
            for name, wanted in exported(weights, MOVED[slot], parts).items():
                found = answer[f"{slot} {parts} {name}"]
                if name.endswith("scales") and form.weights == MXFP4:
                    found, wanted = found.view(np.uint16), wanted.view(np.uint16)
                    assert (wanted == 0x0040).any()
                    assert (wanted == 0x7F80).any()
                    wanted = np.where(wanted == 0x0040, 0, wanted)
                assert np.array_equal(found, wanted), (slot, parts, name)


def test_scale_byte_zero(exists, tmp_path):
    """It is 2**-127 by the format, and here; kt-kernel computes with zero."""
    if "AMXFP4_KGroup_MOE" not in exists:
        pytest.skip("this CPU lacks what kt-kernel's AMXFP4_KGroup_MOE needs")
    weights = random_experts(np.random.default_rng(3), EXPERTS, 128, 128, scales=(0, 0), down_scales=(127, 127))
    x, ids, r = np.full((1, 128), 2.0**100, BF16), np.arange(TOP_K)[None], np.ones((1, TOP_K), np.float32)
    original = Original(weights)
    add_layer(original, "AMXFP4_KGroup_MOE", mask=np.zeros(EXPERTS, bool))
    original.forward(layer="layer", x=x, ids=ids, weights=r, out="y")
    assert not original.run(tmp_path)["y"].view(BF16).any()
    with MoELayer(weights, "fp32_lut") as layer:
        assert layer.forward(x, ids, r).any()
