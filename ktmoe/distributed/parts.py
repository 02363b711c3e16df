"""What one rank has of a layer: pieces of experts, packed as experts of layers of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ktmoe.distributed.division import Division
from ktmoe.experts import ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.machine.numa import split
from ktmoe.matrix import Matrix
from ktmoe.matrix_cuts import take_columns, take_rows


class Part:
    """Pieces of one width: experts of a layer.

    held: (shard, expert) of each, ascending. weights: the ExpertWeights of these pieces, which are read when they are packed.
    """

    def __init__(
        self, experts: ExpertWeights, division: Division, held: Sequence[tuple[int, int]], pieces: Sequence[tuple[int, int]]
    ):
        self.held = held
        first, last = pieces[held[0][0] % division.cut]

        def read(slot: int, projection: str) -> Matrix:
            shard, expert = held[slot]
            matrix = experts.matrix(expert, projection)
            return matrix if division.cut == 1 else _piece(matrix, projection, shard % division.cut, pieces)

        self.weights = ExpertWeights(
            len(held),
            experts.hidden,
            last - first,
            read,
            experts.formats,
            experts.activation,
            experts.name,
            experts.router_weight,
        )
        self._slots = np.full((division.shards, division.num_experts + 1), -1)
        for slot, (shard, expert) in enumerate(held):
            self._slots[shard, expert] = slot
        self.shards = np.flatnonzero((self._slots >= 0).any(axis=1))

    def compute(
        self, layer: MoELayer, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, tokens: np.ndarray, shards: np.ndarray
    ) -> np.ndarray:
        """Partial sums of some tokens' shards, float32 [len(tokens), hidden]. layer: of self.weights.

        x: bits of bfloat16, uint16 [any, hidden]. ids, weights: [any, top_k], num_experts is no expert. tokens, shards: of each
        sum; the shards are of this part.
        """
        sums = np.empty((len(tokens), layer.hidden), np.float32)
        return layer.forward(x[tokens], self._slots[shards[:, None], ids[tokens]], weights[tokens], sums)


def parts_of(experts: ExpertWeights, division: Division, rank: int) -> list[Part]:
    """All that a rank has. Raises InputError where the intermediate dimension cannot be cut so often."""
    pieces = split(experts.intermediate, experts.shard_unit, division.cut)
    by_width: dict[int, list[tuple[int, int]]] = {}
    for shard, expert in division.held(rank):
        first, last = pieces[shard % division.cut]
        by_width.setdefault(last - first, []).append((shard, expert))
    return [Part(experts, division, held, pieces) for held in by_width.values()]


def _piece(matrix: Matrix, projection: str, piece: int, pieces: Sequence[tuple[int, int]]) -> Matrix:
    """A piece of the intermediate dimension: rows of gate and up, columns of down. down's bias is the first piece's."""
    first, last = pieces[piece]
    if projection != "down":
        return take_rows(matrix, first, last)
    taken = take_columns(matrix, first, last)
    return taken if taken.bias is None or not piece else replace(taken, bias=np.zeros_like(taken.bias))
