"""Work that all processes end together: an error on one of them is an error on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ktmoe.distributed.communicator import Communicator
from ktmoe.distributed.messages import HEADER, header, headers, raise_any


@contextmanager
def together(communicator: Communicator, what: str, settings: object = None) -> Iterator[None]:
    """A block that each process runs by itself. Its end waits for all of them, as long as the communicator waits for one.

    what: for messages. settings: what else has to be the same on all. Raises RankError where the block raised on another
    process, or where these differ.

    Examples:
        >>> with together(Alone(), "loading"):
        ...     experts = ktmoe.load_experts("DeepSeek-V4-Flash", 3)
    """
    raised = None
    try:
        yield
    except BaseException as error:
        raised = error
    message = header(f"{what} {settings}", raised)
    received = communicator.exchange([message] * communicator.size, [HEADER.itemsize] * communicator.size)
    raise_any(what, communicator.rank, headers(received), raised)
