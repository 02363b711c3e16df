"""Way: what the ways to call a layer have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ktmoe.distributed.communicator import Communicator
from ktmoe.distributed.local_experts import LocalExperts
from ktmoe.distributed.messages import header, headers, raise_any


class Way(ABC):
    """in_step: whether all ranks know of what forward() has raised last, so that they may go on."""

    def __init__(self, local: LocalExperts, communicator: Communicator, gathered: int):
        self._local, self._communicator, self._gathered = local, communicator, gathered
        self._what = f"{type(self).__name__} {gathered} {local.what}"
        self.in_step = True

    @abstractmethod
    def forward(self, x: Any, expert_ids: Any, expert_weights: Any, out: Any) -> Any:
        """y, as DistributedLayer.forward() has it."""

    def _header(self, raised: Exception | None = None, **fields: int) -> np.ndarray:
        return header(self._what, raised, **fields)

    def _raise_any(self, received: Sequence[np.ndarray], raised: Exception | None) -> np.ndarray:
        """The HEADERs of all ranks, if none of them raises."""
        found = headers(received)
        self.in_step = True
        raise_any(self._local.spec.name, self._communicator.rank, found, raised)
        self.in_step = False
        return found
