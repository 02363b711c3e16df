"""What sglang-kt asks kt_kernel for beside a layer's forward: experts that move, an adapter of experts, what there is."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_files import write_index
from helpers import BF16
from safetensors import safe_open
from safetensors.numpy import save_file
from sglang_checkpoints import experts
from sglang_wheel import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, Layer, batch

from ktmoe import GatedActivation
from ktmoe.compat.kt_kernel import KTMoEWrapper, generate_gpu_experts_masks
from ktmoe.compat.methods import SERVED
from ktmoe.experts import PROJECTIONS
from ktmoe.reference.training import training_forward
from ktmoe.training import Lora

RANK, ALPHA, NUMBER = 8, 16.0, 1
#: Each --kt-method that serves an adapter.
ADAPTED = {"BF16", "FP8", "RAWINT4", "MXFP4", "AMXINT8", "AMXINT4"}


@pytest.fixture
def adapter(tmp_path):
    """The folder of an adapter, as PEFT writes it, and its matrices as Lora has them."""
    rng = np.random.default_rng(7)
    matrices, tensors = {}, {}
    for projection in PROJECTIONS:
        n, k = (HIDDEN, INTERMEDIATE) if projection == "down" else (INTERMEDIATE, HIDDEN)
        a, b = ((rng.standard_normal((EXPERTS, *shape)) / 16).astype(BF16) for shape in ((RANK, k), (n, RANK)))
        matrices[projection] = a, b
        for expert in range(EXPERTS):
            name = f"base_model.model.model.layers.{NUMBER}.mlp.experts.{expert}.{projection}_proj.lora"
            tensors |= {f"{name}_A.weight": a[expert], f"{name}_B.weight": b[expert]}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA}))
    return tmp_path, matrices


@pytest.mark.smoke("one")
@pytest.mark.parametrize("method", sorted(ADAPTED))
def test_an_adapter_of_experts(wheel, checkpoint, adapter, method):
    """--kt-expert-lora-path: all experts are on the CPU, and slots are the checkpoint's."""
    assert wheel.layer._KT_SFT_METHOD_BY_INFERENCE_METHOD.keys() & SERVED.keys() == ADAPTED
    folder, matrices = adapter
    index(checkpoint(method))
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
            expected, plain = (training_forward(found, x, ids, weights, lora).y for lora in (Lora(matrices, ALPHA), None))
            assert (np.abs(y - expected.y) <= expected.bound).all()
            assert (np.abs(y - plain.y) > plain.bound).mean() > 0.5  # the adapter counts
    finally:
        layer.close()


def index(folder) -> None:
    """What says which file each tensor is in: the fork wants one for RAWINT4."""
    names = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            names |= dict.fromkeys(file.keys(), path.name)
    write_index(folder, names)


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


@pytest.mark.smoke
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


def test_experts_by_frequency(wheel, monkeypatch, tmp_path):
    """--kt-expert-placement-strategy frequency: the fork counts for all layers together; a dense layer has no experts."""
    counts = torch.from_numpy(np.random.default_rng(5).permutation(2 * LAYERS * EXPERTS).reshape(2, LAYERS, EXPERTS))
    counts[:, 0] = 0
    torch.save(counts, tmp_path / "counts.pt")
    config = SimpleNamespace(num_hidden_layers=LAYERS, num_experts=EXPERTS, first_k_dense_replace=1)
    arguments = SimpleNamespace(
        get_hf_config=lambda: config,
        kt_gpu_experts_ratio=None,
        kt_num_gpu_experts=3,
        kt_expert_placement_strategy="frequency",
        init_expert_location=str(tmp_path / "counts.pt"),
    )
    monkeypatch.setattr(wheel.layer, "_KT_GPU_EXPERTS_MASKS", None)
    masks = wheel.layer._init_kt_gpu_experts_masks(arguments)
    assert masks[0].all()
    used, chosen = counts.sum(dim=0)[1:], masks[1:]
    assert chosen.sum() == 3 * (LAYERS - 1)
    assert used[chosen].min() > used[~chosen].max()


def test_names_that_the_fork_imports(wheel):
    """Its own import found them; of what is not there it says so, and goes on without."""
    assert wheel.layer.KTRANSFORMERS_AVAILABLE
    assert wheel.layer.KTMoEWrapper is KTMoEWrapper
    assert wheel.layer.generate_gpu_experts_masks is generate_gpu_experts_masks
    transport, why = wheel.layer._load_glm5_next_fp8_native_transport_api()
    assert transport is None
    assert why.startswith("kt_kernel_ext import failed: cannot import name 'kt_kernel_ext'")
