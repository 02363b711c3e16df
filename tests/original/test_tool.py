"""tools/test_kt_kernel.py where kt-kernel cannot be had: it says why, and that is no failure."""

import importlib.util
from pathlib import Path

import pytest

from bench.peers.environments import SetUpError

TOOL = Path(__file__).resolve().parents[2] / "tools" / "test_kt_kernel.py"


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location("tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.pytest, "main", lambda arguments: pytest.fail(f"tests were run: {arguments}"))
    return module


def test_no_wheel(tool, monkeypatch, capsys):
    def python(peer, progress):
        raise SetUpError(f"pip install {peer.name} failed: ERROR: No matching distribution found")

    monkeypatch.setattr(tool.environments, "python", python)
    assert tool.main([]) == 0
    out = "ktmoe: nothing was compared with kt-kernel: pip install kt-kernel failed: ERROR: No matching distribution found\n"
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("script", "reason"), [("echo GLIBC is too old >&2; exit 3", "GLIBC is too old"), ("kill -ILL $$", "exit code -4")]
)
def test_it_does_not_start(tool, monkeypatch, capsys, tmp_path, script, reason):
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{script}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(tool.environments, "python", lambda peer, progress: interpreter)
    assert tool.main([]) == 0
    assert capsys.readouterr().out == f"ktmoe: nothing was compared with kt-kernel: it does not start: {reason}\n"
