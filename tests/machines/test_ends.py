"""Hosts that go, or never come: the others end within seconds, and say why in one line."""

from __future__ import annotations

import models
import pytest
from model_hosts import MEETING, Hosts, Text

from bench.engines import byte_tokenizer
from bench.namespaces import Machines

PROMPT = [5, 9, 40, 33, 7, 12]
#: Seconds until all processes of a host have ended when another's are gone, on machines with more to do. vLLM looks every 5.
SOON = 60
#: Seconds that a host is told to wait for others, and until it has ended, with what it takes to start.
WAIT, START = 10, 180


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = models.write("qwen3_moe", tmp_path_factory.mktemp("model") / "model", vocab_size=192)
    byte_tokenizer.write(folder, 192)
    return folder


def check_said(host, rank: int) -> None:
    [line] = host.lines("ktmoe ends this process")
    begin = f"ktmoe ends this process, since rank {rank} on another host has gone: "
    assert line.startswith((f"{begin}Connection closed by peer ", f"{begin}Read error ")), line


def test_a_host_is_killed(model, tmp_path):
    """One without a server while nothing is asked, then, with the same ports, the one with the server while both compute."""
    with Machines(2) as machines:
        hosts = Hosts(machines, model, tmp_path)
        hosts.start_all()
        hosts.wait()
        expected = Text.of(hosts.begin(PROMPT))
        machines.kill(1)
        hosts.all[0].seconds_to_end(SOON)
        check_said(hosts.all[0], rank=1)

        (tmp_path / "again").mkdir()
        again = Hosts(machines, model, tmp_path / "again")
        again.start_all()
        again.wait()
        assert Text.of(again.begin(PROMPT)) == expected
        with again.begin(PROMPT, new=110, stream=True) as request:
            assert request.stdout.readline().startswith("data: ")
            machines.kill(0)
        again.all[1].seconds_to_end(SOON)
        check_said(again.all[1], rank=0)


def test_hosts_do_not_meet(model, tmp_path):
    """The second has a wrong address of the first, for which the second never comes."""
    with Machines(2) as machines:
        hosts = Hosts(machines, model, tmp_path)
        wrong = machines.addresses[0].rpartition(".")[0] + ".99"
        for number, meeting in enumerate((None, wrong)):
            options = ["--tensor-parallel-size", "2", "--distributed-timeout-seconds", str(WAIT)]
            hosts.start(*options, *hosts.place(number, meeting))
        for host, address in zip(hosts.all, (machines.addresses[0], wrong), strict=True):
            host.seconds_to_end(START)
            assert host.process.returncode == 1
            [line] = host.lines("ktmoe: ")
            assert line.startswith(f"ktmoe: the hosts of this model do not meet at {address}:{MEETING}: ")
        assert "1/2 clients joined" in hosts.all[0].lines("ktmoe: ")[0]
        assert "No route to host" in hosts.all[1].said
