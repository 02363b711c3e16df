"""bench/vllm's servers without vLLM and llama.cpp: their commands, the client's, the figures, and what goes wrong."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from bench import full_tables, publish, results_file
from bench.engines import byte_tokenizer
from bench.engines.shapes import engines
from bench.peers import environments
from bench.peers.processes import WorkerError
from bench.vllm import client, report, servers, serving, ways

#: In the place of vLLM's server, llama.cpp's and the client. Tokens take 0.1 s by ktmoe, 0.2 s by vLLM, 0.3 s by llama.cpp.
PROGRAM = """
import argparse, json, os, sys, urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

fake, llama = os.environ.get("FAKE"), "--alias" in sys.argv
plain = os.environ.get("KTMOE_VLLM") == "0"
parser = argparse.ArgumentParser()
for name in ("port", "base-url", "dataset-path", "result-dir", "result-filename", "max-concurrency"):
    parser.add_argument("--" + name)
options = parser.parse_known_args()[0]

def client():
    gaps = []
    for line in Path(options.dataset_path).read_text().splitlines():
        line = json.loads(line)
        fields = {"prompt": [0] * line["input_length"], "max_tokens": line["output_length"]}
        with urllib.request.urlopen(options.base_url + "/v1/completions", json.dumps(fields).encode()) as answer:
            gaps.append([json.loads(answer.read())["gap"]] * 127)
    result = {"completed": len(gaps), "itls": gaps, "ttfts": [2.0] * len(gaps), "duration": 64 * gaps[0][0] * len(gaps)}
    result["start_times"] = [1000.0 * (text // int(options.max_concurrency)) for text in range(len(gaps))]
    if fake == "client dies":
        raise SystemExit("the client's last words")
    if fake == "a text fails" or fake == "a text fails once" and line["hash_ids"][0] < 1_000_000:
        result |= {"completed": len(gaps) - 1, "errors": ["", "Traceback\\n  somewhere\\nthe moon is not full"]}
    Path(options.result_dir, options.result_filename).write_text(json.dumps(result | {"vllm": "0.32.0"}))

counts = {"prompt": 0, "new": 0}

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        names = {"llama": ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total")}
        first, second = names["llama"] if llama else ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        label = "" if llama else '{engine="0"}'
        values = f"{first}{label} {counts['prompt']}\\n{second}{label} {float(counts['new'])}\\n"
        self.answer(f"# TYPE {first} counter\\n{values}{first}_of_more 7\\n" if self.path == "/metrics" else "")

    def do_POST(self):
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        counts["prompt"] += len(fields["prompt"])
        counts["new"] += fields["max_tokens"] - (fake == "short texts" and llama)
        self.answer(json.dumps({"gap": 0.3 if llama else 0.2 if plain else 0.1}))

if options.base_url:
    client()
elif fake == "no llama" and llama:
    print("loading\\nno such architecture")
    raise SystemExit(3)
else:
    if not llama and (fake == "served anyway" or not plain):
        print("INFO ktmoe computes the experts of 3 layers (Some: MXFP4)", flush=True)
    HTTPServer(("127.0.0.1", int(options.port)), Handler).serve_forever()
"""


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """What fakes find -> the result of two rounds, after a trip through JSON."""
    (tmp_path / "program.py").write_text(PROGRAM)
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "program.py"}" "$@"\n')
    program.chmod(0o755)

    @contextmanager
    def reading(engine):
        yield SimpleNamespace(read=lambda seconds: 3e10, streams=2)

    def write(config, folder, progress, gguf):
        for name in ("MXFP4", "BF16"):
            (folder / name).mkdir()

    monkeypatch.setattr(servers, "_programs", lambda progress: servers.Programs(program, program))
    monkeypatch.setattr(servers.session, "reading", reading)
    monkeypatch.setattr(servers.ways, "write", write)
    monkeypatch.setattr(servers, "COUNTING_SECONDS", 0.2)
    monkeypatch.setattr(client, "TEXTS", {1: 2, 4: 4})

    def run(fake: str = "", rounds: int = 1) -> dict:
        monkeypatch.setenv("FAKE", fake)
        folder = tmp_path / "work"
        folder.mkdir()
        return json.loads(json.dumps(servers.measure(engines()[ways.MODEL], 3, rounds, (1, 4), folder, lambda text: None)))

    return run


def saved(result: dict) -> dict:
    cpu = {"name": "AMD EPYC 9754 128-Core Processor", "family": 25, "model": 160, "threads": 8}
    about = {"date": "2026-11-24", "commit": "012345678", "ktmoe": "0.1.0", "cpu": cpu}
    return about | {"model": "gpt-oss-20b", "of_layers": 24, "servers": result}


def test_figures(measured, tmp_path):
    """Of texts whose tokens take 0.1, 0.2 and 0.3 s, and whose runs take half as long as one text after the other."""
    result = saved(measured(rounds=2))
    found = report.published(result)["vllm_servers"]
    assert (found["version"], found["layers"], found["of_layers"], found["read_gb_s"]) == ("0.32.0", 3, 24, 30.0)
    ours, theirs, llama = found["server"]
    first, second = ours["users"]
    assert first == {"users": 1, "texts": 2, "first_s": 2.0, "decode_tokens_s": 10.0, "tokens_s": 20.0}
    assert (second["users"], second["decode_tokens_s"]) == (4, 40.0)
    assert [one["decode_lead"] for one in theirs["users"] + llama["users"]] == [2.0, 2.0, 3.0, 3.0]
    assert llama["users"][1] == {**second, "decode_tokens_s": 13.33, "decode_lead": 3.0, "tokens_s": 6.667, "lead": 3.0}
    assert ("environment" in llama, theirs["environment"]) == (False, {"KTMOE_VLLM": "0"})
    assert "--parallel 4 --ctx-size 4096" in llama["options"]

    made = publish.vllm_alone(result, tmp_path)
    assert results_file.read(publish.write(made, tmp_path)) == made
    heads, rows = full_tables.vllm_servers([made])
    assert heads == ("CPU", "model", "layers", "users", "server", "first token after", "decode alone", "whole")
    assert [row[3:] for row in rows[:3]] == [
        ("1", "ktmoe MXFP4", "2 s", "10 tokens/s", "20 tokens/s"),
        ("1", "vLLM BF16", "2 s", "5 tokens/s, 2.00 x", "10 tokens/s, 2.00 x"),
        ("1", "llama.cpp MXFP4, dense BF16", "2 s", "3.33 tokens/s, 3.00 x", "6.67 tokens/s, 3.00 x"),
    ]
    assert len(rows) == 6


@pytest.mark.parametrize(
    ("fake", "out", "reason"),
    [
        ("no llama", "llama.cpp MXFP4, dense BF16", "the server ended with status 3: loading / no such architecture"),
        (
            "short texts",
            "llama.cpp MXFP4, dense BF16",
            "1 users: expected (1024, 256) tokens of prompts and new ones, found (1024, 254)",
        ),
        ("served anyway", "vLLM BF16", "expected ktmoe in 0 layers, found 3"),
    ],
)
def test_a_server_that_cannot_be_measured_is_out(measured, fake, out, reason):
    result = saved(measured(fake))
    assert result["servers"]["servers"][out]["failure"] == reason
    assert out not in [server["name"] for server in report.published(result)["vllm_servers"]["server"]]
    console = Console(width=200, record=True)
    with console.capture() as capture:
        report.show(result, console)
    assert f"out: servers: {out}: {reason}" in capture.get()


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        ("client dies", "1 users: the client has no result: the client's last words"),
        ("a text fails", "1 users: 1 of 2 texts were completed: the moon is not full"),
    ],
)
def test_without_any_server_there_is_no_result(measured, fake, reason):
    with pytest.raises(WorkerError, match=f"ktmoe MXFP4: {reason}; vLLM BF16: {reason}"):
        measured(fake)


def test_a_run_is_tried_again(measured):
    [record] = measured("a text fails once")["rounds"]
    assert [point["tries"] for turn in record.values() for point in turn["points"]] == [2] * 6


def test_a_server_ends_with_its_own_processes(tmp_path):
    """Also those that do not listen."""
    script = "import signal, subprocess, sys; signal.signal(15, signal.SIG_IGN); c = [sys.executable, '-c', sys.argv[1]]"
    script += "; print(subprocess.Popen(c).pid, flush=True); sys.exit(0)"
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    server = serving.Server([sys.executable, "-c", script, child], serving.free_port(), tmp_path / "log", {})
    with pytest.raises(WorkerError, match="ended with status 0"):
        server.wait()
    server.close()
    until = time.monotonic() + 10
    while alive(int(server.said)):
        assert time.monotonic() < until
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Not of a process that has ended, and nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "XZ"
    except OSError:
        return False


def test_without_its_program_a_server_is_out(tmp_path):
    missing = servers.Programs(tmp_path / "python", None, "cmake failed")
    with pytest.raises(WorkerError, match="cmake failed"):
        servers.command(servers.KINDS[-1], missing, 1, 8000, tmp_path)


def test_tokens_that_come_at_once_count(monkeypatch):
    """A client that reads late gets several tokens at a time, in chunks of their own or in one."""
    monkeypatch.setattr(client, "TEXTS", {2: 2})
    result = {"completed": 2, "start_times": [0.0, 0.0], "ttfts": [1.0, 1.0], "duration": 2.0, "vllm": ""}
    each, bunched, joined = [0.1] * 127, [0.001, 0.299, 0.0] * 42 + [0.1], [0.2] * 63 + [0.1]
    for gaps in (each, bunched, joined):
        assert client.figures(result | {"itls": [gaps] * 2}, 2)["decode"] == pytest.approx(20, rel=0.02)


def test_decoding_alone_is_without_prompts(monkeypatch):
    """The first text has tokens every second while the second waits, and every 0.1 s afterwards."""
    monkeypatch.setattr(client, "TEXTS", {2: 2})
    result = {"completed": 2, "start_times": [0.0, 0.0], "ttfts": [1.0, 11.0], "duration": 2.0, "vllm": ""}
    gaps = [[1.0] * 10 + [0.1] * 117, [0.1] * 127]
    assert client.figures(result | {"itls": gaps}, 2)["decode"] == pytest.approx(20, rel=0.02)
    with pytest.raises(client.TextsError, match="2 users: their texts were never written all at once"):
        client.figures(result | {"itls": gaps, "start_times": [0.0, 500.0]}, 2)


def test_no_prompt_comes_twice():
    lines = [line for number in range(3) for users in client.TEXTS for line in client.prompts(users, number).splitlines()]
    assert len({json.loads(line)["hash_ids"][0] for line in lines}) == len(lines) == 3 * sum(client.TEXTS.values())


def test_the_tokenizer_knows_as_many_tokens_as_the_model(tmp_path):
    byte_tokenizer.write(tmp_path, 300)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == [*range(300)]
    assert len(byte_tokenizer.tokens(64)) == 64
    everything, characters = (set(byte_tokenizer.tokens(1000, only)) for only in (False, True))
    assert set(map(chr, range(0x21, 0x7F))) < characters
    assert ("\u00e9" in everything, "\u00e9" in characters, "th" in characters) == (True, False, True)


def test_a_program_is_built_by_commands(tmp_path, monkeypatch):
    """In the environment's folder, with its own programs first. Made once, unless they change."""

    def create(home, clear, with_pip):
        (home / "bin").mkdir(parents=True, exist_ok=True)
        for name, made in (("python", f'exec "{sys.executable}" "$@"'), ("compiler", "echo $FLAG > bin/program")):
            (home / "bin" / name).write_text(f"#!/bin/sh\n{made}\n")
            (home / "bin" / name).chmod(0o755)

    monkeypatch.setattr(environments.venv, "create", create)
    said = []
    for flag in ("1", "1", "2"):
        made = environments.Environment("made", "a program", (), {"FLAG": flag}, builds=(("compiler", "it"),))
        environments.python(made, said.append, tmp_path)
        assert (tmp_path / "made" / "bin" / "program").read_text() == f"{flag}\n"
    assert said == ["installing a program", "building a program"] * 2
    for command, reason in ((("no-such-program",), "no-such-program failed: .*No such file"), (("false",), "false failed: ")):
        with pytest.raises(environments.SetUpError, match=reason):
            environments.python(environments.Environment("not", "", (), builds=(command,)), said.append, tmp_path)
    assert not os.path.exists(tmp_path / "not" / "installed")
