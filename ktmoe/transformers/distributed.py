"""A model on several processes: each loads its part of the experts, and all compute the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ktmoe.distributed.layer import Distribution
from ktmoe.distributed.together import together
from ktmoe.errors import InputError
from ktmoe.messages import show


def distribution_of(distributed: Distribution | bool | None) -> Distribution | None:
    """What load() was given: True is a Distribution among torchrun's processes.

    Raises InputError for what is none, and what GlooCommunicator raises.
    """
    if distributed is None or distributed is False:
        return None
    if distributed is not True:
        if not isinstance(distributed, Distribution):
            raise InputError(f"distributed must be True, None or a Distribution, found {show(distributed)}")
        return distributed
    from ktmoe.distributed.gloo import GlooCommunicator  # not before: torch may have been built without it

    return Distribution(GlooCommunicator())


@contextmanager
def together_loaded(distribution: Distribution | None) -> Iterator[None]:
    """Within it, all processes load. Its end waits for all, and gives them one seed, so that they draw the same tokens."""
    if distribution is None:
        yield
        return
    communicator = distribution.communicator
    with together(communicator, "loading", distribution.what):
        yield
    own = np.array([torch.initial_seed()], np.uint64).view(np.uint8)
    seeds = communicator.exchange([own] * communicator.size, [own.nbytes] * communicator.size)
    torch.manual_seed(int(seeds[0].view(np.uint64)[0]))
