"""count_experts(): which experts the tokens of a text use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ktmoe.errors import UnavailableError
from ktmoe.torch.counting import counting
from ktmoe.torch.experts import MoEExperts
from ktmoe.transformers.function import NAME
from ktmoe.transformers.modules import is_experts


@contextmanager
def count_experts(model: torch.nn.Module) -> Iterator[np.ndarray]:
    """Count how often each expert is chosen while a context is open: int64 [layers, experts], which grows with each call.

    model: one whose experts ktmoe computes, on the CPU or on a GPU, with adapters or without. A row for each layer that has
    experts: load(), place() and ktmoe.compat.kt_kernel.generate_gpu_experts_masks() take such rows. Tokens of padding have
    experts, too, and a pass that is computed again for gradients counts again. Contexts may be nested, and several threads may
    call the model. Raises UnavailableError for a model without such experts.

    Examples:
        >>> model = ktmoe.transformers.load("Qwen3-30B-A3B")
        >>> with ktmoe.transformers.count_experts(model) as counts:
        ...     logits = model(torch.tensor([[1, 2, 3]])).logits
        >>> counts.sum(axis=1)  # 3 tokens, 2 experts each, in both layers
        array([6, 6])
    """
    rows = {}
    for name, module in model.named_modules():
        if isinstance(module, MoEExperts):
            rows[module] = module.spec.num_experts
        elif is_experts(module):
            if not hasattr(module, "ktmoe_layer") and module.config._experts_implementation != NAME:
                raise UnavailableError(f"{name} ({type(module).__name__}): expected experts that ktmoe computes, found others")
            rows[module] = module.num_experts
    if not rows:
        raise UnavailableError(f"{type(model).__name__}: expected a model with routed experts, found none")
    with counting(rows) as counts:
        yield counts
