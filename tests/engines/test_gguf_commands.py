"""`ktmoe chat`, `serve` and `accuracy` of one GGUF file, and of a folder with a file's experts."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import commands
import engine_models
import gguf
import openai
import pytest
import whole_gguf

import ktmoe.transformers
from ktmoe import cli

PROMPT, TOKENS = "this is the one", 5
GREEDY = ("--greedy", "--max-new-tokens", str(TOKENS))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    model = engine_models.make("qwen3_moe", {"norm_topk_prob": True})
    return whole_gguf.write(model, tmp_path_factory.mktemp("gguf") / "Tiny-1.5-Q8_0.gguf")


@pytest.fixture(scope="module")
def expected(file):
    """The answer to PROMPT that load() and load_tokenizer() give."""
    tokenizer, model = ktmoe.transformers.load_tokenizer(file), ktmoe.transformers.load(file)
    messages = [{"role": "user", "content": PROMPT}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    found = model.generate(**ids, do_sample=False, max_new_tokens=TOKENS)
    return tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture
def run(capsys):
    """A function that gives (exit status, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main([str(each) for each in arguments])
        return status, *capsys.readouterr()

    return run


@pytest.mark.smoke
def test_chat(file, expected, run):
    status, out, err = run("chat", file, PROMPT, *GREEDY, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert (found["path"], found["text"]) == (str(file), expected)


def test_serve(file, expected, tmp_path):
    with commands.server(file, tmp_path) as server, openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        assert "Tiny-1.5-Q8_0 is served" in server.line
        answer = client.chat.completions.create(
            model="Tiny-1.5-Q8_0", messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=TOKENS
        )
        assert answer.choices[0].message.content == expected


def test_accuracy(file, tmp_path, run):
    (tmp_path / "text").write_text(PROMPT * 9)
    status, out, err = run("accuracy", file, "--text", tmp_path / "text", "--context", "32", "--activations", "bf16", "--json")
    assert status == 0, err
    assert json.loads(out)["path"] == str(file)


def test_accuracy_against_the_original(file, tmp_path, run):
    """A file whose experts are Q8_0, and one that rounds nothing."""
    model = engine_models.make("qwen3_moe", {"norm_topk_prob": True})
    folder = engine_models.save(model, tmp_path / "folder")
    ktmoe.transformers.load_tokenizer(file).save_pretrained(folder)
    rounded = whole_gguf.write(model, tmp_path / "rounded.gguf", types={"_exps": gguf.GGMLQuantizationType.Q8_0})
    (tmp_path / "text").write_text(PROMPT * 9)
    text = ("--text", tmp_path / "text", "--context", "32")
    errors = {}
    for path in (rounded, file):
        status, out, err = run("accuracy", path, "--against", folder, *text, "--json")
        assert status == 0, err
        kl, layers = json.loads(out)["runs"][1]["kl"]["mean"], json.loads(out)["layers"]
        errors[path] = kl, max(layer["runs"][0]["relative_error"] for layer in layers)
        status, out, err = run("accuracy", path, "--against", folder, "--json")
        assert status == 0, err
        assert (max(layer["relative_error"] for layer in json.loads(out)["layers"]) > 0) == (path == rounded)
    assert errors[file][1] == 0
    assert 0.001 < errors[rounded][1] < 0.1
    assert errors[rounded][0] > errors[file][0]


def test_experts(file, expected, tmp_path, run):
    model = engine_models.make("qwen3_moe", {"norm_topk_prob": True})
    folder = engine_models.save(model, tmp_path / "folder")
    ktmoe.transformers.load_tokenizer(file).save_pretrained(folder)
    for other in (file, tmp_path / "none.gguf"):
        status, out, err = run("chat", folder, PROMPT, *GREEDY, "--json", "--experts", other)
        assert (status == 0) == (other == file), err
        assert json.loads(out)["text"] == expected if status == 0 else "none.gguf: expected a folder" in err


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_an_architecture_that_is_refused(command, tmp_path, run):
    model = engine_models.make("qwen3_moe")
    made = whole_gguf.write(model, tmp_path / "model.gguf", architecture="grok")
    status, _, err = run(command, made, *([PROMPT] if command == "chat" else []))
    assert status == 1
    assert "text needs one of" in err
    assert "Traceback" not in err


def test_a_signal_while_it_loads(file, tmp_path):
    """The temporary folder is removed."""
    process = commands.start(["chat", str(file), PROMPT, "--max-new-tokens", "5"], tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + commands.PATIENCE
    while not list(tmp_path.glob("ktmoe-gguf-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    assert process.wait(commands.PATIENCE) in (128 + signal.SIGTERM, -signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []
