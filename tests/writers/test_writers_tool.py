"""tools/test_writers.py where no writer can be had: it says why, and that is no failure."""

import importlib.util
from pathlib import Path

import pytest

from bench.peers.environments import SetUpError

TOOL = Path(__file__).resolve().parents[2] / "tools" / "test_writers.py"


def test_no_wheel(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("writers_tool", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def python(environment, progress):
        raise SetUpError(f"pip install {environment.name} failed")

    monkeypatch.setattr(tool.pytest, "main", lambda arguments: pytest.fail(f"tests were run: {arguments}"))
    monkeypatch.setattr(tool.environments, "python", python)
    assert tool.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ktmoe: torch is left out: pip install torch failed"
    assert lines[-1] == f"ktmoe: 0 of {len(tool.WRITERS)} environments of writers are there"
    assert len(lines) == len(tool.WRITERS) + 1
