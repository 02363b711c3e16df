"""`ktmoe doctor`: what it prints of what the checks find, its exit code, and whether a checkpoint fits."""

from __future__ import annotations

import functools
import json

import pytest
from doctored import VARIABLES, make

from ktmoe import cli, doctor, synthetic
from ktmoe.cli.doctor import of_model
from ktmoe.machine import memory
from ktmoe.measuring import inspection

SIZES = {"num_experts": 4, "hidden": 64, "intermediate": 32, "top_k": 2}


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """A function of arguments and changed files -> (exit status, stdout)."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    examine = doctor.examine

    def call(*arguments: str, changed=None) -> tuple[int, str]:
        monkeypatch.setattr(doctor, "examine", functools.partial(examine, make(tmp_path / "root", changed)))
        status = cli.main(["doctor", *arguments])
        captured = capsys.readouterr()
        assert captured.err == ""
        return status, captured.out

    return call


def test_this_machine(capsys):
    assert cli.main(["doctor"]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("this machine: ")
    assert sum(line.partition(": ")[0] in doctor.STATES for line in lines) == len(doctor.CHECKS)


def test_the_worst_comes_first(run):
    changed = {"proc/loadavg": "9.5 0 0 1/1 1\n", "sys/fs/cgroup/mine/cpu.max": "10000 100000\n", "proc/meminfo": None}
    status, out = run(changed=changed)
    assert status == 1
    lines = out.splitlines()
    states = [line.partition(": ")[0] for line in lines if line.partition(": ")[0] in doctor.STATES]
    assert states == sorted(states, key=doctor.STATES.index)
    at = lines.index(
        "wrong: CPU quota: the control group grants the time of 0.1 CPUs, and this process may use 4 physical cores"
    )
    assert lines[at + 1].startswith("  why: Linux stops all threads")
    assert lines[at + 2].startswith("  type: docker run --cpus 4")
    assert lines[-1].startswith("1 wrong, ")


def test_what_could_be_better_is_no_error(run):
    status, out = run(changed={"proc/loadavg": "9.5 0 0 1/1 1\n"})
    assert "could be better: load: " in out
    assert status == 0


def test_json(run):
    status, out = run("--json", changed={"proc/loadavg": "9.5 0 0 1/1 1\n", "proc/stat": "\x1b[31m\n"})
    data = json.loads(out)
    assert (status, data["wrong"]) == (0, 0)
    assert [each["name"] for each in data["checks"]] == [check.name for check in doctor.CHECKS]
    (load,) = (each for each in data["checks"] if each["name"] == "load")
    assert load["finding"] == "could be better"
    assert load["remedy"].startswith("top")
    assert {each["remedy"] for each in data["checks"] if each["finding"] == "good"} == {None}


def model_of(out: str) -> dict:
    return next(each for each in json.loads(out)["checks"] if each["name"] == "model")


def test_a_model(run, monkeypatch, tmp_path):
    model = tmp_path / "model"
    synthetic.write_deepseek_v4(model, **SIZES, layers=2)
    status, out = run(str(model), "--json")
    assert (status, model_of(out)["finding"]) == (0, "good")
    assert "loading needs " in model_of(out)["found"]
    monkeypatch.setattr(memory, "available_bytes", lambda root=None: 5000)
    status, out = run(str(model), "--json")
    assert (status, model_of(out)["finding"]) == (1, "wrong")
    assert model_of(out)["remedy"].startswith(f"ktmoe inspect {model}")


def test_a_model_of_which_a_layer_is_not_served(tmp_path):
    synthetic.write_deepseek_v4(tmp_path, **SIZES, layers=2)
    found = inspection.inspect(str(tmp_path))
    assert of_model(found).state == doctor.GOOD
    found.refused.append(inspection.Refused([2], "its scales are absent"))
    assert of_model(found).state == doctor.BETTER
    assert of_model(found).found.endswith("; not served: layers 2")
    found.available = None
    assert " is available" not in of_model(found).found


def test_a_model_that_is_not_served(run, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    status, out = run(str(tmp_path / "model.safetensors"), "--json")
    assert (status, model_of(out)["finding"]) == (1, "wrong")
    assert "no layer is served" in model_of(out)["found"]


def test_no_model(capsys, tmp_path):
    assert cli.main(["doctor", str(tmp_path / "absent")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ktmoe: ")
    assert cli.main(["doctor", ""]) == 2
