"""A layer call where all processes have the same tokens, and all get the output, as ranks of torchrun that run one model."""

from __future__ import annotations

import itertools

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
            tokens, _ = here = np.nonzero(at >= 0)
            sums = sums[at[here]]
        except Exception as error:
            raised = error
        call = {"tokens": len(ids), "top_k": ids.shape[1], "digest": digest(bits, ids, weights)}
        received = self._first_messages(raised, sums if few else None, **call)
        hidden = self._local.spec.hidden
        places = [
            here if other == rank else sent(wanted, wanted & (owners == other)) for other in range(self._communicator.size)
        ]
        if few:
            parts = [
                sums if other == rank else message[HEADER.itemsize :].view(np.float32).reshape(-1, hidden)[: len(place[0])]
                for other, (message, place) in enumerate(zip(received, places, strict=True))
            ]
            target[...] = rounded_like(added(parts, places, *wanted.shape), target)
            return
        # each process adds the sums of some tokens
        ends = np.linspace(0, len(ids), self._communicator.size + 1).astype(int)
        spans = np.searchsorted(tokens, ends)
        outgoing = [as_bytes(sums[start:end]) for start, end in itertools.pairwise(spans)]
        first, last = ends[rank : rank + 2]
        places = [(t[chosen] - first, s[chosen]) for t, s in places for chosen in [(t >= first) & (t < last)]]
        received = self._communicator.exchange(outgoing, [len(place[0]) * hidden * 4 for place in places])
        parts = [message.view(np.float32).reshape(-1, hidden) for message in received]
        own = rounded_like(added(parts, places, last - first, wanted.shape[1]), target)
        nbytes = own.dtype.itemsize * hidden
        received = self._communicator.exchange([as_bytes(own)] * self._communicator.size, (np.diff(ends) * nbytes).tolist())
        for other, message in enumerate(received):
            target[ends[other] : ends[other + 1]] = message.view(own.dtype).reshape(-1, hidden)

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
