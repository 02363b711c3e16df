"""`ktmoe serve`: OpenAI's own client gets generate()'s answers, from a server that outlives its clients."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import commands
import openai
import pytest
from texts import PROMPT, TOKENS, Oracle

from ktmoe import cli, synthetic
from ktmoe.transformers import serving

MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "Tiny-1.5"
    synthetic.write_chat_model(folder, seed=2)
    return folder


@pytest.fixture(scope="module")
def expected(model):
    """The greedy answer to MESSAGES, and the continuation of PROMPT."""
    oracle = Oracle(model)
    return oracle.answer(("user", PROMPT)), oracle.continuation(PROMPT)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    options = ["--backend", "fp32_lut", "--activations", "bf16", "--threads", "1"]
    with commands.server(model, tmp_path_factory.mktemp("temporary"), *options, "--", "--log-level", "error") as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=commands.PATIENCE) as found:
        yield found


def streamed(stream) -> tuple[str, int]:
    """(text, pieces)."""
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content]
    return "".join(pieces), len(pieces)


def test_the_line_that_is_printed(server):
    body = '{"model": "Tiny-1.5", "messages": [{"role": "user", "content": "Hello"}]}'
    assert server.line == (
        f"Tiny-1.5 is served at {server.url}: curl {server.url}/chat/completions"
        f" -H 'Content-Type: application/json' -d '{body}'\n"
    )


def test_models(client):
    assert [found.id for found in client.models.list()] == ["Tiny-1.5"]


@pytest.mark.smoke
def test_a_completion(client, expected):
    found = client.chat.completions.create(model="Tiny-1.5", messages=MESSAGES, **GREEDY)
    assert found.choices[0].message.content == expected[0]
    assert found.usage.completion_tokens == TOKENS


@pytest.mark.smoke
def test_a_streamed_completion(client, expected):
    text, pieces = streamed(client.chat.completions.create(model="Tiny-1.5", messages=MESSAGES, stream=True, **GREEDY))
    assert text == expected[0]
    assert pieces > 1


def test_a_continued_text(client, expected):
    found = client.completions.create(model="Tiny-1.5", prompt=PROMPT, **GREEDY)
    assert found.choices[0].text == expected[1]


def test_another_model(client):
    with pytest.raises(openai.NotFoundError, match=r"model: expected 'Tiny-1\.5', found 'another'") as error:
        client.chat.completions.create(model="another", messages=MESSAGES, **GREEDY)
    assert error.value.code == "model_not_found"


def test_a_client_that_goes_away(client, expected):
    """Twice, in the middle of a stream; the next one is answered."""
    for _ in range(2):
        with client.chat.completions.create(
            model="Tiny-1.5", messages=MESSAGES, stream=True, temperature=0, max_tokens=3500
        ) as stream:
            assert any(chunk.choices[0].delta.content for chunk in stream)
        assert (
            client.chat.completions.create(model="Tiny-1.5", messages=MESSAGES, **GREEDY).choices[0].message.content
            == (expected[0])
        )


def test_options_reach_the_view(server, model):
    (view,) = commands.views(server.temporary)
    written = json.loads((view / "Tiny-1.5" / "config.json").read_text())["quantization_config"]
    found = {name: written[name] for name in ("quant_method", "path", "backend", "activations", "threads")}
    assert found == {
        "quant_method": "ktmoe",
        "path": str(model),
        "backend": "fp32_lut",
        "activations": "bf16",
        "threads": 1,
    }


@pytest.mark.parametrize(("number", "status", "stream"), [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, False)])
def test_signals_end_it(model, tmp_path, number, status, stream):
    """In the middle of an answer, of which the client is told; nothing is left behind."""
    with commands.server(model, tmp_path) as started:
        assert len(commands.views(tmp_path)) == 1
        with (
            openai.OpenAI(base_url=started.url, api_key="none", max_retries=0) as client,
            ThreadPoolExecutor(1) as background,
        ):
            answer = background.submit(
                client.chat.completions.create, model="Tiny-1.5", messages=MESSAGES, stream=stream, max_tokens=3500
            )
            while "Request received" not in started.errors.read_text():
                time.sleep(0.05)
            started.process.send_signal(number)
            assert started.process.wait(commands.PATIENCE) == status
            if not stream:
                with pytest.raises(openai.APIError):
                    answer.result(commands.PATIENCE)
    assert commands.views(tmp_path) == []


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """A function that gives (exit status, stdout, stderr) of what does not serve; nothing is left behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def call(*arguments: object) -> tuple[int, str, str]:
        status = cli.main(["serve", *map(str, arguments)])
        captured = capsys.readouterr()
        assert commands.views(tmp_path) == []
        return status, captured.out, captured.err

    return call


def test_an_address_that_is_taken(run, model):
    """It is found out before the model is loaded, which could take minutes."""
    (model / "model.safetensors").rename(model / "away")
    try:
        with socket.create_server(("localhost", 0)) as taken:
            port = taken.getsockname()[1]
            status, out, err = run(model, "--port", port)
    finally:
        (model / "away").rename(model / "model.safetensors")
    assert (status, out) == (1, "")
    assert err.startswith(f"ktmoe: localhost port {port}: a server cannot listen there: Address already in use")
    assert err.count("\n") == 1


def test_an_ipv6_address(model, tmp_path):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"IPv6 cannot be used here: {error}")
    with (
        commands.server(model, tmp_path, "--host", "::1") as started,
        openai.OpenAI(base_url=started.url, api_key="none", max_retries=0, timeout=commands.PATIENCE) as client,
    ):
        assert started.url.startswith("http://[::1]:")
        assert [found.id for found in client.models.list()] == ["Tiny-1.5"]


FEW = "ktmoe: prompt and answer may have 100 tokens together, since memory may not suffice for the model's 4096; see --context"
OPEN = "ktmoe: 192.0.2.1 is not a local address: whoever reaches it can use the model; see --api-key"


@pytest.mark.parametrize(
    ("arguments", "tokens", "warnings"),
    [
        ([], 4096, []),
        (["--context", "100"], 100, []),
        ([], 100, [FEW]),
        (["--host", "192.0.2.1"], 4096, [OPEN]),
        (["--", "--host", "192.0.2.1"], 4096, [OPEN]),
        (["--host", "192.0.2.1", "--api-key", "secret"], 4096, []),
    ],
)
def test_warnings(run, model, monkeypatch, arguments, tokens, warnings):
    """Before anyone asks. Nothing listens here."""

    @contextmanager
    def serve(made, context, limits, key):
        assert key == ("secret" if "--api-key" in arguments else None)
        assert limits == serving.ServerLimits(100 if "--context" in arguments else None, 3600)
        yield serving.Listening("http://address", tokens, 4096)

    def interrupt(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "serving", serve)
    monkeypatch.setattr(serving, "check_address", lambda host, port: None)
    monkeypatch.setattr(time, "sleep", interrupt)
    status, out, err = run(model, *arguments)
    assert (status, "Tiny-1.5 is served at http://address/v1" in out) == (130, True)
    assert [line for line in err.splitlines() if line] == [*warnings, "ktmoe: interrupted"]


def test_more_tokens_than_the_model_was_made_for(run, model):
    status, out, err = run(model, "--port", 0, "--context", 4097)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == "ktmoe: context: expected at most the model's own, 4096 tokens, found 4097"


def test_arguments_for_transformers(run, model):
    status, out, err = run(model, "--", "--nonsense")
    assert (status, out) == (2, "")
    assert err == "ktmoe: transformers serve: No such option: --nonsense; see ktmoe serve --help\n"
    status, out, err = run(model, "--port", 0, "--", "--chat-template-kwargs", "[1]")
    assert (status, out) == (2, "")
    assert "transformers serve: Invalid value: --chat-template-kwargs must be a JSON object" in err.splitlines()[-1]
    status, out, err = run(model, "--", "--continuous-batching")
    assert (status, out) == (2, "")
    assert "--continuous-batching: expected answers one after the other" in err
    status, out, err = run(model, "--", "--help")
    assert (status, err) == (0, "")
    assert "--reasoning" in out


EXTRA = "pip install 'ktmoe[serve]', or '.[serve]' in a clone of ktmoe"
FOR_CPUS = "uv pip install --torch-backend=cpu accelerate"


@pytest.mark.parametrize(
    ("missing", "install"), [(("uvicorn",), EXTRA), (("fastapi", "openai"), EXTRA), (("accelerate",), FOR_CPUS)]
)
def test_a_package_that_is_missing(run, model, monkeypatch, missing, install):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    verb = "is" if len(missing) == 1 else "are"
    words = f"transformers' server needs {', '.join(missing)}, which {verb} not installed: {install}"
    assert run(model) == (1, "", f"ktmoe: {words}\n")


def test_refusals(run, model, tmp_path):
    absent = tmp_path / "absent"
    words = "expected a folder or the id of a model on the Hub, found neither"
    assert run(absent) == (1, "", f"ktmoe: {absent}: {words}\n")
    dense = tmp_path / "dense"
    shutil.copytree(model, dense)
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [0, 1]}))
    status, out, err = run(dense, "--port", 0)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == "ktmoe: Qwen3MoeForCausalLM: ktmoe cannot serve it: it has no routed experts"
