"""A layer call where all processes have the same tokens, and all get the output, as ranks of torchrun that run one model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ktmoe.distributed.communicator import Communicator
from ktmoe.distributed.local_experts import LocalExperts
from ktmoe.distributed.messages import AT_ONCE, HEADER, digest, header, headers, raise_any
from ktmoe.distributed.numbers import as_bytes, rounded_like
from ktmoe.distributed.sums import add, added, numbered, sent
from ktmoe.errors import RankError


class SameTokens:
    """Each process computes its shards of all tokens. With few tokens, the first message has the sums, and everybody adds them.

    With more, a process adds the sums of some of the tokens, and tells the others its outputs, already rounded.
    """

    def __init__(self, local: LocalExperts, communicator: Communicator, gathered: int):
        self._local, self._communicator, self._gathered = local, communicator, gathered
        # rows of one token, at most, in a message of each rank
        self._rows = [self._most_rows(rank) for rank in range(self._communicator.size)]

    def forward(self, x, expert_ids, expert_weights, out):
        try:
            bits, ids, weights, target, batch = self._local.checked(x, expert_ids, expert_weights, out)
        except Exception as error:
            self._first_messages(error)
            raise
        for first in range(0, max(1, len(ids)), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            self._round(bits[some], ids[some], weights[some], target[some])
        return batch.x.restore(target) if out is None else out

    def _round(self, bits: np.ndarray, ids: np.ndarray, weights: np.ndarray, target: np.ndarray) -> None:
        """Write the outputs of at most AT_ONCE tokens into target."""
        division, rank, raised = self._local.division, self._communicator.rank, None
        few, sums = len(ids) <= self._gathered, None
        try:
            wanted = division.wanted(ids)
            owners = division.owners(ids, wanted)
            mine = wanted & (owners == rank)
            sums = self._local.partial_sums(bits, ids, weights, *np.nonzero(mine))
            at = numbered(mine)
            add(at, mine | ~wanted, sums)
            here = np.nonzero(at >= 0)
            sums = sums[at[here]]
        except Exception as error:
            raised = error
        call = {"tokens": len(ids), "top_k": ids.shape[1], "digest": digest(bits, ids, weights)}
        received = self._first_messages(raised, sums if few else None, **call)
        of_ranks = range(self._communicator.size)
        places = [here if other == rank else sent(wanted, wanted & (owners == other)) for other in of_ranks]
        if few:
            parts = [_rows(message[HEADER.itemsize :], self._local.spec.hidden) for message in received]
            parts = [rows[: len(place[0])] for rows, place in zip(parts, places, strict=True)]
            target[...] = rounded_like(added(parts, places, *wanted.shape), target)
        else:
            self._add_by_turns(sums, places, wanted.shape, target)

    def _add_by_turns(
        self, sums: np.ndarray, places: Sequence[tuple[np.ndarray, np.ndarray]], shape: tuple[int, int], target: np.ndarray
    ) -> None:
        """Each process adds the sums of some of the tokens, and tells the others.

        sums: this rank's. places: (tokens, shards) of each rank's. shape: (tokens, shards) of all.
        """
        rank, size, hidden = self._communicator.rank, self._communicator.size, self._local.spec.hidden
        ends = np.linspace(0, shape[0], size + 1).astype(int)
        spans = np.searchsorted(places[rank][0], ends)
        outgoing = [as_bytes(sums[start:end]) for start, end in itertools.pairwise(spans)]
        first, last = ends[rank : rank + 2]
        chosen = [(tokens >= first) & (tokens < last) for tokens, _ in places]
        places = [(tokens[own] - first, shards[own]) for (tokens, shards), own in zip(places, chosen, strict=True)]
        received = self._communicator.exchange(outgoing, [len(tokens) * hidden * 4 for tokens, _ in places])
        parts = [_rows(message, hidden) for message in received]
        own = rounded_like(added(parts, places, last - first, shape[1]), target)
        nbytes = own.dtype.itemsize * hidden
        received = self._communicator.exchange([as_bytes(own)] * size, (np.diff(ends) * nbytes).tolist())
        for message, (start, end) in zip(received, itertools.pairwise(ends), strict=True):
            target[start:end] = _rows(message, hidden, own.dtype)

    def _first_messages(self, raised: Exception | None, sums: np.ndarray | None = None, **call: int) -> list[np.ndarray]:
        """What all ranks say first, after it was looked at. Messages have the same size in every call, whatever happened."""
        name, rank = self._local.spec.name, self._communicator.rank
        sizes = [HEADER.itemsize + self._gathered * rows * self._local.spec.hidden * 4 for rows in self._rows]
        message = np.zeros(sizes[rank], np.uint8)
        message[: HEADER.itemsize] = header(name, raised, **call)
        if sums is not None and raised is None:
            message[HEADER.itemsize : HEADER.itemsize + sums.nbytes] = as_bytes(sums)
        received = self._communicator.exchange([message] * self._communicator.size, sizes)
        found = headers(received)
        raise_any(name, rank, found, raised)
        for field, what in (("tokens", "tokens"), ("top_k", "experts a token"), ("digest", None)):
            if (found[field] != found[field][rank]).any():
                other = int(np.flatnonzero(found[field] != found[field][rank])[0])
                differ = "other numbers in x, expert_ids or expert_weights"
                if what:
                    differ = f"{found[field][other]} {what} where rank {rank} has {found[field][rank]}"
                raise RankError(
                    f'{name}: tokens="same" needs the same arguments on all ranks, and rank {other} has {differ}; '
                    "ranks of one model need one kind of CPU, as many threads of torch, and one seed"
                )
        return received

    def _most_rows(self, rank: int) -> int:
        division = self._local.division
        if division.replicas:
            return len({shard for shard, _ in division.held(rank)})
        return len(sent(np.ones((1, division.shards), bool), (division.home == rank)[None])[0])


def _rows(message: np.ndarray, hidden: int, dtype: np.dtype | type = np.float32) -> np.ndarray:
    """What bytes hold, [any, hidden]."""
    return message.view(dtype).reshape(-1, hidden)
