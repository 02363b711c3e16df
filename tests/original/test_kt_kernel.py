"""kt-kernel itself beside the numpy model of its roundings and beside ktmoe, where tools/test_kt_kernel.py has installed it."""

from __future__ import annotations

import numpy as np
import pytest
import rounding
from cases import (
    ALL_MOVED,
    CASES,
    EXPERTS,
    FORMATS,
    IGNORES_MAP,
    KINDS,
    MOVED,
    ON_GPU,
    TOP_K,
    as_theirs,
    batches,
    expected,
    experts,
    forward,
    loaded,
)
from classes import IDENTITY, given, made, need, saved
from helpers import BF16, random_experts
from original import exported, needed, sizes

from ktmoe import MXFP4, MoELayer

pytestmark = needed
CLASSES = [(name, kind, clamps) for name, kind in KINDS for of, clamps in CASES if of == name]


@pytest.fixture(scope="module")
def theirs(exists, tmp_path_factory):
    """What kt-kernel returns for batch(), float64, by class and clamps, each in a process of its own."""

    def run(name, kind, clamps):
        need(exists, kind)
        if (case := (name, kind, clamps)) not in done:
            original = made(given(name, clamps), *case, **saved(name, tmp_path_factory.mktemp("saved")))
            for part, (x, ids, weights) in enumerate(batches()):
                original.forward(layer="layer", x=x, ids=ids, weights=weights, out=str(part))
            answer = original.run(tmp_path_factory.mktemp("forward"))
            done[case] = np.concatenate([answer[str(part)] for part in range(len(batches()))]).view(BF16)
        return done[case].astype(np.float64)

    done = {}
    return run


@pytest.mark.smoke("one")
@pytest.mark.parametrize(("name", "kind", "clamps"), CLASSES)
def test_the_model_is_kt_kernel(theirs, name, kind, clamps):
    """All of its classes: token counts, a mask, ids of nobody and repeated ones, clamps."""
    model, _ = expected(name, clamps, FORMATS[name].kinds[kind])
    assert np.isfinite(model.bound).all()
    assert model.worst(theirs(name, kind, clamps)) <= 1


@pytest.mark.smoke("one")
@pytest.mark.parametrize(("name", "kind", "clamps"), CLASSES)
def test_ktmoe_agrees(backend, theirs, name, kind, clamps):
    """Within the sum of both bounds, on every backend."""
    ours, off = forward(name, clamps, backend)
    apart = expected(name, clamps, FORMATS[name].kinds[kind])[1]
    assert (np.abs(ours - theirs(name, kind, clamps)) <= apart + off).all()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("MXFP4", "AMXFP4_KGroup_MOE"), ("MXFP4", "AVX2MXFP4_MOE"), ("BF16", "AMXBF16_MOE"), ("FP8", "AVX2FP8_MOE")],
)
def test_parts_and_what_was_there_before(exists, tmp_path, name, kind):
    """Two shards, as for two NUMA nodes; and a result that is added to bfloat16 numbers, as deferred experts' are."""
    need(exists, kind)
    roundings = FORMATS[name].kinds[kind]
    (x, ids, weights), rng = batches()[2], np.random.default_rng(1)
    before = (8 * rng.standard_normal(x.shape)).astype(BF16)
    original = made(experts(name), name, kind, shards=2)
    for out, more in (("plain", {}), ("added", {"before": before})):
        original.forward(layer="layer", x=x, ids=ids, weights=weights, out=out, **more)
    answer = original.run(tmp_path)
    for out, more in (("plain", {}), ("added", {"before": before})):
        model = rounding.forward(experts(name), x, ids, weights, roundings, skip=ON_GPU, shards=2, **more)
        assert model.worst(answer[out].view(BF16)) <= 1, out


def test_a_mask_that_changes(exists, tmp_path):
    need(exists, "AMXFP4_KGroup_MOE")
    batch, other = batches()[2], IDENTITY % 3 == 0
    original = made(experts("MXFP4"), "MXFP4", "AMXFP4_KGroup_MOE")
    original.mask(layer="layer", mask=other)
    original.forward(layer="layer", **dict(zip(("x", "ids", "weights"), batch, strict=True)), out="y")
    y = original.run(tmp_path)["y"].view(BF16)
    assert rounding.forward(experts("MXFP4"), *batch, rounding.KT_KERNEL, skip=other).worst(y) <= 1
    assert rounding.forward(experts("MXFP4"), *batch, rounding.KT_KERNEL, skip=ON_GPU).worst(y) > 1


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_map(exists, tmp_path, name, kind):
    """Which expert of the checkpoint is in a slot. Some classes ignore it, and have each in its own."""
    need(exists, kind)
    batch, logical = batches()[1], ALL_MOVED if FORMATS[name].rounds else MOVED
    original = made(given(name), name, kind, logical=logical, **saved(name, tmp_path))
    original.forward(layer="layer", **dict(zip(("x", "ids", "weights"), batch, strict=True)), out="y")
    y = original.run(tmp_path)["y"].view(BF16)
    weights = loaded(name) if kind in IGNORES_MAP else loaded(name).take(logical)
    assert rounding.forward(weights, *batch, FORMATS[name].kinds[kind], skip=ON_GPU).worst(y) <= 1


# Export


#: (method, class); AVX2RawInt4_MOE takes one shard only.
EXPORTS = [
    ("MXFP4", "AMXFP4_KGroup_MOE"),
    ("MXFP4", "AVX2MXFP4_MOE"),
    ("RAWINT4", "AMXInt4_KGroup_MOE"),
    ("RAWINT4", "AVX2RawInt4_MOE"),
    ("BF16", "AMXBF16_MOE"),
    ("BF16", "AVX2BF16_MOE"),
    ("FP8", "AMXFP8_MOE"),
    ("FP8", "AVX2FP8_MOE"),
    ("FP8_PERCHANNEL", "AMXFP8PerChannel_MOE"),
    ("MXFP8", "AMXMXFP8_KGroup_MOE"),
    ("MXFP8", "AVX2MXFP8_MOE"),
    ("NVFP4", "AVX2MXFP4_MOE"),
]


@pytest.mark.parametrize(
    ("name", "kind", "shards"),
    [(*case, shards) for case in EXPORTS for shards in (1, 2) if (*case, shards) != ("RAWINT4", "AVX2RawInt4_MOE", 2)],
)
def test_export(exists, tmp_path, name, kind, shards):
    """Bit for bit, every scale byte but 0, which kt-kernel takes for zero, for 1, 2 and 4 GPUs; ids are the slots'."""
    need(exists, kind)
    form, rng = FORMATS[name].weights, np.random.default_rng(2)
    ue8m0 = form.scale is not None and form.scale.kind == "ue8m0"
    intermediate, logical = 512 if name == "FP8" else 256, IDENTITY if kind in IGNORES_MAP else MOVED
    weights = random_experts(rng, EXPERTS, 128, intermediate, formats=form, scales=(0, 255) if ue8m0 else (1, 254))
    original = made(as_theirs(weights, FORMATS[name].theirs), name, kind, logical=logical, shards=shards)
    slots, gpus = (0, 4), (1, 2, 4)
    for slot in slots:
        for parts in gpus:
            original.export(
                layer="layer", expert=slot, parts=parts, sizes=sizes(exported(weights, 0, parts)), out=f"{slot} {parts}"
            )
    answer = original.run(tmp_path)
    for slot in slots:
        for parts in gpus:
            for what, wanted in exported(weights, logical[slot], parts).items():
                found = answer[f"{slot} {parts} {what}"]
                if what.endswith("scales") and form == MXFP4:
                    found, wanted = found.view(np.uint16), wanted.view(np.uint16)
                    assert (wanted == 0x0040).any()
                    assert (wanted == 0x7F80).any()
                    wanted = np.where(wanted == 0x0040, 0, wanted)
                assert np.array_equal(found, wanted), (slot, parts, what)


def test_scale_byte_zero(exists, tmp_path):
    """It is 2**-127 by the format, and here; kt-kernel computes with zero."""
    need(exists, "AMXFP4_KGroup_MOE")
    weights = random_experts(np.random.default_rng(3), EXPERTS, 128, 128, scales=(0, 0), down_scales=(127, 127))
    x, ids, r = np.full((1, 128), 2.0**100, BF16), np.arange(TOP_K)[None], np.ones((1, TOP_K), np.float32)
    original = made(weights, "MXFP4", "AMXFP4_KGroup_MOE", mask=np.zeros(EXPERTS, bool))
    original.forward(layer="layer", x=x, ids=ids, weights=r, out="y")
    assert not original.run(tmp_path)["y"].view(BF16).any()
    with MoELayer(weights, "fp32_lut") as layer:
        assert layer.forward(x, ids, r).any()
