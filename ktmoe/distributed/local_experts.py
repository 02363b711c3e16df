"""LocalExperts: what one process has of a layer, and the partial sums that it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ktmoe.backends.base import Progress
from ktmoe.batch import Batch, checked_batch, checked_out
from ktmoe.distributed.division import Division
from ktmoe.distributed.numbers import bfloat16_bits
from ktmoe.distributed.parts import Part
from ktmoe.errors import ClosedError
from ktmoe.experts import ExpertSpec
from ktmoe.layer import MoELayer


class Arguments(NamedTuple):
    """A call's arguments, checked. bits: of x in bfloat16, uint16 [tokens, hidden]. ids: int64 [tokens, top_k], num_experts is
    no expert. weights: float32, likewise. target: where y goes, float32 or such bits. batch: as they were given."""

    bits: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    target: np.ndarray
    batch: Batch


class LocalExperts:
    """spec: of the whole layer. division: who has what. parts: this process' own. options: MoELayer's.

    Raises what MoELayer raises; nothing is kept then.
    """

    def __init__(self, spec: ExpertSpec, division: Division, parts: Sequence[Part], progress: Progress | None, **options: Any):
        self.spec, self.division = spec, division
        self._parts = parts
        self._everyone = np.ones(spec.num_experts, bool)
        self.layers: list[MoELayer] | None = []
        total, done = sum(part.weights.nbytes for part in parts), 0
        try:
            for part in parts:

                def report(now: int, of_part: int, before: int = done) -> None:
                    if progress:
                        progress(before + now, total)

                self.layers.append(MoELayer(part.weights, progress=report if progress else None, **options))
                done += part.weights.nbytes
        except BaseException:
            self.close()
            raise

    @property
    def what(self) -> str:
        """What has to be the same on all ranks."""
        division = self.division
        how = (
            division.shards,
            division.cut,
            division.home.tolist(),
            sorted((e, sorted(r)) for e, r in division.replicas.items()),
        )
        return f"{self.spec.name} {self.spec.description} {how}"

    def checked(self, x: Any, expert_ids: Any, expert_weights: Any, out: Any) -> Arguments:
        """Raises InputError, ClosedError."""
        if self.layers is None:
            raise ClosedError(f"{self.spec.name}: forward after close()")
        batch = checked_batch(self.spec, self._everyone, x, expert_ids, expert_weights)
        target = checked_out(out, batch, float32=True)
        ids = batch.ids.astype(np.int64)
        ids[(ids < 0) | (ids >= self.spec.num_experts)] = self.spec.num_experts
        return Arguments(bfloat16_bits(batch.x.array), ids, np.ascontiguousarray(batch.weights), target, batch)

    def partial_sums(
        self, bits: np.ndarray, ids: np.ndarray, weights: np.ndarray, tokens: np.ndarray, shards: np.ndarray
    ) -> np.ndarray:
        """Sums of some tokens' shards, all of which this process has, float32 [len(tokens), hidden].

        bits, ids, weights: as Arguments has them. tokens, shards: of each sum.
        """
        layers = self.layers
        if layers is None:
            raise ClosedError(f"{self.spec.name}: forward after close()")
        if len(self._parts) == 1:
            return self._parts[0].compute(layers[0], bits, ids, weights, tokens, shards)
        sums = np.empty((len(tokens), self.spec.hidden), np.float32)
        for part, layer in zip(self._parts, layers, strict=True):
            chosen = np.flatnonzero(np.isin(shards, part.shards))
            sums[chosen] = part.compute(layer, bits, ids, weights, tokens[chosen], shards[chosen])
        return sums

    def close(self) -> None:
        """Give the packed weights back."""
        for layer in self.layers or ():
            layer.close()
        self.layers = None
