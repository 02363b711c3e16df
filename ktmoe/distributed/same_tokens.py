"""A layer call where all processes have the same tokens, and all get the output, as ranks of torchrun that run one model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ktmoe.distributed.communicator import Communicator
from ktmoe.distributed.local_experts import LocalExperts
from ktmoe.distributed.messages import AT_ONCE, HEADER, digest
from ktmoe.distributed.numbers import as_bytes, rounded_like
from ktmoe.distributed.sums import All, Own, Places, sent
from ktmoe.distributed.way import Way
from ktmoe.errors import RankError


class _Pattern(NamedTuple):
    """What a call adds, by the shards that its tokens need. places: of each rank's sums. all: of a few tokens."""

    own: Own
    places: list[Places]
    all: All | None

    @classmethod
    def of(cls, wanted: np.ndarray, owners: np.ndarray, rank: int, size: int, few: bool) -> _Pattern:
        """wanted, owners: of Division. rank, size: of the communicator."""
        computed = [wanted & (owners == other) for other in range(size)]
        own = Own.of(wanted, computed[rank])
        places = [own.sent if other == rank else sent(wanted, computed[other]) for other in range(size)]
        return cls(own, places, All.of(places, *wanted.shape) if few else None)


@functools.lru_cache(maxsize=1024)
def _pattern_of_one(wanted: bytes, owners: bytes, rank: int, size: int) -> _Pattern:
    """Of one token, so that a decode step finds them again: with 8 shards there are 256."""
    of_shards = np.frombuffer(wanted, bool)[None], np.frombuffer(owners, np.int64)[None]
    return _Pattern.of(*of_shards, rank, size, True)


class SameTokens(Way):
    """Each process computes its shards of all tokens. With few tokens, the first message has the sums, and everybody adds them.

    With more, a process adds the sums of some of the tokens, and tells the others its outputs, already rounded.
    """

    def __init__(self, local: LocalExperts, communicator: Communicator, gathered: int):
        super().__init__(local, communicator, gathered)
        rows = [local.division.most_rows(rank) for rank in range(communicator.size)]
        #: Bytes of each rank's first message, whatever is called and whatever happened.
        self._first_bytes = [HEADER.itemsize + gathered * of_rank * local.spec.hidden * 4 for of_rank in rows]

    def forward(self, x: Any, expert_ids: Any, expert_weights: Any, out: Any) -> Any:
        try:
            bits, ids, weights, target, batch = self._local.checked(x, expert_ids, expert_weights, out)
        except Exception as error:
            self._first_messages(error)
            raise
        for first in range(0, max(1, len(ids)), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            self._compute(bits[some], ids[some], weights[some], target[some])
        return batch.x.restore(target) if out is None else out

    def _compute(self, bits: np.ndarray, ids: np.ndarray, weights: np.ndarray, target: np.ndarray) -> None:
        """Write the outputs of at most AT_ONCE tokens into target."""
        few, sums, raised = len(ids) <= self._gathered, None, None
        try:
            pattern = self._pattern(ids, few)
            sums = pattern.own.run(self._local.partial_sums(bits, ids, weights, *pattern.own.computed))
        except Exception as error:
            raised = error
        call = {"tokens": len(ids), "top_k": ids.shape[1], "itemsize": target.itemsize, "digest": digest(bits, ids, weights)}
        received = self._first_messages(raised, sums if few else None, **call)
        if few:
            parts = [_rows(message[HEADER.itemsize :], self._local.spec.hidden) for message in received]
            parts = [rows[: len(tokens)] for rows, (tokens, _) in zip(parts, pattern.places, strict=True)]
            target[...] = rounded_like(pattern.all.run(parts, len(ids)), target)
        else:
            self._add_by_turns(sums, pattern.places, target)

    def _pattern(self, ids: np.ndarray, few: bool) -> _Pattern:
        wanted = self._local.division.wanted(ids)
        owners = self._local.division.owners(ids, wanted)
        rank, size = self._communicator.rank, self._communicator.size
        if few and len(ids) == 1:
            return _pattern_of_one(wanted.tobytes(), owners.tobytes(), rank, size)
        return _Pattern.of(wanted, owners, rank, size, few)

    def _add_by_turns(self, sums: np.ndarray, places: Sequence[Places], target: np.ndarray) -> None:
        """Each process adds the sums of some of the tokens, and tells the others. sums: this rank's. places: of each rank's."""
        rank, size, hidden = self._communicator.rank, self._communicator.size, self._local.spec.hidden
        ends = np.linspace(0, len(target), size + 1).astype(int)
        spans = np.searchsorted(places[rank][0], ends)
        outgoing = [as_bytes(sums[start:end]) for start, end in itertools.pairwise(spans)]
        first, last = ends[rank : rank + 2]
        chosen = [(tokens >= first) & (tokens < last) for tokens, _ in places]
        places = [(tokens[own] - first, shards[own]) for (tokens, shards), own in zip(places, chosen, strict=True)]
        received = self._communicator.exchange(outgoing, [len(tokens) * hidden * 4 for tokens, _ in places])
        parts = [_rows(message, hidden) for message in received]
        y = All.of(places, last - first, self._local.division.shards).run(parts, last - first)
        own = rounded_like(y, target)
        nbytes = own.dtype.itemsize * hidden
        received = self._communicator.exchange([as_bytes(own)] * size, (np.diff(ends) * nbytes).tolist())
        for message, (start, end) in zip(received, itertools.pairwise(ends), strict=True):
            target[start:end] = _rows(message, hidden, own.dtype)

    def _first_messages(self, raised: Exception | None, sums: np.ndarray | None = None, **call: int) -> list[np.ndarray]:
        """What all ranks say first, after it was looked at."""
        name, rank = self._local.spec.name, self._communicator.rank
        message = np.zeros(self._first_bytes[rank], np.uint8)
        message[: HEADER.itemsize] = self._header(raised, **call)
        if sums is not None and raised is None:
            message[HEADER.itemsize : HEADER.itemsize + sums.nbytes] = as_bytes(sums)
        received = self._communicator.exchange([message] * self._communicator.size, self._first_bytes)
        found = self._raise_any(received, raised)
        for field, what in (
            ("tokens", "tokens"),
            ("top_k", "experts a token"),
            ("itemsize", "bytes a number of y"),
            ("digest", ""),
        ):
            if (found[field] != found[field][rank]).any():
                other = int(np.flatnonzero(found[field] != found[field][rank])[0])
                differ = "other numbers in x, expert_ids or expert_weights"
                if what:
                    differ = f"{found[field][other]} {what} where rank {rank} has {found[field][rank]}"
                self.in_step = True
                raise RankError(
                    f'{name}: tokens="same" needs the same arguments on all ranks, and rank {other} has {differ}; '
                    "ranks of one model need one kind of CPU, as many threads of torch, and one seed"
                )
        return received


def _rows(message: np.ndarray, hidden: int, dtype: np.dtype | type = np.float32) -> np.ndarray:
    """What bytes hold, [any, hidden]."""
    return message.view(dtype).reshape(-1, hidden)
