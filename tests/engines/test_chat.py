"""`ktmoe chat`: answers on the command line, from a pipe and in a conversation are generate()'s."""

from __future__ import annotations

import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import characters
import commands
import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from texts import PROMPT, TOKENS, Oracle

import ktmoe.transformers
from ktmoe import cli, synthetic
from ktmoe.cli import engine
from ktmoe.transformers import answer

GREEDY = ("--greedy", "--max-new-tokens", str(TOKENS))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    synthetic.write_chat_model(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


@pytest.fixture
def changed(model, tmp_path):
    """A copy of the model: file, key, value -> with that in a JSON file; value None removes it."""

    def change(file: str, key: str, value: object):
        folder = tmp_path / "changed"
        shutil.copytree(model, folder)
        data = json.loads((folder / file).read_text())
        data.pop(key, None)
        (folder / file).write_text(json.dumps(data if value is None else data | {key: value}))
        return folder

    return change


@pytest.fixture
def run(capsys):
    """A function that gives (exit status, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.mark.smoke
def test_a_prompt(run, model, oracle):
    expected = oracle.answer(("user", PROMPT))
    assert len(set(expected)) > 5  # nothing that a wrong model would say as well
    status, out, err = run("chat", model, PROMPT, *GREEDY)
    assert (status, out) == (0, f"{expected}\n")
    rate = r"\d+ tokens in \d+\.\d\d s, [\d.]+ tokens/s"
    assert re.fullmatch(rf"prefill {rate}; decode {rate}; stopped at --max-new-tokens\n", err)
    assert f"decode {TOKENS - 1} tokens" in err


def test_a_pipe(run, model, oracle, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n"))
    status, out, _ = run("chat", model, *GREEDY)
    assert (status, out) == (0, oracle.answer(("user", PROMPT)) + "\n")


def test_an_empty_pipe(run, model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert run("chat", model) == (1, "", "ktmoe: expected a PROMPT or one on stdin, found neither\n")


def test_json(run, model, oracle):
    status, out, err = run("chat", model, PROMPT, *GREEDY, "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert found["text"] == oracle.answer(("user", PROMPT))
    prompt = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    assert found["prompt_tokens"] == len(re.sub(r"<\|\w+\|>", "*", prompt))  # a byte is a token, and so is each of these
    assert (found["path"], found["new_tokens"], found["stopped"]) == (str(model), TOKENS, False)
    assert found["prefill_tokens_s"] == pytest.approx(found["prompt_tokens"] / found["prefill_seconds"])
    assert found["decode_tokens_s"] == pytest.approx((TOKENS - 1) / found["decode_seconds"])
    assert found["load_seconds"] > 0


def test_a_system_prompt(run, model, oracle):
    expected = oracle.answer(("system", "Be brief."), ("user", PROMPT))
    assert expected != oracle.answer(("user", PROMPT))
    assert run("chat", model, PROMPT, "--system", "Be brief.", *GREEDY)[:2] == (0, f"{expected}\n")


def test_sampling(run, model, oracle):
    torch.manual_seed(5)
    expected = oracle.answer(("user", PROMPT), do_sample=True, temperature=3.0)
    assert expected != oracle.answer(("user", PROMPT))
    torch.manual_seed(5)
    arguments = "--temperature", 3, "--max-new-tokens", TOKENS
    assert run("chat", model, PROMPT, *arguments)[:2] == (0, f"{expected}\n")


def test_by_default_the_checkpoint_says_how_to_sample(run, changed, oracle):
    folder = changed("generation_config.json", "do_sample", True)
    torch.manual_seed(6)
    expected = oracle.answer(("user", PROMPT), do_sample=True)
    torch.manual_seed(6)
    assert run("chat", folder, PROMPT, "--max-new-tokens", TOKENS)[:2] == (0, f"{expected}\n")


def test_an_answer_that_the_model_ends(run, changed, oracle):
    text = oracle.answer(("user", PROMPT))
    last = text[10]
    folder = changed("generation_config.json", "eos_token_id", ord(last))
    status, out, err = run("chat", folder, PROMPT, *GREEDY)
    assert (status, out) == (0, text[: text.index(last) + 1] + "\n")
    assert "stopped" not in err


def test_without_a_chat_template(run, changed, oracle):
    folder = changed("tokenizer_config.json", "chat_template", None)
    status, out, err = run("chat", folder, PROMPT, *GREEDY)
    assert (status, out) == (0, oracle.continuation(PROMPT) + "\n")
    assert err.startswith(f"ktmoe: {folder} has no chat template: the prompt is continued as it is\n")
    status, out, err = run("chat", folder, PROMPT, "--system", "Be brief.")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "a system prompt needs a chat template" in err


def test_what_the_template_refuses(run, changed):
    folder = changed("tokenizer_config.json", "chat_template", "{{ raise_exception('no system here') }}")
    status, out, err = run("chat", folder, PROMPT)
    assert (status, out) == (1, "")
    assert err == "ktmoe: the model's chat template refuses this conversation: no system here\n"


def test_downloads_have_progress_bars_on_a_terminal(monkeypatch):
    for terminal in (True, False):
        enable_progress_bars()
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        engine.start()
        assert are_progress_bars_disabled() != terminal


def errors_of(*arguments: object) -> list[str]:
    """The lines on the stderr, which is no terminal, of a command that fails or not."""
    command = [sys.executable, "-m", "ktmoe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=commands.PATIENCE).stderr.splitlines()


def test_no_bars_without_a_terminal(checkpoint, tmp_path):
    """Nor what compressed-tensors says of targets that it does not find, since ktmoe has the experts."""
    for file in checkpoint("Kimi INT4").iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = [r"re:.*mlp\.experts\..*"]
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    characters.add_tokenizer(tmp_path)
    template, times = errors_of("chat", tmp_path, "hello", "--max-new-tokens", 2)
    assert "has no chat template" in template
    assert times.startswith("prefill ")


def test_the_hub_is_named_before_it_is_asked():
    asked, refused = errors_of("chat", "someone/a-model", "hello")
    assert asked == "someone/a-model is no folder here: asking the Hugging Face Hub for it"
    assert refused.startswith("ktmoe: someone/a-model: expected a folder or a model that the Hub gives: ")


def test_the_text_comes_piece_by_piece(oracle):
    pieces = []
    inputs = answer.encode(oracle.tokenizer, PROMPT, None)
    found = answer.answer(oracle.model, oracle.tokenizer, inputs, pieces.append, max_new_tokens=200, do_sample=False)
    assert "".join(pieces) == found.text == oracle.answer(("user", PROMPT), max_new_tokens=200)
    assert len([piece for piece in pieces if piece]) > 1


def test_options_reach_the_layers(run, model, monkeypatch):
    load, loaded = ktmoe.transformers.load, []
    monkeypatch.setattr(ktmoe.transformers, "load", lambda *given, **named: loaded.append(load(*given, **named)) or loaded[0])
    before = ktmoe.get_num_threads()
    try:
        run("chat", model, PROMPT, "--backend", "fp32_lut", "--threads", 3, "--max-new-tokens", 1)
        assert ktmoe.get_num_threads() == 3
    finally:
        ktmoe.set_num_threads(before)
    layers = [module.ktmoe_layer for module in loaded[0].modules() if hasattr(module, "ktmoe_layer")]
    assert [layer.backend for layer in layers] == ["fp32_lut"] * 2


def test_wrong_folders(run, model, changed, tmp_path):
    for folder, reason in (
        (tmp_path / "absent", "expected a folder or the id of a model on the Hub, found neither"),
        (tmp_path, "expected a model's folder with config.json, found no such file"),
    ):
        assert run("chat", folder, PROMPT) == (1, "", f"ktmoe: {folder}: {reason}\n")
    folder = changed("config.json", "mlp_only_layers", [0, 1])
    status, out, err = run("chat", folder, PROMPT)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "it has no routed experts" in err
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert run("chat", folder, PROMPT) == (1, "", f"ktmoe: {folder}: expected a tokenizer, found none\n")


def test_an_architecture_that_transformers_lacks(run, changed):
    status, out, err = run("chat", changed("config.json", "model_type", "unheard_of"), PROMPT)
    assert (status, out) == (1, "")
    *_, last = err.splitlines()
    assert last.startswith("ktmoe: transformers cannot load ")
    assert "`unheard_of`" in last


PROGRAM = """
import sys
from ktmoe import cli
sys.modules.update(dict.fromkeys({missing}))
status = cli.main({arguments})
assert "torch" not in sys.modules or sys.modules["torch"] is None
sys.exit(status)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["chat", "--help"], ["serve", "--help"]])
def test_help_does_not_wait_for_torch(arguments):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(missing=[], arguments=arguments)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [["chat", "absent", "hello"], ["serve", "absent"]])
def test_without_torch(command):
    code = PROGRAM.format(missing=["torch"], arguments=command)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    install = "uv pip install --torch-backend=cpu torch accelerate"
    assert f"ktmoe: ktmoe.transformers needs torch, which is not installed: {install}" in done.stderr
    assert "Traceback" not in done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_conversation_needs_a_template(run, changed, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", Terminal())
    folder = changed("tokenizer_config.json", "chat_template", None)
    status, out, err = run("chat", folder)
    assert (status, out) == (1, "")
    assert err == f"ktmoe: {folder} has no chat template, so it cannot converse; with a PROMPT it continues that\n"
    assert commands.views(tmp_path) == []


class Conversation:
    """`ktmoe chat` on a terminal of its own."""

    def __init__(self, arguments: list[str], temporary):
        self._master, slave = os.openpty()
        self.process = commands.start(arguments, temporary, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        self._seen = b""

    def until(self, text: str) -> str:
        """What is written up to this text, without the terminal's control sequences."""
        end = time.monotonic() + commands.PATIENCE
        while text not in (plain := re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._seen.decode(errors="replace"))):
            assert time.monotonic() < end, plain
            if select.select([self._master], [], [], 0.1)[0]:
                self._seen += os.read(self._master, 1 << 16)
        self._seen = b""
        return plain

    def write(self, text: str) -> None:
        os.write(self._master, text.encode())

    def drain(self) -> None:
        """Read until the process has ended, since it would wait for a full terminal."""
        while self.process.poll() is None:
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    os.read(self._master, 1 << 16)
                except OSError:  # its other end is closed
                    break
        self.process.wait(commands.PATIENCE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(commands.PATIENCE)
        os.close(self._master)


@pytest.fixture
def conversation(model, tmp_path):
    started = []

    def start(*arguments: str) -> Conversation:
        started.append(Conversation(["chat", str(model), *arguments], tmp_path))
        return started[-1]

    yield start
    for found in started:
        found.close()


@pytest.mark.smoke
def test_a_conversation(conversation, oracle, tmp_path):
    """Of two turns, with greedy answers; then !exit."""
    talk = conversation(*GREEDY, "--system", "Be brief.")
    turns = [("system", "Be brief.")]
    for asked in (PROMPT, "And then?"):
        talk.until(">:")
        talk.write(f"{asked}\n")
        turns.append(("user", asked))
        shown = talk.until("Continue generating?")
        expected = oracle.answer(*turns)
        assert expected in re.sub(r"\s", " ", shown)
        talk.write("n\n")
        turns.append(("assistant", expected))
    talk.until(">:")
    assert len(commands.views(tmp_path)) == 1
    talk.write("!exit\n")
    talk.drain()
    assert talk.process.returncode == 0
    assert commands.views(tmp_path) == []


def test_a_conversation_is_interrupted(conversation, tmp_path):
    """In the middle of an answer."""
    talk = conversation("--max-new-tokens", "3000")
    talk.until(">:")
    talk.write(f"{PROMPT}\n")
    talk.until("<tiny>:")
    talk.process.send_signal(signal.SIGINT)
    talk.drain()
    assert talk.process.returncode == 130
    assert commands.views(tmp_path) == []
