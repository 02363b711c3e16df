"""GlooCommunicator: processes that torchrun started, by torch.distributed and its backend gloo."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ktmoe.errors import InputError, RankError

#: What torchrun tells a process.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class GlooCommunicator:
    """All processes of torch.distributed, or those of a group of it.

    torch.distributed is initialized if it is not yet, by the variables that torchrun sets. GLOO_SOCKET_IFNAME names the network
    interface.
    group: of torch.distributed; None: all processes. timeout: seconds that one exchange may take, and that a rank waits for
    another one that still loads. A rank that died is noticed at once; one that only stopped, or whose cable is out, then.
    Raises InputError where nothing says which processes there are, RankError where they do not find each other.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 600):
        if not timeout > 0:
            raise InputError(f"timeout must be a number of seconds above 0, found {timeout}")
        limit = timedelta(seconds=timeout)
        self._initialized = not dist.is_initialized()
        if self._initialized:
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
        _let_others_run()
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        self._broken: str | None = None

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[int]) -> list[np.ndarray]:
        if self.size == 1:
            return list(outgoing)
        if self._broken:
            raise RankError(self._broken)
        others = [other for other in range(self.size) if other != self.rank]
        received = [outgoing[r] if r == self.rank else np.empty(count, np.uint8) for r, count in enumerate(incoming)]
        try:
            # not all_to_all: it goes by two more threads of gloo's, and takes twice as long
            works = [
                dist.irecv(torch.from_numpy(received[other]), group=self._group, group_src=other)
                for other in others
                if incoming[other]
            ]
            works += [
                dist.isend(torch.from_numpy(outgoing[other]), group=self._group, group_dst=other)
                for other in others
                if outgoing[other].nbytes
            ]
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._broken = (
                f"rank {self.rank} of {self.size}: another rank is gone, or did not answer within {self.timeout:g} s: "
                f"{_said(error)}"
            )
            self._leave()
            raise RankError(self._broken) from None
        return received

    def fail(self) -> None:
        self._broken = self._broken or f"rank {self.rank} of {self.size}: an earlier call ended between two messages"
        self._leave()

    def _leave(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def close(self) -> None:
        self._broken = self._broken or f"rank {self.rank} of {self.size}: the communicator was closed"
        self._leave()
        if self._initialized and dist.is_initialized():
            dist.destroy_process_group()
        self._initialized = False

    @staticmethod
    def _reached(call: Any, what: str) -> Any:
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            raise RankError(f"{what}: {_said(error)}") from error


def _let_others_run() -> None:
    """Keep gloo's own threads from the CPUs that ranks compute on.

    After a message, such a thread polls for milliseconds. Beside a rank's thread on one CPU, it delayed half of the messages by
    2 to 5 ms. As SCHED_BATCH it does not take a CPU from who runs there, and messages of few bytes take 0.1 ms.
    """
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            if (task / "comm").read_text().strip() == "gloo_tcp_loop":
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def _said(error: Exception) -> str:
    """What gloo says, without its source file and its advice."""
    return re.sub(r"^\[\S+\] |\. This is .*", "", str(error).splitlines()[0])
