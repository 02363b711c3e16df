"""GatedActivation: the element-wise function between an expert's gate/up and down projections, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ktmoe.errors import InputError


@dataclass(frozen=True)
class GatedActivation:
    """h = (u' + up_offset) * g' * sigmoid(alpha * g'), where g' = min(g, limit) and u' = clamp(u, -limit, limit).

    With the defaults this is SwiGLU, silu(g) * u (Shazeer 2020, "GLU Variants Improve Transformer"). DeepSeek-V4 sets
    `limit` (its config's swiglu_limit); gpt-oss is alpha = 1.702, limit = 7, up_offset = 1. The gate's clamp is
    one-sided in both. NaN passes through.

    alpha: finite, > 0. limit: > 0, or infinity for no clamp. up_offset: finite.

    Examples:
        >>> ktmoe.GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)  # gpt-oss
        GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
    """

    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InputError(f"activation alpha must be finite and above 0, found {self.alpha}")
        if not self.limit > 0:
            raise InputError(f"activation limit must be above 0 (infinity: no clamp), found {self.limit}")
        if not math.isfinite(self.up_offset):
            raise InputError(f"activation up_offset must be finite, found {self.up_offset}")


SILU = GatedActivation()
