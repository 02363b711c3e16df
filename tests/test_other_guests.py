"""tools/numa_guest.py and tools/two_guests.py: what they ask of QEMU, and how they end. No guest is started here."""

import subprocess
import sys

import pytest

from tools import guest, numa_guest, two_guests


@pytest.fixture
def nothing_there(monkeypatch):
    monkeypatch.setattr(guest.shutil, "which", lambda program: None)
    monkeypatch.setattr(guest.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(guest.signal, "signal", lambda *arguments: None)


@pytest.mark.usefixtures("nothing_there")
@pytest.mark.parametrize(
    ("main", "arguments", "package"), [(numa_guest.main, [], "e2fsprogs"), (two_guests.main, ["true"], "iproute2")]
)
def test_nothing_can_be_had(main, arguments, package, capsys):
    assert main(arguments) == 0
    expected = f"ktmoe: nothing ran in a guest: only root can install qemu-system-x86, busybox-static, kmod, {package}\n"
    assert capsys.readouterr().out == expected


def test_a_guest_that_there_is_not(capsys):
    assert numa_guest.main(["two", "six"]) == 2
    assert capsys.readouterr().out == "ktmoe: guests are two, four, unequal, apart, found six\n"


@pytest.mark.parametrize(
    ("arguments", "names", "command"),
    [
        ([], ["two", "four", "unequal", "apart"], "pytest"),
        (["apart"], ["apart"], "pytest"),
        (["two", "four", "--", "ls", "-l"], ["two", "four"], " ls -l"),
        (["--", "ls"], ["two", "four", "unequal", "apart"], " ls"),
    ],
)
def test_which_guests_run_what(monkeypatch, arguments, names, command):
    """The exit code is the greatest."""
    ran = []
    monkeypatch.setattr(guest, "install", lambda more: None)
    monkeypatch.setattr(guest.signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(numa_guest, "run", lambda name, what: ran.append((name, what)) or len(name))
    assert numa_guest.main(arguments) == max(map(len, names))
    assert [name for name, _ in ran] == names
    assert all(command in what for _, what in ran)


def test_nodes_without_cpus_or_memory():
    """A node has no more words than what it has, and each distance is said."""
    asked = numa_guest.GUESTS["apart"].arguments
    assert [word for word in asked if word.startswith("node,")] == [
        "node,nodeid=0,cpus=0,memdev=memory0",
        "node,nodeid=1,cpus=1,cpus=2",
        "node,nodeid=2,cpus=3,memdev=memory2",
        "node,nodeid=3,memdev=memory3",
    ]
    assert asked[asked.index("-m") + 1] == f"{1280 + 1024 + 256}M"
    assert "dist,src=1,dst=2,val=15" in asked
    assert "dist,src=2,dst=1,val=15" in asked
    assert sum(word.startswith("dist,") for word in asked) == 16


def started(folders, codes, commands):
    """Processes in the place of QEMU's, with the exit codes that guests have left."""
    for folder, code in zip(folders, codes, strict=True):
        folder.mkdir()
        (folder / "kernel").write_text("Kernel panic")
        if code is not None:
            (folder / "code").write_text(f"{code}\n")
    return [subprocess.Popen(command) for command in commands]


WAITS, ENDS = [sys.executable, "-c", "import time; time.sleep(60)"], ["true"]


def test_both_guests_end(tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]
    assert two_guests.wait(started(folders, [0, 3], [ENDS, ENDS]), folders) == 3


def test_a_guest_whose_partner_has_failed_is_not_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(two_guests, "PATIENCE", 0.3)
    folders = [tmp_path / "0", tmp_path / "1"]
    machines = started(folders, [None, None], [WAITS, ENDS])
    assert two_guests.wait(machines, folders) == 1
    machines[0].kill()
    machines[0].wait()
    said = capsys.readouterr().out
    assert "Its kernel said last:\nKernel panic\n" in said
    assert "guest 0 was still running 0.3 seconds after the other one failed" in said


def test_their_network():
    """What one sends comes in where the other listens."""
    ends = [two_guests.network("folder", rank)[1] for rank in range(2)]
    swapped = ends[0].replace("network0", "own").replace("network1", "network0").replace("own", "network1")
    assert ends[1] == swapped
    assert ends[0] != ends[1]
