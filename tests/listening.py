"""Where a process and its children listen, by Linux's own table of sockets."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path

#: Of /proc/net/tcp.
LISTEN = "0A"


def addresses(pid: int) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Of all TCP sockets of these processes that take connections."""
    sockets = {inode for process in family(pid) for inode in _sockets(process)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in sockets:
                words = bytes.fromhex(fields[1].partition(":")[0])
                # in words of 32 bits of this CPU's byte order
                found.add(ipaddress.ip_address(b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))))
    return found


def family(pid: int) -> list[int]:
    """A process, its children, their children and so on."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _sockets(pid: int) -> set[str]:
    """Inodes."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:  # closed meanwhile
            continue
        if match:
            found.add(match[1])
    return found
