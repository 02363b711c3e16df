"""What one layer call costs: a formula of a machine's and a kernel's numbers.

Routing is random. An expert of m tokens is read once, at the read bandwidth. It is decoded once for each pass of pass_rows
rows, in decode_ns of a core for each byte, and multiplied at a share (efficiency) of the peak. It takes the time to read and to
compute, less a part (overlap) of the shorter one. x, h and y are read and written at the read bandwidth. Batches whose x and h
exceed KTMOE_SCRATCH_MB go in chunks, and each chunk reads the weights again.

Nothing here measures. bench/explain.py finds a kernel's three numbers by measured calls and compares the formula with others.
Units are bytes, FLOPs and seconds; rates are per second and of all threads together.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from bench.models import Model

#: KTMOE_SCRATCH_MB's default.
SCRATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class Kernel:
    """What kernels are by construction, and three numbers that are found by measured calls.

    tile_rows: rows that are multiplied together; a part of a tile costs a whole one. pass_rows: rows for which weights are
    decoded once. x_bytes: of a value of x and h. x_by_slot: whether rows of x are copied for each expert.
    decode_ns: in which a core decodes a packed byte. efficiency: the share of the multiply peak while it multiplies.
    overlap: of reading and computing; 0: they add up, 1: the shorter is hidden.
    """

    tile_rows: int
    pass_rows: int
    x_bytes: int
    x_by_slot: bool
    decode_ns: float = 0.0
    efficiency: float = 1.0
    overlap: float = 1.0


@dataclass(frozen=True)
class Machine:
    """threads: of a call, on cores of their own. read, peak: rates of all threads together, from and beside memory."""

    threads: int
    read: float
    peak: float

    def __post_init__(self):
        for name in ("threads", "read", "peak"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected more than 0, found {getattr(self, name)!r}")


def distinct_experts(experts: int, top_k: int, tokens: int) -> float:
    """Expected number of experts that a batch uses, when every set of top_k experts is equally likely for a token."""
    return experts * -math.expm1(tokens * math.log1p(-top_k / experts)) if top_k < experts else float(experts)


@functools.cache
def expert_rows(experts: int, top_k: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(m, expected number of experts with m tokens), for all m that matter: binomial, as each token chooses for itself."""
    share = top_k / experts
    if share == 1:
        return np.array([tokens]), np.array([float(experts)])
    spread = 12 * math.sqrt(tokens * share * (1 - share)) + 12
    m = np.arange(max(1, math.floor(tokens * share - spread)), min(tokens, math.ceil(tokens * share + spread)) + 1)
    ways = np.array([math.lgamma(tokens + 1) - math.lgamma(i + 1) - math.lgamma(tokens - i + 1) for i in m.tolist()])
    return m, experts * np.exp(ways + m * math.log(share) + (tokens - m) * math.log1p(-share))


def chunk_tokens(model: Model, tokens: int, kernel: Kernel) -> int:
    """Tokens that are computed at once: the driver halves a batch until its x and h fit into the scratch memory."""
    rows = kernel.x_bytes * (model.top_k * model.intermediate + model.hidden * (model.top_k if kernel.x_by_slot else 1))
    while tokens > 1 and tokens * rows > SCRATCH_BYTES:
        tokens = (tokens + 1) // 2
    return tokens


def seconds(model: Model, tokens: int, kernel: Kernel, machine: Machine) -> float:
    """One call of one layer with random routing."""
    if tokens < 1:
        raise ValueError(f"tokens: expected at least 1, found {tokens}")
    most = chunk_tokens(model, tokens, kernel)
    chunks = [most] * (tokens // most) + [tokens % most] * (tokens % most > 0)
    return sum(_chunk_seconds(model, count, kernel, machine) for count in chunks)


def _chunk_seconds(model: Model, tokens: int, kernel: Kernel, machine: Machine) -> float:
    m, experts = expert_rows(model.experts, model.top_k, tokens)
    decode = 0 if model.weights == "BF16" else model.expert_bytes * kernel.decode_ns * 1e-9 / machine.threads
    multiply = model.slot_flops / (machine.peak * kernel.efficiency)
    compute = np.ceil(m / kernel.pass_rows) * decode + np.ceil(m / kernel.tile_rows) * kernel.tile_rows * multiply
    read = model.expert_bytes / machine.read
    rows = tokens * model.hidden * 4 + tokens * model.top_k * (model.hidden + 2 * model.intermediate) * kernel.x_bytes
    return float(experts @ (read + compute - kernel.overlap * np.minimum(read, compute))) + rows / machine.read


def crossover(model: Model, kernel: Kernel, machine: Machine) -> float:
    """Tokens an expert at which multiplying takes as long as reading."""
    return model.expert_bytes / machine.read * machine.peak * kernel.efficiency / model.slot_flops
