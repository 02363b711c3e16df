"""What one layer call costs: a model with a machine's and a kernel's numbers as inputs. docs/performance.md explains it.

Nothing here measures. bench/scaling.py does, finds a kernel's three numbers, and compares predictions with what it measured.
Units are bytes, FLOPs, seconds and cycles; rates are per second and of all threads together.
"""

from __future__ import annotations

import functools
import math
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

PANEL = 64  # columns of an item of work
BYTES_PER_WEIGHT = {"MXFP4": 17 / 32, "MXFP4, biases": 17 / 32, "INT4": 18 / 32, "BF16": 2.0}
#: As the driver has them: KTMOE_SCRATCH_MB's default, and the slots up to which an item of phase B is (expert, panel).
SCRATCH_BYTES = 256 << 20
FEW_SLOTS = 256
#: Shares of an expert's weights: gate and up, then down.
PHASES = {"A": 2 / 3, "B": 1 / 3}


@dataclass(frozen=True)
class Shape:
    """A model's routed experts. weights: a key of BYTES_PER_WEIGHT. layers: that have routed experts."""

    weights: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int = 1

    def __post_init__(self):
        if self.weights not in BYTES_PER_WEIGHT:
            raise ValueError(f"weights {self.weights!r} are unknown; known are {', '.join(map(repr, BYTES_PER_WEIGHT))}")
        for name in ("hidden", "intermediate", "experts", "top_k", "layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, found {value!r}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k: expected at most the {self.experts} experts, found {self.top_k}")

    @property
    def expert_bytes(self) -> float:
        return 3 * self.hidden * self.intermediate * BYTES_PER_WEIGHT[self.weights]

    @property
    def slot_flops(self) -> int:
        """Of one token in one expert."""
        return 2 * 3 * self.hidden * self.intermediate

    @property
    def nbytes(self) -> float:
        """All experts of all layers."""
        return self.layers * self.experts * self.expert_bytes


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
    core. call: seconds of a call besides reading and computing. nodes: of NUMA; read is their sum. link: bytes a second that a
    node reads from the others. sharded: whether each node keeps and reads a share of each expert, which ktmoe does not do yet.
    """

    threads: int
    read: float
    peak: float
    hertz: float
    call: float = 0.0
    nodes: int = 1
    link: float = math.inf
    sharded: bool = False

    def __post_init__(self):
        for name in ("threads", "read", "peak", "hertz", "nodes", "link"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected more than 0, found {getattr(self, name)!r}")
        if not self.call >= 0:
            raise ValueError(f"call: expected at least 0, found {self.call!r}")

    @property
    def weight_read(self) -> float:
        """The rate at which packed weights arrive: pages lie on all nodes alike, so that 1 - 1 / nodes of them are remote."""
        if self.nodes == 1 or self.sharded:
            return self.read
        return min(self.read, self.nodes * self.link / (1 - 1 / self.nodes))


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


def chunk_tokens(shape: Shape, tokens: int, kernel: Kernel, threads: int) -> int:
    """Tokens that the driver computes at once: it halves a batch until x, h and the slabs of y fit into the scratch memory."""
    rows = shape.top_k * kernel.x_bytes * shape.intermediate
    rows += kernel.x_bytes * shape.hidden * (shape.top_k if kernel.x_by_slot else 1)
    panels = max(1, min(8, shape.hidden // PANEL // (4 * threads)))
    rows += threads * panels * PANEL * 4
    while tokens > 1 and tokens * rows > SCRATCH_BYTES:
        tokens = (tokens + 1) // 2
    return tokens


def seconds(shape: Shape, tokens: int, kernel: Kernel, machine: Machine) -> float:
    """One call of one layer with random routing."""
    if tokens < 1:
        raise ValueError(f"tokens: expected at least 1, found {tokens}")
    most = chunk_tokens(shape, tokens, kernel, machine.threads)
    whole, rest = divmod(tokens, most)
    chunks = whole * _chunk_seconds(shape, most, kernel, machine) + (
        _chunk_seconds(shape, rest, kernel, machine) if rest else 0
    )
    return machine.call + chunks


def _chunk_seconds(shape: Shape, tokens: int, kernel: Kernel, machine: Machine) -> float:
    m, experts = expert_rows(shape.experts, shape.top_k, tokens)
    used, slots = experts.sum(), tokens * shape.top_k
    decode = 0 if shape.weights == "BF16" else shape.expert_bytes * kernel.decode_cycles / (machine.hertz * machine.threads)
    multiply = shape.slot_flops / (machine.peak * kernel.efficiency)
    compute = np.ceil(m / kernel.pass_rows) * decode + np.ceil(m / kernel.tile_rows) * kernel.tile_rows * multiply
    read = shape.expert_bytes / machine.weight_read
    nodes = machine.nodes if machine.sharded else 1
    items = {
        "A": used * math.ceil(shape.intermediate / nodes / PANEL),
        "B": math.ceil(shape.hidden / PANEL) * (used if slots <= FEW_SLOTS else 1),
    }
    total = 0.0
    for phase, share in PHASES.items():
        busiest = compute * imbalance(items[phase], math.ceil(machine.threads / nodes))
        hidden = kernel.overlap * np.minimum(read, busiest)
        total += share * float(experts @ (read + busiest - hidden))
    rows = tokens * shape.hidden * 4 + slots * (shape.hidden + 2 * shape.intermediate) * kernel.x_bytes
    total += rows / machine.read
    if machine.nodes > 1 and machine.sharded:
        total += tokens * shape.hidden * 4 / machine.link
    return total


def crossover(shape: Shape, kernel: Kernel, machine: Machine) -> float:
    """Tokens an expert at which multiplying takes as long as reading."""
    return BYTES_PER_WEIGHT[shape.weights] * machine.peak * kernel.efficiency / (2 * machine.read)


@dataclass(frozen=True)
class Cores:
    """Cores of one kind. flops_per_cycle: of the multiply instruction of the CPU's backend."""

    count: int
    ghz: float
    flops_per_cycle: int


@dataclass(frozen=True)
class Cpu:
    """A CPU from its maker's specification; see cpus.toml."""

    backend: str
    cores: tuple[Cores, ...]
    channels: int
    mega_transfers: int
    memory_gb: int
    source: str
    sockets: int = 1
    link_gb_s: float = math.inf
    read_limit_gb_s: float = math.inf

    def machine(self, sustained: float, call: float, call_per_thread: float, sharded: bool = False) -> Machine:
        """sustained: the share of the nominal bandwidth that reading reaches. All sockets together."""
        read = min(self.channels * self.mega_transfers * 8e6 * sustained, self.read_limit_gb_s * 1e9)
        count = sum(kind.count for kind in self.cores)
        return Machine(
            threads=self.sockets * count,
            read=self.sockets * read,
            peak=self.sockets * sum(kind.count * kind.ghz * 1e9 * kind.flops_per_cycle for kind in self.cores),
            hertz=sum(kind.count * kind.ghz * 1e9 for kind in self.cores) / count,
            call=call + call_per_thread * self.sockets * count,
            nodes=self.sockets,
            link=self.link_gb_s * 1e9,
            sharded=sharded,
        )


def read_shapes(path: Path) -> dict[str, Shape]:
    """models.toml."""
    return {name: _record(Shape, f"{path.name} [{name}]", table) for name, table in _tables(path).items()}


def read_cpus(path: Path) -> dict[str, Cpu]:
    """cpus.toml."""
    found = {}
    for name, table in _tables(path).items():
        where = f"{path.name} [{name}]"
        kinds = tuple(_record(Cores, f"{where} cores", kind) for kind in table.get("cores", ()))
        found[name] = _record(Cpu, where, table | ({"cores": kinds} if kinds else {}))
    return found


def _tables(path: Path) -> dict[str, dict]:
    with path.open("rb") as file:
        return tomllib.load(file)


def _record(kind: type, where: str, table: dict):
    names = {field.name: field for field in fields(kind)}
    unknown = sorted(set(table) - set(names))
    missing = sorted(name for name in kind.__match_args__ if name not in table and name not in vars(kind))
    if unknown or missing:
        known = ", ".join(names)
        raise ValueError(f"{where}: unknown fields {unknown}, missing fields {missing}; expected are {known}")
    for name, value in table.items():
        if isinstance(value, int | float) and not value > 0:
            raise ValueError(f"{where}: {name}: expected more than 0, found {value!r}")
    return kind(**table)
