"""The two ways to text that docs/engines.md has, on a tiny model with a tokenizer."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

import pytest
import runs

from ktmoe import synthetic
from ktmoe.synthetic.chat import LIKELY

SECTION = (runs.ROOT / "docs" / "engines.md").read_text().partition("\n## vLLM\n")[2].partition("\n## ")[0]
LAYERS, TOKENS = 2, 12
COMPUTED = f"ktmoe computes the experts of {LAYERS} layers (UnquantizedFusedMoEMethod: BF16, backend "


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    synthetic.write_chat_model(folder, layers=LAYERS)
    return str(folder)


def block(beginning: str) -> str:
    """The section's code that begins like this."""
    (found,) = re.findall(rf"```\w*\n({re.escape(beginning)}.*?)\n```", SECTION, re.DOTALL)
    return found


def ask(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def listens(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_server(model, tmp_path):
    variable, *command = shlex.split(block("OMP_WAIT_POLICY"))
    name, _, value = variable.partition("=")
    assert command[:1] == ["python"]
    command = [sys.executable, *(model if word == "MODEL" else word for word in command[1:])]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command += ["--host", "127.0.0.1", "--port", port, "--enforce-eager", "--max-model-len", "128"]
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    with log.open("w") as output:
        environment = runs.prepared(tmp_path / "run") | {name: value}
        options = {"stdout": output, "stderr": output, "cwd": tmp_path, "start_new_session": True}
        server = subprocess.Popen(command, env=environment, **options)
        try:
            deadline = time.monotonic() + runs.PATIENCE
            while not listens(url):
                assert server.poll() is None, log.read_text()[-5000:]
                assert time.monotonic() < deadline, log.read_text()[-5000:]
                time.sleep(0.2)
            asked = {"model": model, "prompt": "Hello", "max_tokens": TOKENS, "temperature": 0}
            text = ask(f"{url}/v1/completions", asked)["choices"][0]["text"]
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            with suppress(ProcessLookupError):  # its processes, too, if something failed
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    assert len(text) == TOKENS
    assert set(text.encode()) <= set(LIKELY)
    assert COMPUTED in log.read_text()


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
