"""The programs of docs/several-machines.md, as it starts them, but for addresses."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import processes
import pytest

from ktmoe import synthetic

PAGE = (processes.ROOT / "docs" / "several-machines.md").read_text()
PROGRAMS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    synthetic.write_chat_model(folder, layers=2)
    return folder


def block(title: str, language: str) -> str:
    """The first code of a section."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return next(code for found, code in re.findall(r"```(\w*)\n(.*?)```", section, re.DOTALL) if found == language)


def run(command: list, folder: Path, **variables: str) -> str:
    paths = {"PYTHONPATH": str(processes.ROOT), "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    options = {"capture_output": True, "text": True, "timeout": processes.PATIENCE, "check": False}
    done = subprocess.run(command, env=os.environ | paths | variables, cwd=folder, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_transformers(folder, tmp_path):
    (tmp_path / "text.py").write_text(block("transformers", "python"))
    export, torchrun = block("transformers", "sh").splitlines()
    assert export.startswith("export GLOO_SOCKET_IFNAME=eth0 ")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        changes = {"192.168.0.1": "127.0.0.1", "29500": str(free.getsockname()[1]), "DIR": str(folder)}
    for old, new in changes.items():
        torchrun = torchrun.replace(old, new)
    assert torchrun.startswith("torchrun ")
    started = [sys.executable, "-m", "torch.distributed.run", *torchrun.split()[1:]]  # what torchrun is
    commands = [[str(rank) if word == "0" else word for word in started] for rank in range(2)]
    variables = os.environ | {"PYTHONPATH": str(processes.ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(commands[1], env=variables, cwd=tmp_path, **pipes) as second:
        first = run(commands[0], tmp_path)
        assert second.communicate(timeout=processes.PATIENCE)[0] == ""
    assert "The largest planet is" in first


def test_numpy(folder, tmp_path):
    (tmp_path / "layer.py").write_text(block("numpy", "python"))
    command = block("numpy", "sh").splitlines()[0].replace("DIR", str(folder))
    said = run(command.split(), tmp_path)  # mpiexec may mix lines
    assert sorted(re.findall(r"rank \d of 2: y \(3, \d+\), \d+ bytes of experts", said))[1].startswith("rank 1 of 2")
