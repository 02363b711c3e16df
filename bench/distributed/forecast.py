"""What several machines might do with the routed experts of real models: a model with assumed numbers, nothing of it measured.

An expert's weights are read, or its rows multiplied, at an assumed limit; the machine with most to do counts. Messages are
those of traffic.py. Only what Python and numpy take of a call is measured, by make bench-distributed on this or that CPU.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from dataclasses import dataclass

import numpy as np

from bench.distributed import model, traffic
from bench.models import Model, models
from bench.results_file import Results
from ktmoe import measuring
from ktmoe.distributed import Division

Row = tuple[str, ...]
#: Qwen3-235B is not in models.toml, whose models make bench measures. Its shape is of the config.json of
#: Qwen/Qwen3-235B-A22B-FP8.
MODELS = (
    models()["gpt-oss-120b"],
    models()["V4-Flash"],
    Model("Qwen3-235B-A22B FP8", "FP8", hidden=4096, intermediate=1536, experts=128, top_k=8, layers=94),
    models()["Kimi-K2"],
)
COUNTS = (1, 2, 4, 8)
#: The network of the page's table.
PAGE_NETWORK = "25 GbE"
TOKENS = (1, 16, 512)
SHARDS = 8
MEMORIES = (128, 256, 512)
#: Of a machine's memory, for routed experts.
SHARE_OF_MEMORY = 0.85
#: Batches whose mean is taken.
BATCHES = 4


@dataclass(frozen=True)
class Machine:
    """read: bytes a second of weights. peak: FLOPs a second."""

    read: float
    peak: float


@dataclass(frozen=True)
class Host:
    """Seconds of a call that no kernel takes: a number for each call, and for each byte of partial sums."""

    call: float
    byte: float


@dataclass(frozen=True)
class Work:
    """Of a call. experts: that each machine reads. slots: of token and expert, that it multiplies. rounds: of traffic.py."""

    experts: np.ndarray
    slots: np.ndarray
    rounds: list[np.ndarray]


MACHINES = {"100 GB/s": Machine(100e9, 2e12), "400 GB/s": Machine(400e9, 10e12)}
NETWORKS = {
    "25 GbE": model.Network.assumed(30e-6, 25e9 / 8),
    "100 GbE": model.Network.assumed(15e-6, 100e9 / 8),
}


def layer_seconds(shape: Model, tokens: int, count: int, machine: Machine, network: model.Network, host: Host) -> float:
    """A call of a layer on so many machines, tokens="same": the mean over random batches. One machine has a plain layer."""
    return statistics.fmean(
        _seconds(shape, tokens, work, machine, network, host) for work in works(shape, tokens, count, SHARDS, BATCHES)
    )


def _seconds(shape: Model, tokens: int, work: Work, machine: Machine, network: model.Network, host: Host) -> float:
    """Reading or multiplying, whichever takes longer, on the machine with most to do, and what several machines need more."""
    reading, multiplying = work.experts * shape.expert_bytes / machine.read, work.slots * shape.slot_flops / machine.peak
    seconds, count = float(np.maximum(reading, multiplying).max()), len(work.slots)
    if count > 1:
        seconds += model.exchange_seconds(network, work.rounds) + host.call
        seconds += host.byte * sums_bytes(tokens, shape.hidden, count)
    return seconds


@functools.cache
def works(shape: Model, tokens: int, count: int, shards: int, batches: int) -> list[Work]:
    """Of some random batches on so many machines."""
    division = Division(shape.experts, shards, 1, count, {})
    rank_of = division.home[division.group_of[:-1]]
    found = []
    for batch in itertools.islice(measuring.random_batches(tokens, shape.top_k, shape.experts, 1), batches):
        distinct, slots = (np.bincount(rank_of[each], minlength=count) for each in (batch.experts, batch.ids.reshape(-1)))
        found.append(Work(distinct, slots, traffic.same_tokens(division, batch.ids, shape.hidden)))
    return found


def sums_bytes(tokens: int, hidden: int, count: int, shards: int = SHARDS) -> float:
    """Of the partial sums that one rank adds: of its shards for all tokens, and of all ranks for some tokens."""
    return 4.0 * tokens * hidden * (shards / count + 1)


def host_of(section: dict) -> Host | None:
    """Of a results file's `distributed`: by the calls with fewest and most tokens of two ranks with CPUs of their own."""
    for group in section["group"]:
        if group["ranks"] == 2 and not group["shared"]:
            calls = sorted((call for call in group["call"] if call["tokens"] == "same"), key=lambda call: call["count"])
            if len(calls) > 1:
                few, many = calls[0], calls[-1]
                first, last = (sums_bytes(call["count"], section["hidden"], 2, section["shards"]) for call in (few, many))
                byte = max(0.0, 1e-3 * (many["host_ms"] - few["host_ms"]) / (last - first))
                return Host(max(0.0, 1e-3 * few["host_ms"] - byte * first), byte)
    return None


def machines_needed(shape: Model, gigabytes: int) -> int:
    """For its routed experts, of machines with so much memory."""
    return math.ceil(shape.nbytes / (SHARE_OF_MEMORY * gigabytes * 1e9))


def table(found: list[Results]) -> tuple[Row, list[Row]]:
    """tokens/s by 1, 2, 4 and 8 machines. What Python takes is of the results file that was measured last."""
    heads = ("model", "experts", f"needed with {' / '.join(map(str, MEMORIES))} GB", "a machine reads", "network", "machines")
    heads += tuple(f"tokens/s, {tokens} at a time" for tokens in TOKENS)
    host = _host(found)
    if host is None:
        return heads, []
    rows = []
    for shape, (reads, machine), (name, network) in itertools.product(MODELS, MACHINES.items(), NETWORKS.items()):
        needed = " / ".join(str(machines_needed(shape, memory)) for memory in MEMORIES)
        cells = (_rates(shape, tokens, machine, network, host) for tokens in TOKENS)
        rows.append((shape.name, f"{shape.nbytes / 1e9:.0f} GB", needed, reads, name, " / ".join(map(str, COUNTS)), *cells))
    return heads, rows


def page_table(found: list[Results]) -> tuple[Row, list[Row]]:
    """The rows of table() for one network, without its name and the numbers of machines."""
    heads, rows = table(found)
    left_out = [heads.index(name) for name in ("network", "machines")]
    rows = [row for row in rows if PAGE_NETWORK in row]
    heads, *rows = (tuple(cell for i, cell in enumerate(row) if i not in left_out) for row in (heads, *rows))
    return heads, rows


def assumptions(found: list[Results]) -> tuple[Row, list[Row]]:
    """The numbers of table()."""
    host = _host(found)
    if host is None:
        return ("what", "how much", "from"), []
    rows = [
        (f"a machine that reads {name}", f"{machine.peak / 1e12:g} TFLOP/s", "assumed") for name, machine in MACHINES.items()
    ]
    rows += [
        (name, f"{network.latency * 1e6:.0f} µs a round, {network.bandwidth / 1e9:.3g} GB/s", "assumed")
        for name, network in NETWORKS.items()
    ]
    rows += [
        ("memory for routed experts", f"{100 * SHARE_OF_MEMORY:.0f} % of a machine's", "assumed"),
        ("a call's time outside of kernels", f"{host.call * 1e6:.0f} µs", "measured, 1 token on 2 ranks"),
        ("and for a MB of partial sums", f"{host.byte * 1e12:.0f} µs", "measured, 512 tokens on 2 ranks"),
    ]
    return ("what", "how much", "from"), rows


def _host(found: list[Results]) -> Host | None:
    hosts = (host_of(results.data["distributed"]) for results in found if "distributed" in results.data)
    return next((host for host in hosts if host), None)


def _rates(shape: Model, tokens: int, machine: Machine, network: model.Network, host: Host) -> str:
    seconds = (shape.layers * layer_seconds(shape, tokens, count, machine, network, host) for count in COUNTS)
    return " / ".join(f"{float(f'{tokens / each:.3g}'):g}" for each in seconds)
