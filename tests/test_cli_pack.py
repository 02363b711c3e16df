"""`ktmoe pack`, and --cache of the commands that load."""

import json

import pytest
from cached import SIZES

from ktmoe import cli, synthetic


@pytest.fixture
def run(capsys):
    def call(*arguments) -> tuple[int, str, str]:
        status = cli.main([*map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def model(tmp_path):
    synthetic.write_deepseek_v4(tmp_path / "model", layers=3, **SIZES)
    return tmp_path / "model"


def test_text(run, model, tmp_path):
    status, out, err = run("pack", model, tmp_path / "out", "--layers", "0,2")
    assert (status, err) == (0, "")
    assert out.startswith(f"{tmp_path / 'out'}: 0.00")
    assert out.endswith("written: layers 0, 2\n")
    status, out, err = run("pack", model, tmp_path / "out", "--numa-nodes", "0", "--verify")
    assert (status, err) == (0, "")
    assert out.endswith("written: layers 1\nkept: layers 0, 2\nthe same bytes again: layers 0-2\n")


def test_json(run, model, tmp_path):
    status, out, err = run("pack", model, tmp_path / "out", "--json")
    found = json.loads(out)
    files = [file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")]
    assert (found["layers_written"], found["layers_kept"], found["layers_verified"]) == ([0, 1, 2], [], [])
    assert found["cache_bytes"] == sum(files)
    assert (status, err) == (0, "")


def test_load(run, model, tmp_path):
    run("pack", model, tmp_path / "out")
    status, out, err = run("load", model, "--cache", tmp_path / "out")
    assert (status, err) == (0, "")
    assert "\nmapped in 0." in out
    assert "nothing was read" in out
    assert json.loads(run("load", model, "--cache", tmp_path / "out", "--json")[1])["mapped"] is True
    assert json.loads(run("load", model, "--json")[1])["mapped"] is False


@pytest.mark.usefixtures("limits_at_once")
def test_bench(run, model, tmp_path):
    run("pack", model, tmp_path / "out", "--layers", "1")
    options = "--top-k", "2", "--seconds", "0.01", "--json"
    status, out, _ = run("bench", model, "--layer", "1", "--cache", tmp_path / "out", *options)
    assert status == 0
    assert all(call["right"] for call in json.loads(out)["calls"])
    status, _, err = run("bench", model, "--cache", tmp_path / "out", *options)
    assert status == 1
    assert "layer 0: expected to be packed, found layers 1" in err


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (("pack", "{model}"), 2, "Missing argument 'OUT'"),
        (("pack", "{model}", "{model}"), 1, "expected an empty folder or a packed cache, found 'config.json' in it"),
        (("pack", "{model}", "out", "--numa-nodes", "0-1"), 2, "expected numbers such as 0,1, found '0-1'"),
        (("pack", "{model}", "{model}/out", "--numa-nodes", "77"), 1, "numa_nodes: node 77 cannot be used"),
        (("load", "{model}", "--cache", "{model}"), 1, "expected a packed cache, which has ktmoe-cache.json, found none"),
        (("bench", "--cache", "out"), 2, "--cache needs DIR, and excludes --experts"),
        (("bench", "{model}", "--experts", "2", "--cache", "out"), 2, "--cache needs DIR, and excludes --experts"),
    ],
)
def test_errors(run, model, arguments, status, named):
    found, out, err = run(*(argument.format(model=model) for argument in arguments))
    assert (found, out) == (status, "")
    assert named in err
    assert err.count("\n") == 1
