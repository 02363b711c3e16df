"""GlooCommunicator: processes that torchrun started, by torch.distributed and its backend gloo."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from ktmoe.distributed.communicator import joined, parted
from ktmoe.errors import InputError, RankError

#: What torchrun tells a process.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class GlooCommunicator:
    """All processes of torch.distributed, or those of a group of it.

    torch.distributed is initialized if it is not yet, by the variables that torchrun sets. GLOO_SOCKET_IFNAME names the network
    interface.
    group: of torch.distributed; None: all processes. timeout: seconds that one exchange may take. A rank that died is noticed
    at once; one that only stopped, or whose cable is out, is noticed then.
    Raises InputError where nothing says which processes there are, RankError where they do not find each other.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 600):
        if not timeout > 0:
            raise InputError(f"timeout must be a number of seconds above 0, found {timeout}")
        limit = timedelta(seconds=timeout)
        if not dist.is_initialized():
            if missing := [name for name in VARIABLES if name not in os.environ]:
                raise InputError(
                    f"expected torch.distributed to be initialized, or the variables that torchrun sets; {', '.join(missing)} "
                    "not set: start the processes with torchrun"
                )
            self._reached(lambda: dist.init_process_group("gloo", timeout=limit), "the processes did not find each other")
        ranks = None if group is None else dist.get_process_group_ranks(group)
        self.timeout = timeout
        self._group = self._reached(
            lambda: dist.new_group(ranks, limit, "gloo", use_local_synchronization=ranks is not None),
            "the processes could not form a group",
        )
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        self._broken: str | None = None

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[int]) -> list[np.ndarray]:
        if self.size == 1:
            return list(outgoing)
        if self._broken:
            raise RankError(self._broken)
        sent, lengths = joined(outgoing, self.rank)
        expected = [0 if other == self.rank else count for other, count in enumerate(incoming)]
        received = torch.empty(sum(expected), dtype=torch.uint8)
        try:
            dist.all_to_all_single(received, torch.from_numpy(sent), expected, lengths, self._group)
        except RuntimeError as error:
            # what is under way cannot be told from what comes next, so that the group is of no more use
            self._broken = (
                f"rank {self.rank} of {self.size}: another rank is gone, or did not answer within {self.timeout:g} s: "
                f"{_said(error)}"
            )
            raise RankError(self._broken) from None
        return parted(received.numpy(), expected, self.rank, outgoing[self.rank])

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group, self._broken = None, f"rank {self.rank} of {self.size}: the communicator was closed"

    @staticmethod
    def _reached(call, what: str):
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            raise RankError(f"{what}: {_said(error)}") from error


def _said(error: Exception) -> str:
    """What gloo says, without its source file and its advice."""
    return re.sub(r"^\[\S+\] |\. This is .*", "", str(error).splitlines()[0])
