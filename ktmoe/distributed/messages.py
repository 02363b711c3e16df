"""What ranks tell each other before numbers: that all is well or what was raised, and what they call."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ktmoe.distributed.numbers import as_bytes
from ktmoe.errors import RankError

#: Tokens that are computed at a time, which bounds the memory of partial sums. A call of more takes turns.
AT_ONCE = 512
#: raised: what an exception says, as UTF-8, or empty. what: a number of what is called, and how it is divided. tokens, top_k,
#: itemsize: of the call, of x and y. digest: of its arguments, where all ranks give the same. rows: of tokens to this rank.
#: later: whether a rank gets its rows in a second message.
HEADER = np.dtype(
    [
        ("raised", "S400"),
        ("what", np.uint32),
        ("digest", np.uint32),
        ("tokens", np.int64),
        ("top_k", np.int64),
        ("rows", np.int64),
        ("later", np.bool_),
        ("itemsize", np.uint8),
    ],
    align=True,  # float32 follows
)


def header(what: str, raised: BaseException | None = None, **fields: int) -> np.ndarray:
    """A HEADER, uint8. what: is called, the same on all ranks. raised: what this rank raises as soon as the others know."""
    made = np.zeros(1, HEADER)
    made["what"] = zlib.crc32(what.encode(errors="backslashreplace"))
    if raised is not None:
        text = f"{type(raised).__name__}: {raised}".encode(errors="backslashreplace")
        made["raised"] = text[: HEADER["raised"].itemsize]
    for field, value in fields.items():
        made[field] = value
    return made.view(np.uint8)


def headers(received: Sequence[np.ndarray]) -> np.ndarray:
    """The HEADERs at the beginning of what came from each rank."""
    return np.concatenate([message[: HEADER.itemsize] for message in received]).view(HEADER)


def raise_any(name: str, rank: int, found: np.ndarray, raised: BaseException | None) -> None:
    """Raise what this rank has to, or a RankError for the first rank that raises, or that calls something else.

    name: of the layer. found: the HEADERs of all ranks.
    """
    if raised is not None:
        raise raised
    for other, text in enumerate(found["raised"]):
        if text:
            raise RankError(f"{name}: rank {other} raised {text.decode(errors='replace')}")
    if (found["what"] != found["what"][rank]).any():
        other = int(np.flatnonzero(found["what"] != found["what"][rank])[0])
        raise RankError(
            f"{name}: rank {other} calls another layer than rank {rank}, or has another checkpoint, or a Distribution with "
            "other options"
        )


def digest(*arrays: np.ndarray) -> int:
    """A number that differs, but for chance, where C-contiguous arrays do."""
    total = 0
    for array in arrays:
        total = zlib.crc32(as_bytes(array).data, total)
    return total
