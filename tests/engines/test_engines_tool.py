"""tools/test_engines.py where transformers or vLLM cannot be had: it says why, and that is no failure."""

import importlib.util
from pathlib import Path

import pytest

from bench.peers.environments import SetUpError

TOOL = Path(__file__).resolve().parents[2] / "tools" / "test_engines.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("engines_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_wheel(tool, monkeypatch, capsys):
    def python(environment, progress):
        raise SetUpError(f"pip install {environment.name} failed")

    monkeypatch.setattr(tool.environments, "python", python)
    assert tool.main([]) == 0
    assert capsys.readouterr().out == (
        "ktmoe: nothing was tested in transformers: pip install engines failed\n"
        "ktmoe: nothing was tested in vLLM: pip install vllm failed\n"
    )


@pytest.mark.parametrize(
    ("script", "reason"), [("echo no such library >&2; exit 1", "no such library"), ("kill -ILL $$", "exit code -4")]
)
def test_it_does_not_start(tool, monkeypatch, capsys, tmp_path, script, reason):
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{script}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(tool.environments, "python", lambda environment, progress: interpreter)
    assert tool.main([]) == 0
    assert capsys.readouterr().out == "".join(
        f"ktmoe: nothing was tested in {engine}: it does not start: {reason}\n" for engine in ("transformers", "vLLM")
    )


def answering(folder: Path, **codes: int) -> Path:
    """An interpreter that starts, notes what it is called with, and whose pytest ends with a code for each folder of tests."""
    cases = "".join(f"*tests/{name}*) exit {code};; " for name, code in codes.items())
    interpreter = folder / "python"
    interpreter.write_text(
        f'#!/bin/sh\necho engine 5\necho "$PYTHONPATH|$*" >> {folder}/calls\ntest "$1" = -c && exit\ncase "$*" in {cases}esac\n'
    )
    interpreter.chmod(0o755)
    return interpreter


def test_the_tests_run_there(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool.environments, "python", lambda environment, progress: answering(tmp_path, engines=0, vllm=0))
    assert tool.main(["-k", "this"]) == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call for call in calls if "pytest" in call] == [
        f"{TOOL.parents[1]}|-m pytest -q --exhaustive tests/{folder} -k this" for folder in ("engines", "vllm")
    ]


@pytest.mark.parametrize(
    ("engines", "vllm", "code"),
    [(7, 0, 7), (0, 1, 1), (2, 1, 2), (5, 0, 0), (0, 5, 0), (5, 1, 1), (5, 5, 5)],
)
def test_a_failure_in_either_is_one(tool, monkeypatch, tmp_path, engines, vllm, code):
    """5: the arguments leave no test, which is none if they leave one in the other."""
    interpreter = answering(tmp_path, engines=engines, vllm=vllm)
    monkeypatch.setattr(tool.environments, "python", lambda environment, progress: interpreter)
    assert tool.main([]) == code
