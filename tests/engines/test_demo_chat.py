"""tools/demo_chat.py, which `make demo-chat` runs: a model learns answers and gives them, and one that is given answers."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

from bench.peers.environments import SetUpError
from ktmoe import synthetic

TOOL = Path(__file__).resolve().parents[2] / "tools" / "demo_chat.py"
RATES = r"prefill \d+ tokens in .* s, [\d.]+ tokens/s; decode \d+ tokens in .* s, [\d.]+ tokens/s"
ANSWERS = """[answers]
"What is two and two?" = "Four."
"Which colour has the sky?" = "Blue, but only by day."
"""


@pytest.fixture
def tool(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("demo_chat_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.environments, "python", lambda environment, progress: Path(sys.executable))
    monkeypatch.setattr(module, "MODELS", tmp_path / "models")
    return module


@pytest.mark.smoke
def test_a_model_learns_and_answers(tool, capfd, tmp_path):
    file = tmp_path / "answers.toml"
    file.write_text(ANSWERS)
    for prompt, answer in [("which colour has the sky", "Blue, but only by day."), ("What is two and two?", "Four.")]:
        assert tool.main(["--answers", str(file), "--prompt", prompt]) == 0
        captured = capfd.readouterr()
        assert f"\n> {prompt}\n{answer}\n" in "\n" + captured.out
        assert "it knows 2 answers by heart" in captured.out
        assert re.search(RATES, captured.err)
    assert "training" not in captured.out, "the model of the first call is kept"
    (folder,) = tool.MODELS.iterdir()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5 * 10**6


def test_all_answers(tool, capfd):
    assert tool.main([]) == 0
    answers = tomllib.loads(tool.ANSWERS.read_text())["answers"]
    assert len(answers) == 100
    out = capfd.readouterr().out
    for prompt in tool.PROMPTS:
        assert f"> {prompt}\n{answers[prompt]}\n" in out


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
