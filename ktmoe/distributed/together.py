"""Work that all processes end together: an error on one of them is an error on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ktmoe.distributed.communicator import Communicator
from ktmoe.distributed.messages import HEADER, header, headers, raise_any


@contextmanager
def together(communicator: Communicator, what: str) -> Iterator[None]:
    """A block that each process runs by itself. Its end waits for all of them.

    what: for messages, the same on all. Raises RankError where the block raised on another process.
    """
    raised = None
    try:
        yield
    except Exception as error:
        raised = error
    message = header(what, raised)
    received = communicator.exchange([message] * communicator.size, [HEADER.itemsize] * communicator.size)
    raise_any(what, communicator.rank, headers(received), raised)
