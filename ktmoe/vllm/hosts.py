"""A model that processes on several hosts share: vLLM's worker, with what it lacks for that on CPUs.

When a process of one host has gone, those of the others end, too. vLLM's own worker notices a broken connection when it next
computes with the others. A host without a server is then not asked to, and waits for ever. Data parallel ranks exchange tokens
by a UnevenCommunicator.
"""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

import torch
from torch import distributed
from vllm.config import ParallelConfig
from vllm.distributed.parallel_state import get_dp_group
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip
from vllm.v1.worker.cpu_worker import CPUWorker

from ktmoe.vllm.communicator import UnevenCommunicator

# vLLM shows what its own loggers say
_logger = init_logger("vllm.ktmoe")
#: How long to wait for what nobody sends.
_FOREVER = timedelta(days=10_000)


class HostWorker(CPUWorker):
    """vLLM's worker for CPUs, which is the same where all processes are on one host and have all tokens."""

    def init_device(self) -> None:
        self._ends = threading.Event()
        try:
            super().init_device()
        except distributed.DistError as error:
            _logger.critical("ktmoe: the hosts of this model do not meet at %s: %s", meeting_place(self.parallel_config), error)
            raise
        data_parallel = get_dp_group()
        if data_parallel.world_size > 1:
            data_parallel.device_communicator = UnevenCommunicator(
                data_parallel.cpu_group, data_parallel.device, data_parallel.device_group, data_parallel.unique_name
            )
        elsewhere = ranks_elsewhere()
        if elsewhere:
            connected = distributed.new_group(backend="gloo")
            for rank in elsewhere:
                threading.Thread(target=self._end_with, args=(rank, connected), daemon=True).start()

    def shutdown(self) -> None:
        self._ends.set()
        super().shutdown()

    def _end_with(self, rank: int, connected: distributed.ProcessGroup) -> None:
        """Wait for what does not come, since that fails when the connection breaks."""
        try:
            distributed.irecv(torch.empty(1), rank, connected).wait(_FOREVER)
        except RuntimeError as error:
            if not self._ends.is_set():
                _logger.critical("ktmoe ends this process, since rank %d on another host has gone: %s", rank, reason(error))
                os._exit(1)  # another thread may wait for that rank


def ranks_elsewhere() -> list[int]:
    """The processes on other hosts than this one's, as their names and addresses say."""
    here = socket.gethostname(), get_ip()
    hosts: list[tuple[str, str] | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(hosts, here)
    return [rank for rank, host in enumerate(hosts) if host != here]


def meeting_place(parallel: ParallelConfig) -> str:
    """Where the processes find each other first."""
    if parallel.nnodes > 1:
        return f"{parallel.master_addr}:{parallel.master_port}"
    return parallel.data_parallel_master_ip


def reason(error: RuntimeError) -> str:
    """gloo's first sentence, without the place in its source."""
    return str(error).rpartition(".cc:")[2].partition("] ")[2].partition(". ")[0] or str(error)
