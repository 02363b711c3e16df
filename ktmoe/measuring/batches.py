"""Inputs of measured calls: tokens with random routing, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

#: Exponent of skewed routing's popularity, by Zipf's law: the r-th most popular expert is asked for in proportion to r^-SKEW.
#: 1 is what vLLM's benchmark_moe.py takes for skewed load (its pull request 57100 adds -log(rank) to the router's logits).
#: Among 256 experts and 6 a token, the most popular one then serves two tokens of three.
SKEW = 1.0


@dataclass(frozen=True)
class MeasuredBatch:
    """One call's input, x [tokens, hidden] bfloat16, and what it costs.

    experts: the distinct ones that it uses, whose packed weights it must read. slots: (token, expert) pairs to multiply.
    """

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    experts: np.ndarray
    slots: int


def random_batches(
    tokens: int, top_k: int, num_experts: int, hidden: int, *, among: int | None = None, skew: float = 0.0, seed: int = 0
) -> Iterator[MeasuredBatch]:
    """Endless batches with random routing: a token's experts are distinct, and every set of them is equally likely.

    Experts rotate, so that the weights come from memory and not from a cache; one token alone also avoids the experts of the
    call before. among: use so many experts a batch, others every time, to bound its work; all by default.
    skew: draw a token's experts one after the other by popularity, r^-skew for the r-th in an order that each batch has anew.
    """
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, hidden), np.float32).astype(ml_dtypes.bfloat16)
    among = min(among or num_experts, num_experts)
    top_k = min(top_k, among)
    last = np.empty(0, np.int64)
    while True:
        pool = random.permutation(num_experts)
        if tokens == 1:
            pool = pool[np.argsort(np.isin(pool, last), kind="stable")][: max(top_k, num_experts - len(last))]
        pool = pool[:among]
        # Whoever's exponential clock of rate r^-skew rings first: the same as drawing by popularity without replacement.
        clocks = random.standard_exponential((tokens, len(pool))) * np.arange(1, len(pool) + 1) ** skew
        ids = pool[np.argsort(clocks, axis=1)[:, :top_k]].astype(np.int64)
        weights = random.random(ids.shape, np.float32)
        weights /= weights.sum(axis=1, keepdims=True)
        last = np.unique(ids)
        yield MeasuredBatch(x, ids, weights, last, ids.size)


class HasSizes(Protocol):
    """An ExpertSpec, ExpertWeights, a MoELayer."""

    @property
    def hidden(self) -> int: ...

    @property
    def intermediate(self) -> int: ...


def slot_flops(shape: HasSizes) -> int:
    """FLOPs of one token in one expert."""
    return 2 * 3 * shape.hidden * shape.intermediate
