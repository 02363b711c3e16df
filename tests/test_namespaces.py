"""bench/namespaces.py: only the network connects its machines, all ends with them, and it says why there can be none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from environments import ROOT

from bench import namespaces
from bench.namespaces import Machines, UnavailableError, processes

#: Takes what comes, and says how many bytes came, and in how many seconds.
TAKE = """
import socket, time
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    taken = server.accept()[0]
    start, count = time.monotonic(), 0
    while got := taken.recv(1 << 16):
        count += len(got)
print(count, time.monotonic() - start)
"""
SEND = "import socket; socket.create_connection(('machine0', 5000)).sendall(bytes(1 << 20))"
#: Two processes, and says when both are there. The second is not of the first one's group.
TWO = "setsid sleep 1000 & echo started; exec sleep 1000"
#: A driver whose machine runs them.
DRIVER = f"""
import subprocess, sys, time
from bench.namespaces import Machines
with Machines(1) as machines:
    machines.start(0, ["sh", "-c", "{TWO}"], stdout=subprocess.PIPE).stdout.readline()
    print(machines.network(0), flush=True)
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def _available():
    try:
        with Machines(1, "1gbit"):
            pass
    except UnavailableError as error:
        pytest.skip(f"there can be no network namespaces here: {error}")


def said(machines: Machines, machine: int, script: str) -> str:
    with machines.start(machine, ["sh", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        return process.stdout.read().strip()


def gone(network: str) -> bool:
    until = time.monotonic() + 20
    while processes(network) and time.monotonic() < until:
        time.sleep(0.02)
    return not processes(network)


def test_two_machines_share_no_more_than_a_network(tmp_path):
    with Machines(2) as machines:
        assert [said(machines, number, "hostname") for number in (0, 1)] == machines.names
        assert said(machines, 0, "ls /sys/class/net").split() == ["eth0", "lo"]
        assert said(machines, 0, "touch /dev/shm/one; ls /dev/shm") == "one"
        assert said(machines, 1, "ls /dev/shm") == ""
        with machines.start(1, ["pwd"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.read().strip() == str(tmp_path)
        at = [machines.network(number) for number in (0, 1)]
        assert len({*at, namespaces.network(os.getpid())}) == 3
        with machines.start(0, [sys.executable, "-c", TAKE], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout.readline() == "listening\n"
            assert machines.start(1, [sys.executable, "-c", SEND]).wait() == 0  # by the other one's name
            assert server.stdout.readline().startswith(f"{1 << 20} ")
    assert not any(map(processes, at))


def test_a_rate_holds_back_what_is_sent():
    with Machines(2, "8mbit") as machines, machines.start(0, [sys.executable, "-c", TAKE], stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        machines.start(1, [sys.executable, "-c", SEND])
        count, seconds = server.stdout.readline().split()
    # of 1 MiB at 1 MB/s, two queues let through a quarter each at once
    assert int(count) == 1 << 20
    assert float(seconds) > 0.5


def test_a_machine_dies_alone():
    with Machines(2) as machines:
        both = [machines.start(number, ["sh", "-c", TWO], stdout=subprocess.PIPE) for number in (0, 1)]
        for process in both:
            process.stdout.readline()
        machines.kill(0)
        assert both[0].wait() == -signal.SIGKILL
        assert [len(processes(machines.network(number))) for number in (0, 1)] == [1, 3]  # with the process that holds each
        assert said(machines, 0, "hostname") == "machine0"
        for process in both:
            process.stdout.close()


def test_nothing_outlives_an_exception():
    networks = []

    def fail():
        with Machines(1) as machines:
            networks.append(machines.network(0))
            with machines.start(0, ["sh", "-c", TWO], stdout=subprocess.PIPE).stdout as output:
                output.readline()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gone(*networks)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_signal(number):
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        network = driver.stdout.readline().strip()
        assert len(processes(network)) == 3
        driver.send_signal(number)
        driver.wait()
    assert gone(network)


def test_it_says_why_there_are_none(monkeypatch):
    with pytest.raises(UnavailableError, match=r'tc qdisc add .*: .*"?fast"?'), Machines(1, "fast"):
        pass
    with monkeypatch.context() as without:
        without.setattr(namespaces, "NAMESPACES", ("--no-such-namespace",))
        with pytest.raises(UnavailableError, match=r"namespaces cannot be made: .*"), Machines(1):
            pass
    with monkeypatch.context() as without:
        without.setattr(namespaces, "PROGRAMS", ("sh", "no-such-program"))
        with pytest.raises(UnavailableError, match=r"need programs that are not installed: no-such-program$"), Machines(1):
            pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnavailableError, match=r"need root$"), Machines(1):
        pass
