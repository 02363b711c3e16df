"""The two ways to text that docs/vllm.md has, on a tiny model with a tokenizer."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

import models
import pytest
import quantized_checkpoints
import runs
from listening import addresses

from ktmoe import synthetic
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine import memory
from ktmoe.synthetic.chat import LIKELY
from ktmoe.vllm import __main__

PAGE = (runs.ROOT / "docs" / "vllm.md").read_text()
LAYERS, TOKENS = 2, 12
COMPUTED = f"ktmoe computes the experts of {LAYERS} layers (UnquantizedFusedMoEMethod: BF16, backend "
#: Seconds from Ctrl-C to the end.
SECONDS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    synthetic.write_chat_model(folder, layers=LAYERS)
    return str(folder)


def block(beginning: str) -> str:
    """The page's code that begins like this."""
    (found,) = re.findall(rf"```\w*\n({re.escape(beginning)}.*?)\n```", PAGE, re.DOTALL)
    return found


def read(url: str, body: dict | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def listens(url: str) -> bool:
    with suppress(OSError):
        read(f"{url}/health")
        return True
    return False


def test_server(model, tmp_path):
    """It answers, has vLLM's metrics, and Ctrl-C ends it in seconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = {"python": sys.executable, "Qwen/Qwen3-30B-A3B": model, "8000": port}
    command = [words.get(word, word) for word in shlex.split(block("python -m ktmoe.vllm"))]
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    with log.open("w") as output:
        options = {"stdout": output, "stderr": output, "cwd": tmp_path, "start_new_session": True}
        environment = runs.prepared(tmp_path / "run") | {"TORCHDYNAMO_DISABLE": "0"}  # with compiled graphs, as the page says
        server = subprocess.Popen(command, env=environment, **options)
        try:
            deadline = time.monotonic() + runs.PATIENCE
            while not listens(url):
                assert server.poll() is None, log.read_text()[-5000:]
                assert time.monotonic() < deadline, log.read_text()[-5000:]
                time.sleep(0.2)
            asked = {"model": model, "prompt": "Hello", "max_tokens": TOKENS, "temperature": 0}
            text = json.loads(read(f"{url}/v1/completions", asked))["choices"][0]["text"]
            metrics = read(f"{url}/metrics")
            listening = addresses(server.pid)
            os.killpg(server.pid, signal.SIGINT)  # as a terminal does it: to all of its processes
            assert server.wait(SECONDS) in (0, -signal.SIGINT, 128 + signal.SIGINT)
        finally:
            with suppress(ProcessLookupError):  # its processes, too, if something failed
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    assert len(text) == TOKENS
    assert set(text.encode()) <= set(LIKELY)
    assert "vllm:generation_tokens_total" in metrics
    assert {address.is_loopback for address in listening} == {True}, listening
    assert COMPUTED in log.read_text()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: shutil.rmtree(folder), "{folder}: expected a folder, or the id of a model on the Hugging Face Hub"),
        (
            lambda folder: (folder / "config.json").unlink(),
            "{folder}: expected a folder with config.json or params.json, found none",
        ),
        (lambda folder: os.truncate(folder / "model.safetensors", 500_000), "{folder}/model.safetensors: truncated: expected"),
        (lambda folder: None, "{folder} needs "),  # memory
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "model.gguf"),
            "{folder}: expected safetensors files, found GGUF, which vLLM does not read",
        ),
    ],
    ids=["none", "config", "truncated", "memory", "gguf"],
)
def test_models_that_cannot_be_served(model, tmp_path, capfd, monkeypatch, change, words):
    """The start ends with one line, before vLLM is started."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    change(folder)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    assert __main__.main([str(folder), "--port", "0"]) == 1
    found = capfd.readouterr()
    [line] = found.err.splitlines()
    assert line.startswith(f"ktmoe: {words.format(folder=folder)}")


@pytest.mark.parametrize(
    ("further", "needed"),
    [
        ([], 1.0),
        (["--nnodes", "2", "-tp", "2"], 0.5),
        (["-n", "4", "-tp", "4", "--node-rank=1"], 0.25),
        (["--nnodes", "two"], None),
        (["--data-parallel-size", "2"], None),
        (["--config", "options.yaml"], None),
    ],
)
def test_memory_that_a_host_needs(model, monkeypatch, further, needed):
    """Its part of the weights. With what may be on how many hosts, nothing is known before."""
    asked = []
    monkeypatch.setattr(memory, "require", lambda nbytes, what: asked.append(nbytes))
    __main__.check(model)
    __main__.check(model, __main__.hosts(further))
    assert asked[1:] == ([] if needed is None else [int(asked[0] * needed)])


@pytest.mark.parametrize("further", [[], ["--tensor-parallel-size", "2"], ["--load-format", "dummy"], ["--nnodes", "2"]])
def test_what_is_started(tmp_path, monkeypatch, further):
    """One process for engine and model, unless the user asks for several; with a load format the folder may have no weights."""
    monkeypatch.setattr(os, "execv", lambda program, command: command)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    (tmp_path / "config.json").write_text("{}")
    command = __main__.main([str(tmp_path), *further])
    assert command[:5] == [sys.executable, "-m", __main__.SERVER, "--model", str(tmp_path)]
    assert ("uni" in command) == (not further or "--load-format" in further)
    assert command[len(command) - len(further) :] == further
    assert os.environ["OMP_WAIT_POLICY"] == "active"


def test_a_scale_that_is_no_number(model, tmp_path):
    """What only packing finds: one line names the place, above the tracebacks of vLLM's processes."""
    folder = tmp_path / "model"
    folder.mkdir()
    quantized_checkpoints.write_packed(quantized_checkpoints.PACKED["gpt-oss MXFP4"], folder, **models.SIZES)
    with Checkpoint(folder) as checkpoint:
        scales = checkpoint.info("model.layers.1.mlp.experts.down_proj_scales")
    with scales.file.open("r+b") as file:
        file.seek(scales.offset)
        file.write(b"\xff")
    [found] = runs.start([runs.Job(str(folder))], tmp_path / "run")
    assert found.error.startswith("FormatError: ")
    [line] = [line for line in found.log if "cannot load" in line]
    assert line.startswith("ktmoe cannot load the model: model.layers.1.mlp.experts.")
    assert "NaN" in line


@pytest.mark.smoke
def test_script(model, tmp_path):
    """vLLM's processes import it again, which the page's first line in it is for."""
    code, asked = block("from vllm import LLM"), 'LLM("Qwen/Qwen3-30B-A3B", dtype="bfloat16")'
    assert asked in code
    code = code.replace(asked, f'LLM({model!r}, dtype="bfloat16", enforce_eager=True, max_model_len=128)')
    (tmp_path / "script.py").write_text(code)
    command = [sys.executable, "script.py"]
    environment = runs.prepared(tmp_path / "run")
    options = {"capture_output": True, "text": True, "timeout": runs.PATIENCE, "check": False}
    done = subprocess.run(command, env=environment, cwd=tmp_path, **options)
    assert done.returncode == 0, done.stderr[-5000:]
    assert COMPUTED in done.stdout + done.stderr  # the text is sampled, so it may be anything
