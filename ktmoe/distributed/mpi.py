"""MpiCommunicator: processes that mpiexec started, by mpi4py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from ktmoe.errors import RankError


class MpiCommunicator:
    """The processes of a communicator of mpi4py; None: all of them, MPI.COMM_WORLD.

    mpiexec ends all processes when one of them dies. MPI knows no time limit of an exchange. `python -m mpi4py` in the place of
    `python` lets an exception that ends one process end the others.
    """

    def __init__(self, communicator: MPI.Comm | None = None):
        self._communicator = (MPI.COMM_WORLD if communicator is None else communicator).Dup()  # nobody else's messages
        self._communicator.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank = self._communicator.Get_rank()
        self.size = self._communicator.Get_size()
        self._broken: str | None = None

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[int]) -> list[np.ndarray]:
        if self.size == 1:
            return list(outgoing)
        if self._broken:
            raise RankError(self._broken)
        lengths = [0 if other == self.rank else array.nbytes for other, array in enumerate(outgoing)]
        sent = np.concatenate([array[:length] for array, length in zip(outgoing, lengths, strict=True)])
        expected = [0 if other == self.rank else count for other, count in enumerate(incoming)]
        received = np.empty(sum(expected), np.uint8)
        try:
            self._communicator.Alltoallv([sent, lengths, MPI.BYTE], [received, expected, MPI.BYTE])
        except MPI.Exception as error:
            self._broken = f"rank {self.rank} of {self.size}: another rank cannot be reached: {error}"
            raise RankError(self._broken) from None
        parts = np.split(received, np.cumsum(expected)[:-1])
        return [outgoing[rank] if rank == self.rank else part for rank, part in enumerate(parts)]

    def fail(self) -> None:
        self._broken = self._broken or f"rank {self.rank} of {self.size}: an earlier call ended between two messages"

    def close(self) -> None:
        """All ranks call it."""
        self._broken = self._broken or f"rank {self.rank} of {self.size}: the communicator was closed"
        if self._communicator != MPI.COMM_NULL:
            self._communicator.Free()
