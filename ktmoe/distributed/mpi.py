"""MpiCommunicator: processes that mpiexec started, by mpi4py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from ktmoe.distributed.communicator import joined, parted
from ktmoe.errors import RankError


class MpiCommunicator:
    """The processes of a communicator of mpi4py; None: all of them, MPI.COMM_WORLD.

    mpiexec ends all processes when one of them dies. MPI knows no time limit of an exchange.
    """

    def __init__(self, communicator: MPI.Comm | None = None):
        self._communicator = (MPI.COMM_WORLD if communicator is None else communicator).Dup()  # nobody else's messages
        self._communicator.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank = self._communicator.Get_rank()
        self.size = self._communicator.Get_size()

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[int]) -> list[np.ndarray]:
        if self.size == 1:
            return list(outgoing)
        sent, lengths = joined(outgoing, self.rank)
        expected = [0 if other == self.rank else count for other, count in enumerate(incoming)]
        received = np.empty(sum(expected), np.uint8)
        try:
            self._communicator.Alltoallv([sent, lengths, MPI.BYTE], [received, expected, MPI.BYTE])
        except MPI.Exception as error:
            raise RankError(f"rank {self.rank} of {self.size}: another rank cannot be reached: {error}") from None
        return parted(received, expected, self.rank, outgoing[self.rank])

    def close(self) -> None:
        if self._communicator != MPI.COMM_NULL:
            self._communicator.Free()
