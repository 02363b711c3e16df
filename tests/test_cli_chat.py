"""`ktmoe chat` and `ktmoe serve` as far as they go without torch: usage, and what to install."""

from __future__ import annotations

import io
import sys
from types import ModuleType

import pytest

import ktmoe
from ktmoe import cli, synthetic


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(capsys):
    """A function that gives (exit status, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("chat", "DIR"),
        ("chat x hello --greedy --temperature 0.5", "--greedy and --temperature exclude each other"),
        ("chat x hello --temperature 0", "'--temperature': 0.0 "),
        ("chat x hello --max-new-tokens 0", "'--max-new-tokens': 0 "),
        ("chat x hello --threads 0", "'--threads': 0 "),
        ("serve", "DIR"),
        ("serve x --port 70000", "'--port': 70000 "),
        ("serve x --reasoning on", "--reasoning"),  # of transformers serve, behind -- only
    ],
)
def test_wrong_usage(run, arguments, named):
    status, out, err = run(*arguments.split())
    assert (status, out) == (2, "")
    assert named in err
    assert err.endswith(f"; see ktmoe {arguments.split()[0]} --help\n")
    assert err.count("\n") == 1


def test_json_is_of_one_answer(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert run("chat", "x", "--json") == (2, "", "ktmoe: --json needs a PROMPT; see ktmoe chat --help\n")


def test_a_prompt_that_is_not_utf8(run, monkeypatch):
    """Bytes that are none become surrogates, in arguments always and in a pipe in some locales."""
    assert run("chat", "x", "h\udcff") == (1, "", "ktmoe: PROMPT: expected text in UTF-8, found another byte at character 1\n")
    status, _, err = run("chat", "x", "hello", "--system", "\udcff")
    assert (status, err) == (1, "ktmoe: --system: expected text in UTF-8, found another byte at character 0\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"h\xff"), "utf-8", "surrogateescape"))
    assert run("chat", "x") == (1, "", "ktmoe: PROMPT: expected text in UTF-8, found another byte at character 1\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"h\xff"), "utf-8"))
    status, _, err = run("chat", "x")
    assert status == 1
    assert err.startswith("ktmoe: stdin: expected text in UTF-8: ")


@pytest.mark.parametrize("command", [("chat", "hello"), ("serve",)])
def test_without_transformers(run, monkeypatch, tmp_path, command):
    """One line, before anything else is said of DIR."""
    for module in [name for name in sys.modules if name.startswith("ktmoe.transformers")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    name, *rest = command
    install = "pip install 'ktmoe[transformers]', or '.[transformers]' in a clone of ktmoe"
    words = f"ktmoe.transformers needs transformers, which is not installed: {install}"
    assert run(name, tmp_path / "absent", *rest) == (1, "", f"ktmoe: {words}\n")


def test_a_tiny_model_for_it(tmp_path):
    """Its loader reads it, and sizes that cannot be are refused."""
    synthetic.write_chat_model(tmp_path / "tiny", num_experts=5, hidden=64, intermediate=32, layers=3, top_k=2)
    with ktmoe.MoEModel.from_checkpoint(tmp_path / "tiny") as model:
        found = [(model[layer].num_experts, model[layer].hidden, model[layer].intermediate) for layer in model]
    assert found == [(5, 64, 32)] * 3
    for sizes, named in (({"hidden": 96}, "hidden"), ({"top_k": 9}, "top_k"), ({"layers": 0}, "layers")):
        with pytest.raises(ktmoe.errors.InputError, match=named):
            synthetic.write_chat_model(tmp_path / "wrong", **sizes)
