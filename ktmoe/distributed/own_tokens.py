"""A layer call where each process has tokens of its own, and gets theirs: what serves several batches at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ktmoe.distributed.communicator import Communicator
from ktmoe.distributed.local_experts import LocalExperts
from ktmoe.distributed.messages import AT_ONCE, HEADER
from ktmoe.distributed.numbers import as_bytes, rounded_like
from ktmoe.distributed.sums import All, Own, Places, sent
from ktmoe.distributed.way import Way

#: Experts of a token for which the first message has room. Calls with more take another message.
TOP_K_ROOM = 16


class _Sending(NamedTuple):
    """What goes to one rank. tokens: which, ascending. rows: uint8, their bytes. sums: (tokens, shards) of what comes back."""

    tokens: np.ndarray
    rows: np.ndarray
    sums: Places


class OwnTokens(Way):
    """A token's row goes once to each process that computes any of its experts, and the partial sums come back.

    With few tokens, rows go with the first message, which has room for them and goes to all. With more, they follow in a second
    one, to those alone that need them.
    """

    def __init__(self, local: LocalExperts, communicator: Communicator, gathered: int):
        super().__init__(local, communicator, gathered)
        self._room = gathered * _row(local.spec.hidden, TOP_K_ROOM).itemsize

    def forward(self, x: Any, expert_ids: Any, expert_weights: Any, out: Any) -> Any:
        try:
            bits, ids, weights, target, batch = self._local.checked(x, expert_ids, expert_weights, out)
        except Exception as error:
            self._rows_of_all(None, error)
            raise
        first, going_on = 0, True
        while going_on:  # until all ranks are done
            some = slice(first, first + AT_ONCE)
            going_on = self._compute(bits[some], ids[some], weights[some], target[some], max(0, len(ids) - first))
            first += AT_ONCE
        return batch.x.restore(target) if out is None else out

    def _compute(self, bits: np.ndarray, ids: np.ndarray, weights: np.ndarray, target: np.ndarray, left: int) -> bool:
        """Write the outputs of at most AT_ONCE tokens into target. left: with those that follow. Whether a rank has any."""
        sending, raised = None, None
        try:
            sending = self._sending(bits, ids, weights)
        except Exception as error:
            raised = error
        rows, going_on = self._rows_of_all(sending, raised, left, ids.shape[1])
        answers = self._answers(rows, sending)
        parts = [answer.view(np.float32).reshape(-1, self._local.spec.hidden) for answer in answers]
        places = [to.sums for to in sending]
        y = All.of(places, len(ids), self._local.division.shards).run(parts, len(ids))
        target[...] = rounded_like(y, target)
        return going_on

    def _sending(self, bits: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> list[_Sending]:
        division, sending = self._local.division, []
        wanted = division.wanted(ids)
        owners = division.owners(ids, wanted)
        for rank in range(self._communicator.size):
            computed = wanted & (owners == rank)
            tokens = np.flatnonzero(computed.any(axis=1))
            rows = np.empty(len(tokens), _row(self._local.spec.hidden, ids.shape[1]))
            rows["x"], rows["ids"], rows["weights"] = bits[tokens], ids[tokens], weights[tokens]
            rows["shards"] = np.where(computed[tokens], _BITS[: division.shards], 0).sum(axis=1, dtype=np.uint64)
            sending.append(_Sending(tokens, as_bytes(rows), sent(wanted, computed)))
        return sending

    def _rows_of_all(
        self, sending: Sequence[_Sending] | None, raised: Exception | None, left: int = 0, top_k: int = 0
    ) -> tuple[list[np.ndarray], bool]:
        """The rows that each rank has for this one, and whether a rank has more to come. First messages have one size."""
        size, hidden = self._communicator.size, self._local.spec.hidden
        outgoing = np.zeros((size, HEADER.itemsize + self._room), np.uint8)
        sending = sending or ()
        later = any(len(to.rows) > self._room for to in sending)
        for message, to in zip(outgoing, sending, strict=False):
            message[: HEADER.itemsize] = self._header(tokens=left, top_k=top_k, rows=len(to.tokens), later=later)
            if not later:
                message[HEADER.itemsize : HEADER.itemsize + len(to.rows)] = to.rows
        if raised is not None:
            outgoing[:, : HEADER.itemsize] = self._header(raised)
        received = self._communicator.exchange(list(outgoing), [outgoing.shape[1]] * size)
        found = self._raise_any(received, raised)
        kinds = [_row(hidden, each["top_k"]) for each in found]
        rows = [message[HEADER.itemsize :] for message in received]
        if found["later"].any():
            nothing = np.empty(0, np.uint8)
            incoming = [each["rows"] * kind.itemsize * each["later"] for each, kind in zip(found, kinds, strict=True)]
            second = self._communicator.exchange([to.rows if later else nothing for to in sending], incoming)
            rows = [after if each["later"] else before for each, before, after in zip(found, rows, second, strict=True)]
        counted = zip(rows, found["rows"], kinds, strict=True)
        return [own[: count * kind.itemsize].view(kind) for own, count, kind in counted], bool(
            (found["tokens"] > AT_ONCE).any()
        )

    def _answers(self, rows: Sequence[np.ndarray], sending: Sequence[_Sending]) -> list[np.ndarray]:
        """The partial sums, uint8, that each rank gives for what it was sent. rows: what this one was sent, of each rank."""
        division, hidden, raised = self._local.division, self._local.spec.hidden, None
        ids = np.full((sum(map(len, rows)), max(of["ids"].shape[1] for of in rows)), division.num_experts)
        weights = np.zeros(ids.shape, np.float32)
        ends = np.cumsum([0, *map(len, rows)])
        for of, first, last in zip(rows, ends, ends[1:], strict=False):
            top_k = of["ids"].shape[1]
            ids[first:last, :top_k], weights[first:last, :top_k] = of["ids"], of["weights"]
        wanted = division.wanted(ids)
        shards = np.concatenate([of["shards"] for of in rows])
        mine = (shards[:, None] & _BITS[: division.shards]) != 0
        own = Own.of(wanted, mine)
        spans = np.searchsorted(own.sent[0], ends)  # of each rank's sums
        sums = np.zeros((len(own.order), hidden), np.float32)
        try:
            bits = np.concatenate([of["x"] for of in rows])
            sums = own.run(self._local.partial_sums(bits, ids, weights, *own.computed))
        except Exception as error:
            raised = error
        told = self._header(raised)
        outgoing = [np.concatenate([told, as_bytes(sums[spans[r] : spans[r + 1]])]) for r in range(len(rows))]
        incoming = [HEADER.itemsize + len(to.sums[0]) * hidden * 4 for to in sending]
        received = self._communicator.exchange(outgoing, incoming)
        self._raise_any(received, raised)
        return [message[HEADER.itemsize :] for message in received]


#: The bit of each shard in a row's `shards`.
_BITS = np.uint64(1) << np.arange(64, dtype=np.uint64)


def _row(hidden: int, top_k: int) -> np.dtype:
    """One token's row in a message. shards: the bits of those that the receiver is to compute."""
    return np.dtype(
        [("x", np.uint16, (hidden,)), ("ids", np.int32, (top_k,)), ("weights", np.float32, (top_k,)), ("shards", np.uint64)]
    )
