"""What ranks tell each other before numbers: that all is well or what was raised, and what they call."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ktmoe.distributed.numbers import as_bytes
from ktmoe.errors import RankError

#: Tokens of one round of messages: a call of more takes several. It bounds the memory of partial sums.
AT_ONCE = 512
#: raised: what an exception says, as UTF-8, or empty. layer: of whose call this is. tokens, top_k: of the call. digest: of its
#: arguments, where all ranks give the same. rows: of tokens to this rank.
#: later: whether a rank gets its rows in a second message.
HEADER = np.dtype(
    [
        ("raised", "S400"),
        ("layer", np.uint32),
        ("digest", np.uint32),
        ("tokens", np.int64),
        ("top_k", np.int64),
        ("rows", np.int64),
        ("later", np.bool_),
    ],
    align=True,  # float32 follows
)


def header(name: str, raised: Exception | None = None, **fields: int) -> np.ndarray:
    """A HEADER, uint8. name: of the layer. raised: what this rank raises as soon as the others know."""
    made = np.zeros(1, HEADER)
    made["layer"] = zlib.crc32(name.encode())
    if raised is not None:
        made["raised"] = f"{type(raised).__name__}: {raised}".encode()[: HEADER["raised"].itemsize]
    for field, value in fields.items():
        made[field] = value
    return made.view(np.uint8)


def headers(received: Sequence[np.ndarray]) -> np.ndarray:
    """The HEADERs at the beginning of what came from each rank."""
    return np.concatenate([message[: HEADER.itemsize] for message in received]).view(HEADER)


def raise_any(name: str, rank: int, found: np.ndarray, raised: Exception | None) -> None:
    """Raise what this rank has to, or a RankError for the first rank that raises or calls another layer.

    name: of the layer. found: the HEADERs of all ranks.
    """
    if raised is not None:
        raise raised
    for other, text in enumerate(found["raised"]):
        if text:
            raise RankError(f"{name}: rank {other} raised {text.decode(errors='replace')}")
    if (found["layer"] != found["layer"][rank]).any():
        other = int(np.flatnonzero(found["layer"] != found["layer"][rank])[0])
        raise RankError(f"{name}: rank {rank} calls this layer, and rank {other} another one")


def digest(*arrays: np.ndarray) -> int:
    """A number that differs, but for chance, where C-contiguous arrays do."""
    total = 0
    for array in arrays:
        total = zlib.crc32(as_bytes(array), total)
    return total
