"""Modules of experts whose codes stay packed: within the reference's bound, and of weights as transformers dequantizes them."""

import re

import numpy as np
import pytest
import torch
from checkpoints import numbers
from engine_models import experts
from helpers import BF16, assert_right
from quantized_checkpoints import PACKED
from serving import eager

import ktmoe
import ktmoe.transformers as served
from ktmoe.experts import PROJECTIONS

TOKENS, TOP_K = 7, 3
#: The error of transformers' numbers: a product rounded to float32, and that to bfloat16.
ROUNDINGS = 2.0**-8 + 2.0**-23


@pytest.fixture(scope="module", params=PACKED)
def folder(request, checkpoint):
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def layers(folder):
    """name -> (weights by ktmoe's loader, transformers' module, dequantized)."""
    return {
        name: (ktmoe.load_experts(folder, int(re.search(r"layers\.(\d+)", name)[1])), module)
        for name, module in experts(eager(folder).requires_grad_(False))
    }


@pytest.mark.smoke
def test_weights(layers):
    """What transformers makes of the codes is what ktmoe's loaders read, but for bfloat16's rounding."""
    for weights, module in layers.values():
        for expert in range(weights.num_experts):
            fused, down = module.gate_up_proj[expert].double().numpy(), module.down_proj[expert].double().numpy()
            fused, down = (fused.T, down.T) if module.is_transposed else (fused, down)
            half = len(fused) // 2
            gate, up = (fused[:half], fused[half:]) if module.is_concatenated else (fused[::2], fused[1::2])
            for projection, found in zip(PROJECTIONS, (gate, up, down), strict=True):
                np.testing.assert_allclose(found, numbers(weights.matrix(expert, projection)), rtol=ROUNDINGS)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_module(folder, layers, dtype):
    """The same inputs and routing in each layer."""
    model = served.load(folder, activations="bf16")
    generator = torch.Generator().manual_seed(6)
    for name, (weights, _) in layers.items():
        x = torch.randn((TOKENS, weights.hidden), generator=generator).to(dtype)
        ids = torch.randint(0, weights.num_experts, (TOKENS, TOP_K), generator=generator)
        router = torch.rand(ids.shape, generator=generator)
        module = model.get_submodule(name)
        with torch.inference_mode():
            y = module(x, ids, router)
        assert y.dtype == dtype
        x, y = (tensor.float().numpy().astype(BF16 if dtype == torch.bfloat16 else np.float32) for tensor in (x, y))
        assert_right(module.ktmoe_layer, weights, x, ids.numpy(), router.numpy(), y)
