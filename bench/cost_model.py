"""What one layer call costs: a model with a machine's and a kernel's numbers as inputs. docs/performance.md explains it.

Nothing here measures. bench/scaling/ does, finds a kernel's three numbers, and compares predictions with what it measured.
Units are bytes, FLOPs, seconds and cycles; rates are per second and of all threads together.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from bench.models import Model

PANEL = 64  # columns of an item of work
#: As the driver has them: KTMOE_SCRATCH_MB's default, and the slots up to which an item of phase B is (expert, panel).
SCRATCH_BYTES = 256 << 20
FEW_SLOTS = 256
#: Shares of an expert's weights: gate and up, then down.
PHASES = {"A": 2 / 3, "B": 1 / 3}


@dataclass(frozen=True)
class Kernel:
    """What a backend's kernels are by construction, and three measured numbers that other CPUs of its kind should share.

    tile_rows: rows that are multiplied together; a part of a tile costs a whole one. pass_rows: rows for which weights are
    decoded once. x_bytes: of a value of x and h. x_by_slot: whether rows of x are copied for each expert.
    decode_cycles: of one core, to decode a packed byte. efficiency: the share of the multiply peak while it multiplies.
    overlap: of reading and computing; 0: they add up, 1: the shorter is hidden.
    """

    tile_rows: int
    pass_rows: int
    x_bytes: int
    x_by_slot: bool
    decode_cycles: float = 0.0
    efficiency: float = 1.0
    overlap: float = 1.0


@dataclass(frozen=True)
class Machine:
    """threads: of a call, on cores of their own. read, peak: rates of all threads together, from and beside memory. hertz: of a
    core. call: seconds of a call besides reading and computing. nodes: of NUMA, each of which keeps and reads a share of every
    expert; read is their sum. link: bytes a second that a node reads from the others.
    """

    threads: int
    read: float
    peak: float
    hertz: float
    call: float = 0.0
    nodes: int = 1
    link: float = math.inf

    def __post_init__(self):
        for name in ("threads", "read", "peak", "hertz", "nodes", "link"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected more than 0, found {getattr(self, name)!r}")
        if not self.call >= 0:
            raise ValueError(f"call: expected at least 0, found {self.call!r}")


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


def imbalance(items: float, threads: int) -> float:
    """By how much the busiest thread's items exceed the mean."""
    items = max(1, round(items))
    return math.ceil(items / threads) * threads / items


def chunk_tokens(model: Model, tokens: int, kernel: Kernel, threads: int) -> int:
    """Tokens that the driver computes at once: it halves a batch until x, h and the slabs of y fit into the scratch memory."""
    rows = model.top_k * kernel.x_bytes * model.intermediate
    rows += kernel.x_bytes * model.hidden * (model.top_k if kernel.x_by_slot else 1)
    panels = max(1, min(8, model.hidden // PANEL // (4 * threads)))
    rows += threads * panels * PANEL * 4
    while tokens > 1 and tokens * rows > SCRATCH_BYTES:
        tokens = (tokens + 1) // 2
    return tokens


def seconds(model: Model, tokens: int, kernel: Kernel, machine: Machine) -> float:
    """One call of one layer with random routing."""
    if tokens < 1:
        raise ValueError(f"tokens: expected at least 1, found {tokens}")
    most = chunk_tokens(model, tokens, kernel, machine.threads)
    whole, rest = divmod(tokens, most)
    chunks = whole * _chunk_seconds(model, most, kernel, machine) + (
        _chunk_seconds(model, rest, kernel, machine) if rest else 0
    )
    return machine.call + chunks


def _chunk_seconds(model: Model, tokens: int, kernel: Kernel, machine: Machine) -> float:
    m, experts = expert_rows(model.experts, model.top_k, tokens)
    used, slots = experts.sum(), tokens * model.top_k
    decode = 0 if model.weights == "BF16" else model.expert_bytes * kernel.decode_cycles / (machine.hertz * machine.threads)
    multiply = model.slot_flops / (machine.peak * kernel.efficiency)
    compute = np.ceil(m / kernel.pass_rows) * decode + np.ceil(m / kernel.tile_rows) * kernel.tile_rows * multiply
    read = model.expert_bytes / machine.read
    items = {
        "A": used * math.ceil(model.intermediate / machine.nodes / PANEL),
        "B": math.ceil(model.hidden / PANEL) * (used if slots <= FEW_SLOTS else 1),
    }
    total = 0.0
    for phase, share in PHASES.items():
        busiest = compute * imbalance(items[phase], math.ceil(machine.threads / machine.nodes))
        hidden = kernel.overlap * np.minimum(read, busiest)
        total += share * float(experts @ (read + busiest - hidden))
    rows = tokens * model.hidden * 4 + slots * (model.hidden + 2 * model.intermediate) * kernel.x_bytes
    total += rows / machine.read
    if machine.nodes > 1:
        total += tokens * model.hidden * 4 / machine.link
    return total


def crossover(model: Model, kernel: Kernel, machine: Machine) -> float:
    """Tokens an expert at which multiplying takes as long as reading."""
    return model.expert_bytes / machine.read * machine.peak * kernel.efficiency / model.slot_flops
