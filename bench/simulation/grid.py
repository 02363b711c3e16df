"""The points that are simulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from bench.models import Model, models
from bench.simulation import call
from bench.simulation.assumptions import Machine
from bench.simulation.costs import Costs
from ktmoe import measuring
from ktmoe.machine import numa

MODELS = ("V4-Flash", "gpt-oss-120b", "Qwen3-30B-A3B")
#: Tokens of a call that decodes, and of one that reads a prompt.
TOKENS = (1, 4096)
#: (nodes, threads).
MACHINES = ((1, 16), (1, 64), (2, 128), (8, 128))
#: Bytes per second of all nodes together.
BANDWIDTH = 600e9
#: Threads are equally fast.
JITTER = 0.0


def points(model: str, tokens: int, costs: Costs, bandwidth: float, jitter: float) -> list[dict]:
    """A model's, with one batch for all machines."""
    machines = (Machine(*pair, bandwidth, jitter=jitter) for pair in MACHINES)
    return [point(model, tokens, costs, machine) for machine in machines]


def point(model: str, tokens: int, costs: Costs, machine: Machine) -> dict:
    """One of a file. dispatch: efficiency without what comes before it. read: of the bytes that must be read."""
    shape = models()[model]
    s = call.simulate(shape, ids_of(shape, tokens), machine, costs)
    shares = {name: getattr(s, name) for name in ("efficiency", "idle", "before", "dealing", "gates", "end")}
    shares["dispatch"] = s.efficiency / (1 - s.before)
    about = {"model": model, "tokens": tokens, "nodes": machine.nodes, "threads": machine.threads, "ms": 1e3 * s.seconds}
    return {**about, **shares, "read": s.read / s.nbytes}


def ids_of(model: Model, tokens: int) -> np.ndarray:
    """Random routing; the same each time."""
    return next(measuring.random_batches(tokens, model.top_k, model.experts, 64)).ids


def simulated(
    costs: Costs, bandwidth: float = BANDWIDTH, jitter: float = JITTER, progress: Callable[[str], object] = lambda text: None
) -> Iterator[dict]:
    """All points, by as many processes as there are CPUs."""
    pairs = [*itertools.product(MODELS, TOKENS)]
    with ProcessPoolExecutor(len(numa.usable_cpus())) as pool:
        found = [pool.submit(points, *pair, costs, bandwidth, jitter) for pair in reversed(pairs)]
        for (model, tokens), future in zip(pairs, reversed(found), strict=True):
            progress(f"{model}, {tokens} tokens")
            yield from future.result()
