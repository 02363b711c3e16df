"""A distributed layer over random cases: on any number of ranks, divided in any way, it has the bits that one process gives."""

import math

import numpy as np
import pytest
from helpers import BF16, SCALES, same_bits
from random_layers import RandomLayer, experts_of, one_of, random_activation, random_formats, random_tokens
from ranks import Threads, raised

from ktmoe.distributed import DistributedLayer, Distribution
from ktmoe.experts import PROJECTIONS, ROUTER_WEIGHTS

#: Batches of a layer, which is packed once on each rank.
AT_ONCE = 5


def random_experts(rng):
    """Experts, and into how many pieces their intermediate dimension is to be cut."""
    formats, cut = random_formats(rng), int(one_of(rng, (1, 1, 2, 4)))
    unit = math.lcm(32, *(formats[p].unit[p == "down"] for p in PROJECTIONS))
    size = min(cut * unit, 512) + int(rng.integers(1, 33))
    sizes = int(rng.integers(1, 65)), size
    experts = experts_of(rng, formats, int(rng.integers(1, 9)), *sizes, SCALES, SCALES, True, random_activation(rng))
    return experts, min(cut, -(-experts.intermediate // experts.shard_unit))


def random_distribution(rng, num_experts, cut):
    """Options that must be alike on all ranks, and how many there are."""
    shards = cut * int(rng.integers(1, min(num_experts, 8) + 1))
    size = int(rng.integers(1, min(shards, 4) + 1))
    options = {"tokens": one_of(rng, ("same", "own")), "gathered": int(rng.integers(0, 6))}
    if rng.integers(2):
        options["homes"] = [*range(size), *rng.integers(0, size, shards - size).tolist()]
    if rng.integers(2):
        options["replicas"] = {None: {int(rng.integers(num_experts)): [int(rng.integers(size))]}}
    return {"shards": shards, "cut": cut}, options, size


@pytest.mark.cover("all")
def test_any_number_of_ranks_has_the_bits_of_one(repeat):
    for number in repeat("distributed layers on 1 to 4 ranks have the bits of one process", 1000):
        if number % AT_ONCE:
            continue  # it was computed with those before it
        rng = np.random.default_rng((number, 6))
        experts, cut = random_experts(rng)
        division, options, size = random_distribution(rng, experts.num_experts, cut)
        how = {"activations": "bf16", "router_weight": one_of(rng, ROUTER_WEIGHTS)}
        made = RandomLayer(experts)
        batches = []
        for _ in range(min(AT_ONCE, repeat.count(1000) - number)):
            tokens, dtype = int(rng.integers(1, 13)), np.float32 if rng.integers(2) else BF16
            ends = np.sort(rng.integers(0, tokens + 1, size - 1))
            batches.append((random_tokens(rng, made, tokens, dtype), [0, *ends.tolist(), tokens]))
        with DistributedLayer(experts, Distribution(**division), **how) as one:
            expected = [one.forward(*batch) for batch, _ in batches]

        def on(communicator, batches=batches, division=division, options=options, how=how, experts=experts):
            with DistributedLayer(experts, Distribution(communicator, **division, **options), **how) as layer:
                own = (slice(*ends[communicator.rank : communicator.rank + 2]) for _, ends in batches)
                every = (slice(None) for _ in batches)
                chosen = own if options["tokens"] == "own" else every
                return [layer.forward(*(of[rows] for of in batch)) for (batch, _), rows in zip(batches, chosen, strict=True)]

        results = Threads(size).run(on)
        assert not any(raised(results)), f"case {number}: {raised(results)}"
        for at, y in enumerate(expected):
            if options["tokens"] == "own":
                assert same_bits(np.concatenate([of[at] for of in results]), y), f"case {number + at}"
            else:
                assert all(same_bits(of[at], y) for of in results), f"case {number + at}"
