"""Experts and batches for tests of distributed layers."""

from __future__ import annotations

import numpy as np
from helpers import BF16, random_batch, random_experts

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, SHARDS = 16, 96, 256, 4, 8
#: What a token may choose: four experts, one of them twice, none at all, and ids that no expert has.
ODD = [[3, 3, 1, 14], [-1, EXPERTS, 2**40, -(2**40)], [5, -1, EXPERTS, 5]]


def made(seed=0, **options):
    return random_experts(np.random.default_rng(seed), EXPERTS, HIDDEN, INTERMEDIATE, biases=True, **options)


def batch_of(experts, tokens, seed=1, dtype=BF16):
    x, ids, weights = random_batch(np.random.default_rng(seed), experts, tokens, TOP_K, dtype)
    ids[: len(ODD)] = ODD[:tokens]
    return x, ids, weights
