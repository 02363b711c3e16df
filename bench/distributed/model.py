"""The time of a distributed call, as a model: what the slowest rank computes, and what the network takes for each round.

A network is known by exchanges of messages of several sizes on the same ranks, from when the last rank comes until the last one
has everything. A small message says the latency, a large one the bandwidth. Between the sizes, time is interpolated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.distributed.traffic import most_bytes


@dataclass(frozen=True)
class Network:
    """nbytes, ascending: that a rank sends in a round, to all others together. seconds: that a round of so many takes."""

    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def measured(cls, exchanges: Mapping[int, float], ranks: int) -> Network:
        """exchanges: seconds by the bytes that each rank sends to each other one."""
        sizes = sorted(exchanges)
        return cls(tuple(size * (ranks - 1) for size in sizes), tuple(exchanges[size] for size in sizes))

    @classmethod
    def assumed(cls, latency: float, bandwidth: float) -> Network:
        return cls((0.0, bandwidth), (latency, latency + 1))

    @property
    def latency(self) -> float:
        """Of the smallest message that was measured."""
        return self.seconds[0]

    @property
    def bandwidth(self) -> float:
        """Bytes a second, of what is more in the largest message than in the smallest."""
        return (self.nbytes[-1] - self.nbytes[0]) / max(self.seconds[-1] - self.seconds[0], 1e-12)

    def round_seconds(self, nbytes: float) -> float:
        if nbytes > self.nbytes[-1]:
            return self.seconds[-1] + (nbytes - self.nbytes[-1]) / self.bandwidth
        return float(np.interp(nbytes, self.nbytes, self.seconds))


def exchange_seconds(network: Network, rounds: Sequence[np.ndarray]) -> float:
    """All rounds of a call. rounds: of traffic.py. Of a round, the rank counts that sends or receives most."""
    return sum(network.round_seconds(most_bytes(sent)) for sent in rounds)


def compute_seconds(edges: Sequence[Sequence[float]]) -> float:
    """Of a call without its exchanges: what all ranks wait for, the slowest rank between two exchanges each.

    edges: of each rank, [start, when an exchange began, when it ended, ..., end].
    """
    edges = np.asarray(edges)
    return float((edges[:, 1::2] - edges[:, ::2]).max(axis=0).sum())


def messages_seconds(edges: Sequence[Sequence[float]]) -> float:
    """Of a call's exchanges, each from when the last rank came until the last one had everything."""
    edges = np.asarray(edges)
    return float((edges[:, 2::2].max(axis=0) - edges[:, 1:-1:2].max(axis=0)).sum())


def call_seconds(edges: Sequence[Sequence[float]]) -> float:
    """Until the last rank has ended."""
    return max(of[-1] for of in edges)
