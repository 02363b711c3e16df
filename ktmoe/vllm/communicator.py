"""What vLLM's processes on CPUs tell each other, with what expert parallelism over data parallel ranks needs besides.

vLLM's own class lacks both: ranks that have different numbers of tokens exchange rows with all others.
"""

from __future__ import annotations

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class UnevenCommunicator(CpuCommunicator):
    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """All ranks' rows of a tensor, or of each in a list, in the ranks' order. sizes: how many rows each rank has."""
        if isinstance(input_, list):
            return [self.all_gatherv(each, dim, sizes) for each in input_]
        counts = sizes or [len(input_)] * self.world_size
        found = input_.new_empty((sum(counts), *input_.shape[1:]))
        parts = found.split(counts)
        parts[self.rank_in_group].copy_(input_)
        # gloo's own operation wants the same number of rows of all
        sent = [
            distributed.broadcast(part, rank, self.device_group, async_op=True)
            for part, rank in zip(parts, self.ranks, strict=True)
        ]
        for each in sent:
            each.wait()
        return found

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """The sum of all ranks' rows, of which each rank gets its own. They are added in float32, in the ranks' order."""
        counts = sizes or [len(input_) // self.world_size] * self.world_size
        own = counts[self.rank_in_group]
        rows = input_.new_empty((self.world_size * own, *input_.shape[1:]))
        distributed.all_to_all_single(rows, input_.contiguous(), [own] * self.world_size, counts, self.device_group)
        return rows.unflatten(0, (self.world_size, own)).sum(0, dtype=torch.float32).to(input_.dtype)
