"""Several machines made of this one: network namespaces on a bridge of their own.

Each has a host name, an address, lo, /dev/shm, System V's shared memory and abstract sockets: only the network connects two of
them. Processors, memory, files and process ids are this machine's. A machine has no name outside, so that two uses do not meet,
and Linux removes it with its last process. Needs root, util-linux and iproute2.

namespaces.py NAME HOSTS: the first process of a machine, in its namespaces. HOSTS: the text of /etc/hosts there.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

#: The network interface of each machine, besides lo.
INTERFACE = "eth0"
NETWORK, PREFIX = "10.77.0", 24
#: What a limited rate lets through at once, and how long a packet may wait.
BURST, LATENCY = "256kb", "50ms"
PROGRAMS = ("env", "ip", "mount", "nsenter", "tc", "unshare")
#: What a machine is made with, and what its processes enter.
NAMESPACES = ("--net", "--mount", "--uts", "--ipc")
#: /sys shows the interfaces of who mounts it. Below it, control groups stay mounted.
MOUNTS = """
ip link set lo up
mount -t tmpfs tmpfs /dev/shm
mkdir /dev/shm/fs
mount --rbind /sys/fs /dev/shm/fs
mount -t sysfs sysfs /sys
mount --move /dev/shm/fs /sys/fs
rmdir /dev/shm/fs
printf %s "$0" >/dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
rm /dev/shm/hosts
"""
READY = "ready\n"
#: Seconds until killed processes are gone.
PATIENCE = 30.0


class UnavailableError(Exception):
    """Why there can be no such machines here."""


class Machines:
    """count machines while a `with` lasts. rate: of each one's interface, both ways, in tc's words, such as "1gbit"."""

    def __init__(self, count: int, rate: str | None = None):
        self.names = [f"machine{number}" for number in range(count)]
        self.addresses = [f"{NETWORK}.{number + 1}" for number in range(count)]
        self.interface = INTERFACE
        self._rate = rate
        self._first: dict[str, subprocess.Popen] = {}
        self._started: list[subprocess.Popen] = []

    def __enter__(self) -> Machines:
        """Raises UnavailableError."""
        if os.geteuid() != 0:
            raise UnavailableError("network namespaces need root")
        if missing := [program for program in PROGRAMS if not shutil.which(program)]:
            raise UnavailableError(f"network namespaces need programs that are not installed: {', '.join(missing)}")
        with ExitStack() as made:
            made.callback(self._end)
            self._make()
            made.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def start(self, machine: int, arguments: Sequence[str | Path], **options: object) -> subprocess.Popen:
        """A process on a machine, whose number counts from 0. options: of Popen. It leads a group, so Ctrl-C is not its."""
        options = {"start_new_session": True} | options
        started = subprocess.Popen(self._inside(self.names[machine], arguments, options.pop("cwd", None)), **options)
        self._started.append(started)
        return started

    def kill(self, machine: int) -> None:
        """Let all processes of a machine die at once. Its network stays, and others may be started."""
        _kill_all(self.network(machine), spare=self._first[self.names[machine]].pid)

    def network(self, machine: int) -> str:
        """What names the machine's network namespace, see network()."""
        return network(self._first[self.names[machine]].pid)

    def _make(self) -> None:
        hosts = "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in zip(self.addresses, self.names, strict=True))
        for name in ("switch", *self.names):
            self._hold(name, hosts)
        self._set("switch", "ip link add bridge type bridge")
        self._set("switch", "ip link set bridge up")
        for name, address in zip(self.names, self.addresses, strict=True):
            self._set("switch", f"ip link add {name} type veth peer name {INTERFACE} netns {self._first[name].pid}")
            self._set("switch", f"ip link set {name} master bridge up")
            self._set(name, f"ip address add {address}/{PREFIX} dev {INTERFACE}")
            self._set(name, f"ip link set {INTERFACE} up")
            for at, device in (("switch", name), (name, INTERFACE)) if self._rate else ():
                self._set(at, f"tc qdisc add dev {device} root tbf rate {self._rate} burst {BURST} latency {LATENCY}")

    def _hold(self, name: str, hosts: str) -> None:
        """Make the namespaces of a machine, or of what connects them, and the process that holds them."""
        command, pipe = ["unshare", *NAMESPACES, sys.executable, __file__, name, hosts], subprocess.PIPE
        first = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        self._first[name] = first
        if first.stdout.readline() != READY:
            raise UnavailableError(f"namespaces cannot be made: {_last_line(first.stderr.read())}")

    def _set(self, name: str, command: str) -> None:
        done = subprocess.run(self._inside(name, command.split()), capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnavailableError(f"{command}: {_last_line(done.stderr)}")

    def _inside(self, name: str, arguments: Sequence[str | Path], folder: str | Path | None = None) -> list[str]:
        # in a new mount namespace a process is in the root folder
        enter = ["nsenter", "--target", self._first[name].pid, *NAMESPACES, "env", f"--chdir={Path(folder or '.').resolve()}"]
        return [str(word) for word in (*enter, *arguments)]

    def _end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        for first in self._first.values():
            first.communicate()


def network(pid: int) -> str:
    """What names a process's network namespace; nothing of a process that has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def processes(name: str) -> list[int]:
    """Those in a network namespace."""
    return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if network(pid) == name]


def _kill_all(name: str, spare: int) -> None:
    """Kill a network namespace's processes but one, again and again while they start others."""
    until = time.monotonic() + PATIENCE
    while (found := [pid for pid in processes(name) if pid != spare]) and time.monotonic() < until:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason is given"])[-1]


def main(name: str, hosts: str) -> int:
    socket.sethostname(name)
    done = subprocess.run(["sh", "-ec", MOUNTS, hosts], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(_last_line(done.stderr), file=sys.stderr)
        return 1
    print(READY, end="", flush=True)
    sys.stdin.read()  # ends with who holds the other end, however that comes
    _kill_all(network(os.getpid()), spare=os.getpid())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
