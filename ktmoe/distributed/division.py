"""Division: which virtual shards a layer's experts are divided into, and which rank has which."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ktmoe.distributed.sums import sent
from ktmoe.errors import InputError
from ktmoe.forks import cached_property
from ktmoe.messages import show

#: Most virtual shards: a message says in 64 bits which of them a rank shall compute.
MOST = 64


@dataclass(frozen=True)
class Division:
    """A layer's experts in virtual shards, and these on ranks.

    num_experts: of the layer. shards: virtual ones. cut: pieces of the intermediate dimension. The experts form shards / cut
    groups of neighbours; shard g * cut + p has piece p of group g's experts. ranks: processes.
    replicas: {expert: ranks that have it besides its own}, in all pieces.
    homes: the rank that has each shard; None: neighbours, as many on each rank. Raises InputError.

    Examples:
        >>> division = Division(num_experts=8, shards=4, cut=1, ranks=2, replicas={})
        >>> division.home
        array([0, 0, 1, 1])
    """

    num_experts: int
    shards: int
    cut: int
    ranks: int
    replicas: Mapping[int, Sequence[int]]
    homes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.shards <= MOST:
            raise InputError(f"shards must be 1 to {MOST}, found {show(self.shards)}")
        if self.cut < 1 or self.shards % self.cut:
            raise InputError(f"cut must divide shards, {self.shards}, found {show(self.cut)}")
        if self.ranks > self.shards:
            raise InputError(f"shards must be at least the number of processes, {self.ranks}, found {self.shards}")
        if self.groups > self.num_experts:
            raise InputError(
                f"{self.num_experts} experts cannot form {self.groups} groups; shards / cut must be at most their number"
            )
        if self.homes is not None:
            homes = [operator.index(rank) for rank in self.homes]
            if len(homes) != self.shards or set(homes) != set(range(self.ranks)):
                expected = f"a rank for each of {self.shards} shards, and each of {self.ranks} ranks"
                raise InputError(f"homes must name {expected}, found {show(homes)}")
        for expert, ranks in self.replicas.items():
            if not 0 <= operator.index(expert) < self.num_experts:
                raise InputError(f"replicas must be of experts in [0, {self.num_experts}), found {show(expert)}")
            for rank in ranks:
                if not 0 <= operator.index(rank) < self.ranks:
                    raise InputError(f"replicas of expert {expert} must be on ranks in [0, {self.ranks}), found {show(rank)}")

    @property
    def groups(self) -> int:
        """Groups of experts."""
        return self.shards // self.cut

    @cached_property
    def group_of(self) -> np.ndarray:
        """The group of each expert, ascending, int64 [num_experts + 1]; the last is for ids that are no expert's: no group."""
        sizes = [len(part) for part in np.array_split(np.arange(self.num_experts), self.groups)]
        return np.append(np.repeat(np.arange(self.groups), sizes), self.groups)

    @cached_property
    def home(self) -> np.ndarray:
        """The rank that has each shard, int64 [shards]."""
        if self.homes is not None:
            return np.array(self.homes, np.int64)
        sizes = [len(part) for part in np.array_split(np.arange(self.shards), self.ranks)]
        return np.repeat(np.arange(self.ranks), sizes)

    def held(self, rank: int) -> list[tuple[int, int]]:
        """(shard, expert) of all that a rank has, ascending.

        Examples:
            >>> Division(num_experts=4, shards=4, cut=1, ranks=2, replicas={0: [1]}).held(1)
            [(0, 0), (2, 2), (3, 3)]
        """
        own = {(int(shard), int(expert)) for shard in np.flatnonzero(self.home == rank) for expert in self._experts_of(shard)}
        copies = {
            (int(self.group_of[expert]) * self.cut + piece, int(expert))
            for expert, ranks in self.replicas.items()
            if rank in ranks
            for piece in range(self.cut)
        }
        return sorted(own | copies)

    def most_rows(self, rank: int) -> int:
        """Partial sums of one token that a rank sends at most.

        Examples:
            >>> Division(num_experts=8, shards=4, cut=1, ranks=2, replicas={}).most_rows(0)
            1
        """
        if self.replicas:
            return self.shards
        return len(sent(np.ones((1, self.shards), bool), (self.home == rank)[None])[0])

    def wanted(self, ids: np.ndarray) -> np.ndarray:
        """Which shards tokens need, bool [tokens, shards]. ids: of experts, [tokens, top_k]; num_experts is no expert.

        Examples:
            >>> Division(num_experts=4, shards=4, cut=1, ranks=2, replicas={}).wanted(np.array([[0, 3]]))
            array([[ True, False, False,  True]])
        """
        groups = np.zeros((len(ids), self.groups + 1), bool)
        groups[np.arange(len(ids))[:, None], self.group_of[ids]] = True
        return np.repeat(groups[:, :-1], self.cut, axis=1)

    def owners(self, ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """The rank that computes each token's part of each shard, int64 [tokens, shards]. wanted: wanted(ids).

        A rank may compute it that has all experts which the token has chosen of that shard. Where there are several, the one
        with the least to compute so far does, of equal ones the first. All ranks find the same.

        Examples:
            >>> division, ids = Division(num_experts=4, shards=4, cut=1, ranks=2, replicas={}), np.array([[0, 3]])
            >>> division.owners(ids, division.wanted(ids))
            array([[0, 0, 1, 1]])
        """
        owner = np.broadcast_to(self.home, wanted.shape)
        if not self.replicas or not len(ids):
            return owner
        owner = owner.copy()
        able = self._able(ids) & wanted[:, :, None]
        able[np.arange(len(ids))[:, None], np.arange(self.shards), owner] = True
        chosen = wanted & (able.sum(axis=2) > 1)
        load = np.bincount(owner[wanted & ~chosen], minlength=self.ranks)
        for token, shard in np.argwhere(chosen):
            ranks = np.flatnonzero(able[token, shard])
            rank = ranks[load[ranks].argmin()]
            owner[token, shard] = rank
            load[rank] += 1
        return owner

    def _experts_of(self, shard: int | np.integer) -> np.ndarray:
        return np.flatnonzero(self.group_of[:-1] == shard // self.cut)

    def _able(self, ids: np.ndarray) -> np.ndarray:
        """Which ranks have copies of all experts that a token has chosen of a shard, bool [tokens, shards, ranks]."""
        copies = np.zeros((self.num_experts + 1, self.ranks), bool)
        for expert, ranks in self.replicas.items():
            copies[expert, list(ranks)] = True
        groups = np.ones((len(ids), self.groups + 1, self.ranks), bool)
        for slot in range(ids.shape[1]):
            groups[np.arange(len(ids)), self.group_of[ids[:, slot]]] &= copies[ids[:, slot]]
        return np.repeat(groups[:, :-1], self.cut, axis=1)
