"""Experts on a GPU: which may be chosen, and what is compared. Shared by the tests of gpu_experts= and of place()."""

from __future__ import annotations

import numpy as np
import torch
from engine_models import EXPERTS, experts

#: What is on the GPU, of so many layers: a number, [experts], or [layers, experts].
CHOICES = {
    "number": lambda _rows: 3,
    "some": lambda _rows: np.arange(EXPERTS) % 3 == 0,
    "others in each layer": lambda rows: np.arange(rows * EXPERTS).reshape(rows, EXPERTS) % 3 == 0,
    "none": lambda _rows: np.zeros(EXPERTS, bool),
    "all": lambda _rows: np.ones(EXPERTS, bool),
}
#: bfloat16's, of torch's experts: gate, up, their function, h and an expert's output; and of the sum.
ROUNDINGS = 6
#: Formats with all that experts may have: biases, interleaved and transposed weights, codes of 4 and 8 bits.
FORMATS = ("qwen3_moe", "gpt-oss MXFP4", "DeepSeek-V4 FP4")


def batch(hidden: int, tokens: int = 9, top_k: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden states, ids, router weights)."""
    generator = torch.Generator().manual_seed(10)
    x = torch.randn((tokens, hidden), generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)])
    return x, ids, torch.rand(ids.shape, generator=generator).bfloat16()


def assert_near(found: torch.Tensor, expected: torch.Tensor, roundings: int = ROUNDINGS) -> None:
    assert (found.double() - expected.double()).norm() <= roundings * 2**-8 * expected.double().norm()


def first(model):
    """The first module of experts, and its layer."""
    (_, module), *_ = experts(model)
    return module, module.ktmoe_layer
