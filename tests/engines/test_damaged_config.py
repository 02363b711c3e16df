"""Commands on a model whose config.json is damaged: an answer, or one line; never a traceback, and never for long."""

from __future__ import annotations

import json
import random
import shutil
import signal

import pytest
import typer

from ktmoe import cli, synthetic
from ktmoe.errors import CheckpointError, OutOfMemoryError, UnavailableError
from ktmoe.transformers.refusals import in_one_line

#: Seconds that a tiny model may take.
PATIENCE = 60
NUMBERS = [-1, 0, 1, 3, 10**6, 2**31, 2**63, -(2**31), 10**30, 0.5, -1.5, 1e308]
VALUES = [*NUMBERS, None, True, False, "", "x", "1", "auto", "float64", [], [1], ["x"], [[]], {}, {"a": 1}]
#: Keys that the model does not have, and what transformers may make of them.
MORE = {
    "quantization_config": ["x", [], {}, *({"quant_method": name} for name in ("fp8", "mxfp4", "gptq", "ktmoe", "x", 3, None))],
    "text_config": ["x", [], {}, {"num_hidden_layers": 2**31}],
    "architectures": ["x", [], [1], [None], ["pipeline"], ["Qwen3MoeConfig"], ["MixtralForCausalLM"], ["__doc__"]],
    "model_type": ["x", "mixtral", "gpt_oss", "qwen3", "deepseek_v3", "bert", "t5", "clip"],
    "rope_parameters": ["x", {}, {"rope_type": "yarn", "factor": -1}],
    "layer_types": ["x", [], ["full_attention"], [1, 2]],
    "dtype": ["x", "float32", "int8", "__init__", ["bfloat16"]],
    "attn_implementation": ["x"],
    "auto_map": ["x", {"AutoConfig": "a.b"}],
    "return_dict": [False],
    "is_encoder_decoder": [True],
    "num_labels": [2**31, -1, "x"],
    "max_length": [1, 2**62],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    synthetic.write_chat_model(folder, seed=1)
    return folder


@pytest.fixture
def run(capsys):
    """A function that gives (exit status, stderr). It ends what takes longer than PATIENCE."""

    def call(*arguments: str) -> tuple[int, str]:
        signal.alarm(PATIENCE)
        status = cli.main(arguments)
        signal.alarm(0)
        return status, capsys.readouterr().err

    def late(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, late)
    yield call
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def damaged(text: str, seed: int) -> bytes:
    """One or two values are others, or some bytes are, or the end is missing."""
    rng = random.Random(seed)
    if rng.random() < 0.15:
        data = bytearray(text.encode())
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
    config = json.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2])):
        table = rng.choice([VALUES, VALUES, MORE])
        key = rng.choice(list(config if table is VALUES else MORE))
        config[key] = rng.choice(VALUES if table is VALUES else MORE[key])
        if rng.random() < 0.05:
            del config[key]
    return json.dumps(config).encode()


COMMANDS = {
    "chat": (["hello", "--greedy", "--max-new-tokens", "3"], 150),
    "accuracy": (["--text", "{text}", "--context", "8", "--tokens", "12", "--activations", "bf16"], 50),
    "serve": (["--port", "0", "--host", "127.0.0.1", "--", "--log-level", "error"], 25),
}


@pytest.mark.smoke("one")
@pytest.mark.parametrize("command", COMMANDS)
def test_an_answer_or_a_line(run, model, tmp_path, monkeypatch, command):
    def stop(seconds):  # a server that listens
        raise KeyboardInterrupt

    monkeypatch.setattr("ktmoe.cli.serve.time.sleep", stop)
    (tmp_path / "text").write_text("hello there, this is a text")
    folder = tmp_path / "tiny"
    shutil.copytree(model, folder)
    arguments, count = COMMANDS[command]
    arguments = [argument.format(text=tmp_path / "text") for argument in arguments]
    answered, text = 0, (model / "config.json").read_text()
    for seed in range(count):
        data = damaged(text, seed)
        (folder / "config.json").write_bytes(data)
        status, err = run(command, str(folder), *arguments)
        last = (err.splitlines() or [""])[-1]
        well = status == (130 if command == "serve" else 0)
        assert well or (status == 1 and last.startswith("ktmoe: ") and last != "ktmoe: interrupted"), (seed, data, err)
        answered += well
    assert 0 < answered < count / 2


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyError("float64"), UnavailableError, "^transformers cannot load it: KeyError: 'float64'$"),
        (AssertionError(), UnavailableError, "^transformers cannot load it: AssertionError$"),
        (RuntimeError("two\n lines"), UnavailableError, "^transformers cannot load it: RuntimeError: two lines$"),
        (MemoryError(), OutOfMemoryError, "^it: the system refused memory$"),
        (CheckpointError("as it was"), CheckpointError, "^as it was$"),
        (BrokenPipeError("as it was"), BrokenPipeError, "^as it was$"),
        (typer.Exit(0), typer.Exit, ""),
        (typer.BadParameter("as it was"), typer.BadParameter, "as it was"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
    ],
)
def test_whatever_is_raised(error, kind, message):
    with pytest.raises(kind, match=message), in_one_line("it"):
        raise error
