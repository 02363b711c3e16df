"""tools/test_sglang.py where SGLang cannot be had: it says why, and that is no failure."""

import importlib.util
from pathlib import Path

import pytest

from bench.peers.environments import SetUpError

TOOL = Path(__file__).resolve().parents[2] / "tools" / "test_sglang.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("sglang_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_wheel(tool, monkeypatch, capsys):
    def python(environment, progress):
        raise SetUpError(f"pip install {environment.name} failed")

    monkeypatch.setattr(tool.environments, "python", python)
    assert tool.main([]) == 0
    assert capsys.readouterr().out == "ktmoe: nothing was tested in SGLang: pip install sglang failed\n"


@pytest.mark.parametrize(
    ("script", "reason"), [("echo no such library >&2; exit 1", "no such library"), ("kill -ILL $$", "exit code -4")]
)
def test_it_does_not_start(tool, monkeypatch, capsys, tmp_path, script, reason):
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{script}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(tool.environments, "python", lambda environment, progress: interpreter)
    assert tool.main([]) == 0
    assert capsys.readouterr().out == f"ktmoe: nothing was tested in SGLang: it does not start: {reason}\n"


def test_the_tests_run_in_both(tool, monkeypatch, tmp_path):
    """One that fails is enough."""
    interpreter = tmp_path / "python"
    script = (
        f'echo SGLang 0\necho "$PYTHONPATH|$*" >> {tmp_path}/calls\ntest "$1" = -c || test "$PYTHONPATH" != {TOOL.parents[1]}'
    )
    interpreter.write_text(f"#!/bin/sh\n{script} || exit 7\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(tool.environments, "python", lambda environment, progress: interpreter)
    assert tool.main(["-k", "this"]) == 7
    root, tests = TOOL.parents[1], "-m pytest -q --exhaustive tests/in_sglang -k this"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[1:] == [f"{root}|{tests}", f"{root}:{tool.FORK}|{tests}"]
