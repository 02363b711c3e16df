"""tools/demo_chat.py, which `make demo-chat` runs: a tiny model answers, and so does one that is given."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from bench.peers.environments import SetUpError
from ktmoe import synthetic

TOOL = Path(__file__).resolve().parents[2] / "tools" / "demo_chat.py"
RATES = r"prefill \d+ tokens in .* s, [\d.]+ tokens/s; decode \d+ tokens in .* s, [\d.]+ tokens/s"


@pytest.fixture
def tool(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("demo_chat_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.environments, "python", lambda environment, progress: Path(sys.executable))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return module


@pytest.mark.smoke
def test_a_tiny_model(tool, capfd, tmp_path):
    assert tool.main([]) == 0
    captured = capfd.readouterr()
    *_, asked, answer = captured.out.splitlines()
    assert asked == "> What do you do all day?"
    assert len(answer) == 200
    assert re.search(RATES, captured.err)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_given(tool, capfd, tmp_path):
    folder = tmp_path / "mine"
    synthetic.write_chat_model(folder)
    assert tool.main(["--model", str(folder), "--prompt", "Hello"]) == 0
    captured = capfd.readouterr()
    assert captured.out.startswith("> Hello\n")
    assert re.search(RATES, captured.err)
    assert tool.main(["--model", str(tmp_path / "absent")]) == 1


def test_no_network(tool, capfd, monkeypatch):
    def python(environment, progress):
        raise SetUpError("pip install torch failed")

    monkeypatch.setattr(tool.environments, "python", python)
    assert tool.main([]) == 1
    assert capfd.readouterr().out == "ktmoe: transformers cannot be installed: pip install torch failed\n"
