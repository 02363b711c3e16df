"""On which NUMA nodes memory lies, page by page, as Linux says."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
#: Of x86-64's system calls, of which move_pages() is one. With no nodes to move to, it says where pages are.
MOVE_PAGES = 279
#: What it says of a page that nobody has written.
ABSENT = (-errno.ENOENT, -errno.EFAULT)
_LIBC = ctypes.CDLL(None, use_errno=True)


def nodes_of(address: int, nbytes: int) -> list[int | None]:
    """The node of each page that these bytes are in; None: it is in no memory."""
    first = address // PAGE_BYTES
    count = -(-(address + nbytes) // PAGE_BYTES) - first
    pages = (ctypes.c_void_p * count)(*((first + i) * PAGE_BYTES for i in range(count)))
    found = (ctypes.c_int * count)()
    if _LIBC.syscall(MOVE_PAGES, 0, ctypes.c_ulong(count), pages, None, found, 0) < 0:
        raise OSError(ctypes.get_errno(), "move_pages")
    strange = sorted({node for node in found if node < 0} - set(ABSENT))
    assert not strange, f"move_pages says {strange}"
    return [None if node < 0 else node for node in found]


def nodes_by_shard(ranges: Iterable[tuple[int, int, int]]) -> dict[int, set[int | None]]:
    """{shard: the nodes of its pages}, of ranges (shard, address, bytes)."""
    found: dict[int, set[int | None]] = {}
    for shard, address, nbytes in ranges:
        found.setdefault(shard, set()).update(nodes_of(address, nbytes))
    return found
