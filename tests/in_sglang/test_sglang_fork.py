"""What sglang-kt asks kt_kernel for beside a layer's forward: experts that move, an adapter of experts, what there is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from sglang_checkpoints import WRITERS, experts
from sglang_wheel import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, TOP_K, Layer, batch

from ktmoe import GatedActivation, reference
from ktmoe.compat.kt_kernel import KTMoEWrapper, generate_gpu_experts_masks

RANK, ALPHA, NUMBER = 8, 16.0, 1
#: --kt-method -> the method that serves an adapter.
ADAPTED = {"BF16", "FP8", "RAWINT4", "MXFP4", "AMXINT8", "AMXINT4"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folders = {}

    def folder(method: str):
        if method not in folders:
            folders[method] = tmp_path_factory.mktemp(method)
            sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K}
            WRITERS[method](folders[method], **sizes, layers=LAYERS)
        return folders[method]

    return folder


@pytest.fixture
def adapter(tmp_path):
    """Its folder, as PEFT writes it, and its matrices by name: A [E, rank, inputs], B [E, outputs, rank]."""
    rng = np.random.default_rng(7)
    matrices, tensors = {}, {}
    for projection in ("gate", "up", "down"):
        k, n = (INTERMEDIATE, HIDDEN) if projection == "down" else (HIDDEN, INTERMEDIATE)
        for kind, shape in (("A", (RANK, k)), ("B", (n, RANK))):
            matrices[projection, kind] = rng.standard_normal((EXPERTS, *shape)).astype(np.float32) / 16
            for expert in range(EXPERTS):
                name = f"base_model.model.model.layers.{NUMBER}.mlp.experts.{expert}.{projection}_proj.lora_{kind}.weight"
                tensors[name] = matrices[projection, kind][expert]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA}))
    return tmp_path, matrices


@pytest.mark.parametrize("method", sorted(ADAPTED))
def test_an_adapter_of_experts(wheel, checkpoint, adapter, method):
    """--kt-expert-lora-path: all experts are on the CPU, and slots are the checkpoint's."""
    assert {name for name in wheel.layer._KT_SFT_METHOD_BY_INFERENCE_METHOD if not name.startswith("AMX")} <= ADAPTED
    folder, matrices = adapter
    wheel.layer._KT_LORA_STATE_DICT_CACHE.clear()
    found = experts(checkpoint(method), method, NUMBER)
    if method != "MXFP4":
        found = found.with_activation(GatedActivation())
    nowhere = np.zeros(EXPERTS, bool)
    layer = Layer(
        wheel,
        NUMBER,
        found,
        nowhere,
        np.arange(EXPERTS),
        method=method,
        weight_path=str(checkpoint(method)),
        expert_lora_path=str(folder),
    )
    try:
        rng = np.random.default_rng(3)
        for tokens in (1, 9):
            x, ids, weights = batch(rng, tokens)
            y = layer.apply(x, ids, weights).astype(np.float64)
            expected = adapted(found, matrices, x, ids, weights)
            assert np.abs(y - expected).max() <= 0.01 * np.abs(expected).max()
            plain = reference.forward(found, x, ids, weights).y
            assert np.abs(y - plain).max() > 0.03 * np.abs(expected).max()  # the adapter counts
    finally:
        layer.close()


def adapted(found, matrices, x, ids, weights) -> np.ndarray:
    """The experts and their adapter in float64."""
    y = np.zeros(x.shape)
    rounded = {key: reference.round_bfloat16(matrix.astype(np.float64)) for key, matrix in matrices.items()}
    for expert in range(EXPERTS):
        full = {}
        for projection in ("gate", "up", "down"):
            a, b = rounded[projection, "A"][expert], rounded[projection, "B"][expert]
            full[projection] = found.matrix(expert, projection).numbers() + ALPHA / RANK * (b @ a)
        tokens, at = np.nonzero(ids == expert)
        rows = x[tokens].astype(np.float64)
        h = found.activation(rows @ full["gate"].T, rows @ full["up"].T)
        np.add.at(y, tokens, weights[tokens, at, None] * (h @ full["down"].T))
    return y


def test_an_adapter_of_another_method(wheel, checkpoint, adapter):
    """The fork's own message."""
    found = experts(checkpoint("MXFP8"), "MXFP8", NUMBER)
    with pytest.raises(ValueError, match="--kt-expert-lora-path requires one of the SFT-compatible KT methods"):
        Layer(
            wheel,
            NUMBER,
            found.with_activation(GatedActivation()),
            np.zeros(EXPERTS, bool),
            np.arange(EXPERTS),
            method="MXFP8",
            weight_path=str(checkpoint("MXFP8")),
            expert_lora_path=str(adapter[0]),
        )


def test_experts_that_move(wheel, checkpoint):
    """--kt-enable-dynamic-expert-update: the fork's own functions choose the experts and change the mask in place."""
    found, before = experts(checkpoint("MXFP4"), "MXFP4", 0), np.arange(EXPERTS) < 3
    layer = Layer(wheel, 0, found, before, np.arange(EXPERTS), method="MXFP4", weight_path=str(checkpoint("MXFP4")))
    try:
        rng = np.random.default_rng(4)
        x, ids, weights = batch(rng, 7)
        chosen = wheel.layer.select_top_experts_from_batch(torch.from_numpy(ids), EXPERTS, 3)
        mask, index, back = wheel.layer.update_gpu_expert_mappings(chosen, EXPERTS, torch.device("cpu"))
        layer.method.gpu_experts_mask, layer.method.gpu_index_to_logical = mask, back
        layer.method.gpu_experts_mask_cuda.copy_(mask)
        layer.method.logical_to_gpu_index_cuda.copy_(index)
        wheel.layer.update_kt_wrapper_masks(layer.method.wrapper, mask)
        assert (mask.numpy() != before).any()
        layer.on_gpu = mask.numpy().copy()
        layer.gpu.place(layer.on_gpu)
        layer.check(x, ids, weights, layer.apply(x, ids, weights).astype(np.float64), None)
    finally:
        layer.close()


def test_names_that_the_fork_imports(wheel):
    """Its own import found them; of what is not there it says so, and goes on without."""
    assert wheel.layer.KTRANSFORMERS_AVAILABLE
    assert wheel.layer.KTMoEWrapper is KTMoEWrapper
    assert wheel.layer.generate_gpu_experts_masks is generate_gpu_experts_masks
    transport, why = wheel.layer._load_glm5_next_fp8_native_transport_api()
    assert transport is None
    assert why.startswith("kt_kernel_ext import failed: cannot import name 'kt_kernel_ext'")
