"""KTMoEWrapper: kt-kernel's own, made to run without CUDA, beside ktmoe's. Where tools/test_kt_kernel.py has installed it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import rounding
from cases import EXPERTS, FORMATS, HIDDEN, IGNORES_MAP, MOST_TOKENS, MOVED, ON_GPU, TOP_K, as_theirs
from helpers import BF16
from original import BUFFERS, Original, exported, needed, sizes, stored

from ktmoe import ExpertWeights, MoELayer, load_experts, reference, synthetic
from ktmoe.compat.kt_kernel import KTMoEWrapper, generate_gpu_experts_masks
from ktmoe.compat.methods import SERVED

pytestmark = needed
LAYERS, DEFERRED, CAPTURED = 3, 2, [1, 2]
WRITERS = {
    "MXFP4": synthetic.write_deepseek_v4,
    "RAWINT4": synthetic.write_kimi_k2,
    "BF16": synthetic.write_qwen3,
    "FP8": synthetic.write_fp8,
    "FP8_PERCHANNEL": synthetic.PUBLISHED["FP8 per row"].write,
    "MXFP8": synthetic.write_mxfp8,
    "NVFP4": synthetic.write_nvfp4,
    "GPTQ_INT4": synthetic.PUBLISHED["GPTQ symmetric"].write,
    "AMXINT8": synthetic.write_qwen3,
    "AMXINT4": synthetic.write_qwen3,
}
#: swiglu_limit and swiglu_alpha of the checkpoints that have them.
LIMITS = {"MXFP4": (10.0, 0.0), "MXFP8": (7.0, 1.702)}
#: What kt-kernel needs to be told to take a class that can do it.
ENVIRONMENT = {"NVFP4": {"KT_MXFP4_BACKEND": "avx2"}}


def wrapper_keywords(method: str, folder, layer: int) -> dict:
    """Keywords as SGLang gives them; and group_size and zero_point, which are for fine-tuning and change nothing."""
    limit, alpha = LIMITS.get(method, (0.0, 0.0))
    return {
        "layer_idx": layer,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": FORMATS[method].intermediate,
        "cpuinfer_threads": 2,
        "threadpool_count": 1,
        "numa_nodes": [0],
        "weight_path": str(folder),
        "chunked_prefill_size": MOST_TOKENS,
        "method": method,
        "max_deferred_experts_per_token": DEFERRED if layer < LAYERS - 1 else 0,
        "swiglu_limit": limit,
        "swiglu_alpha": alpha,
        "group_size": 8,
        "zero_point": True,
    }


def split(ids, weights, deferred: int) -> tuple[np.ndarray, np.ndarray]:
    """(now, later): a token's greatest weights are of experts that run now, in every token."""
    first = np.argsort(-weights, axis=1)[:, : TOP_K - deferred]
    now = np.isin(ids, np.take_along_axis(ids, first, axis=1))
    return np.where(now, ids, -1), np.where(now, -1, ids)


@pytest.mark.smoke
@pytest.mark.parametrize("method", WRITERS)
def test_wrappers_agree(exists, tmp_path, method):
    """Theirs is what the model says of deferred experts, and ours is within both bounds of theirs: prefill and decode, layers
    in turn, a map with an expert that is there twice, where kt-kernel's class minds it, a mask; and both export the same bytes.
    """
    folder, rng, form = tmp_path / "model", np.random.default_rng(7), FORMATS[method]
    kind = next((kind for kind in form.kinds if kind in exists), None)
    if kind is None:
        pytest.skip(f"this CPU lacks what kt-kernel's {method} needs")
    logical = np.arange(EXPERTS) if kind in IGNORES_MAP else MOVED
    shape = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": form.intermediate, "top_k": TOP_K}
    WRITERS[method](folder, layers=LAYERS, **shape)
    layers = [load_experts(folder, layer) for layer in range(LAYERS)]
    roundings, original, calls = replace(form.kinds[kind], clamps_below=LIMITS.get(method, (0, 0))[1] > 0), Original(), []
    original.environment(variables=ENVIRONMENT.get(method, {}))
    for layer, weights in enumerate(layers):
        keywords = wrapper_keywords(method, folder, layer)
        if form.rounds:  # which its wrapper applies to tensors alone
            original.arrays |= {f"{layer} {name.split()[0]}": array for name, array in stored(weights).items()}
            keywords |= {"tensors": str(layer), "weight_path": str(tmp_path / "saved")}
        original.wrapper(name=str(layer), mask=ON_GPU, logical=logical, **keywords)
    layers = [(form.rounds.experts(weights) if form.rounds else weights).take(logical) for weights in layers]
    original.capture(sizes=CAPTURED)
    for step, tokens in enumerate((17, 1, 2, 1, 3, 1)):
        for layer in range(LAYERS):
            x = rng.standard_normal((tokens, HIDDEN)).astype(BF16)
            ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
            weights = rng.random((tokens, TOP_K), np.float32)
            original.call(wrapper=str(layer), x=x, ids=ids, weights=weights, out=f"{step} {layer}")
            calls.append((f"{step} {layer}", layer, x, ids, weights))
    cut = exported(layers[0], 4, 2) if SERVED[method].exports else {}
    if cut:
        original.export(layer="0", expert=4, parts=2, sizes=sizes(cut), out="e")
    answer = original.run(tmp_path)

    wrappers = [KTMoEWrapper(gpu_experts_mask=ON_GPU, **wrapper_keywords(method, folder, layer)) for layer in range(LAYERS)]
    for wrapper in wrappers:
        wrapper.load_weights(logical)
    KTMoEWrapper.set_capture_batch_sizes(CAPTURED)
    try:
        for name, wanted in cut.items():
            assert np.array_equal(answer[f"e {name}"], wanted), name
        if cut:
            assert_exports(wrappers[0], 4, 2, cut)
        before = None
        for name, layer, x, ids, weights in calls:
            theirs = answer[name].view(BF16).astype(np.float64)
            wrappers[layer].submit_forward(x, ids, weights, 0)
            ours = wrappers[layer].sync_forward(x, 0).astype(np.float64)
            deferred = wrappers[layer].max_deferred_experts_per_token
            now, later = split(ids, weights, deferred)
            model, apart = both(layers[layer], x, now, weights, roundings, form.theirs)
            if before is not None:
                y = rounding.round_bfloat16(before[0].y)
                once_more = 2.0**-8 * (np.abs(model.y + y) + model.bound + before[0].bound)
                model = reference.Reference(model.y + y, model.bound + before[0].bound + once_more)
                apart = apart + before[1] + 2 * once_more
            assert model.worst(theirs) <= 1, name
            assert (np.abs(ours - theirs) <= apart).all(), name
            before = both(layers[layer], x, later, weights, roundings, form.theirs) if deferred else None
    finally:
        for wrapper in wrappers:
            wrapper.close()
        KTMoEWrapper.set_capture_batch_sizes([])
        KTMoEWrapper.clear_buffer_cache()


def both(weights: ExpertWeights, x, ids, r, roundings, theirs) -> tuple[reference.Reference, np.ndarray]:
    """kt-kernel's result for some slots by the model, and how far ours and theirs can be apart."""
    with MoELayer(weights) as layer:
        options = {"expert_mask": ~ON_GPU}
        mode = reference.forward(weights, x, ids, r, activations=layer.activations, **options)
    own = reference.forward(weights, x, ids, r, **options)
    loaded = as_theirs(weights, theirs)
    apart = rounding.apart(weights, loaded, x, ids, r, roundings, skip=ON_GPU)
    return rounding.forward(loaded, x, ids, r, roundings, skip=ON_GPU), apart + mode.bound + np.abs(mode.y - own.y)


def assert_exports(wrapper: KTMoEWrapper, expert: int, parts: int, wanted: dict[str, np.ndarray]) -> None:
    """Ours: into buffers that are all 0xaa before."""
    buffers = {name: np.full_like(wanted.get(name, np.zeros((parts, 0), np.uint8)), 0xAA) for name in BUFFERS}
    addresses = [[part.ctypes.data for part in buffers[name]] for name in BUFFERS]
    wrapper.submit_write_weight_scale_to_buffer(parts, expert, *addresses)
    wrapper.sync_write_weight_scale_to_buffer()
    for name, array in wanted.items():
        assert np.array_equal(buffers[name], array), name


@pytest.mark.parametrize("method", ["MOE_INT8", "MOE_INT4"])
def test_methods_that_its_wheel_has_no_class_for(tmp_path, method):
    """These are classes of builds for other CPUs."""
    original = Original()
    original.wrapper(name="wrapper", mask=ON_GPU, **wrapper_keywords("BF16", tmp_path, 0) | {"method": method})
    kind, message = original.run(tmp_path)["wrapper"]
    assert kind == "RuntimeError"
    assert "backend not available" in message


@pytest.mark.parametrize("number", [-1, 0, 1, 5, 23, 24, 25])
def test_masks(tmp_path, number):
    """The same where frequencies differ; of equal ones theirs are any, and ours the first."""
    rng = np.random.default_rng(8)
    distinct, equal = rng.permutation(24).reshape(3, 8).astype(np.float32), np.ones((3, 8), np.float32)
    original = Original()
    original.masks(frequency=distinct, number=number, out="distinct")
    original.masks(frequency=equal, number=number, out="equal")
    answer = original.run(tmp_path)
    assert np.array_equal(generate_gpu_experts_masks(distinct, number), answer["distinct"])
    mask = generate_gpu_experts_masks(equal, number)
    assert mask.sum() == answer["equal"].sum() == np.clip(number, 0, 24)
    assert mask.ravel()[: mask.sum()].all()
