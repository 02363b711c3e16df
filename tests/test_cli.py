"""The command line as a whole: help, exit codes, errors of one line, pipes, colours, and what is missing."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest

import ktmoe
from ktmoe import cli, progress_bar, synthetic
from ktmoe.cli import measurements, units
from ktmoe.cli.commands import COMMANDS
from ktmoe.config import config


@pytest.fixture
def run(capsys):
    """A function that gives (exit status, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_version_and_help(run):
    assert run("--version") == (0, f"ktmoe {ktmoe.__version__}\n", "")
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    assert all(f"\n  {name} " in out for name in COMMANDS)
    for code in ("0    done", "1    an error, or a wrong result", "2    wrong usage", "130  interrupted by Ctrl-C"):
        assert f"\n  {code}\n" in out
    assert "1 GB is 1e9 bytes" in out
    for name in COMMANDS:
        status, out, err = run(name, "--help")
        assert (status, err) == (0, "")
        assert out.startswith(f"Usage: ktmoe {name} ")


def test_the_page_has_every_command():
    page = (Path(__file__).parents[1] / "docs" / "command-line.md").read_text()
    assert re.findall(r"^\| `ktmoe (\w+)", page, re.MULTILINE) == list(COMMANDS)


def test_no_command(run):
    status, out, err = run()
    assert (status, out) == (2, "")
    assert err.startswith("Usage: ktmoe ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("dmeo", "'dmeo'"),
        ("inspect", "DIR"),
        ("inspect x --jsno", "--jsno"),
        ("demo --experts 0", "'--experts': 0 "),
        ("bench --seconds -1", "'--seconds': -1.0 "),
        ("bench --seconds x", "'--seconds': 'x' "),
        ("config extra", "extra"),
        ("load x --layers abc", "expected numbers, ranges such as 0-3 and names such as mtp.0, found 'abc'"),
        ("load x --layers 0,1:3", "expected numbers, ranges such as 0-3 and names such as mtp.0, found '1:3'"),
        ("pack x y --layers 3-1", "expected numbers, ranges such as 0-3 and names such as mtp.0, found '3-1'"),
        ("bench x --layer -1", "expected a number or a name such as mtp.0, found '-1'"),
    ],
)
def test_wrong_usage(run, arguments, named):
    """The words are click's own, in one line, and what was wrong is among them."""
    status, out, err = run(*arguments.split())
    command = "ktmoe" if arguments == "dmeo" else f"ktmoe {arguments.split()[0]}"
    assert (status, out) == (2, "")
    assert err.startswith("ktmoe: ")
    assert named in err
    assert err.endswith(f"; see {command} --help\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["inspect", ""], "DIR"),
        (["bench", ""], "[DIR]"),
        (["pack", "x", ""], "OUT"),
        (["merge", "x", "", "y"], "ADAPTER"),
        (["convert", "x", "", "--to", "int8"], "OUT"),
        (["load", "x", "--cache", ""], "--cache"),
        (["demo", "--model", ""], "--model"),
    ],
)
def test_an_empty_path_is_not_this_folder(run, command, named):
    words = f"ktmoe: Invalid value for '{named}': expected a path, found an empty text; see ktmoe {command[0]} --help\n"
    assert run(*command) == (2, "", words)


def test_warnings_are_one_line(run, monkeypatch, tmp_path):
    """Those of ktmoe; each once."""
    synthetic.write_deepseek_v4(tmp_path, num_experts=2, hidden=64, intermediate=32, layers=2)
    cpus = len(os.sched_getaffinity(0))
    monkeypatch.setenv("KTMOE_NUM_THREADS", str(cpus + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        status, _, err = run("load", str(tmp_path), "--json")
        more = f"KTMOE_NUM_THREADS, more than the {cpus} CPUs that this process may use"
        assert (status, err) == (0, f"ktmoe: {cpus + 1} threads make calls slow here: {more}\n")
        with pytest.warns(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)  # as before
    assert f"threads: {cpus + 1} ({more})\n" in run("config")[1]


@pytest.mark.parametrize("command", ["inspect", "load", "bench"])
def test_an_error_is_one_line(run, tmp_path, command):
    status, out, err = run(command, str(tmp_path / "absent"), "--json")
    assert (status, out) == (1, "")
    assert err.startswith(f"ktmoe: {tmp_path}/absent: expected a folder, a .safetensors file or a .gguf file")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "command"), [("KTMOE_NUM_THREADS", "config"), ("KTMOE_BACKEND", "inspect"), ("KTMOE_TRACEBACK", "config")]
)
def test_wrong_environment(run, monkeypatch, tmp_path, name, command):
    monkeypatch.setenv(name, "many")
    synthetic.write_deepseek_v4(tmp_path, num_experts=2, hidden=64, intermediate=32)
    status, out, err = run(command, *([str(tmp_path)] if command == "inspect" else []))
    assert (status, out) == (1, "")
    assert name in err
    assert "many" in err
    assert err.count("\n") == 1


def test_interrupted(run, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("ktmoe.cli.config.show_config", interrupt)
    status, out, err = run("config")
    assert (status, out, err.strip()) == (130, "", "ktmoe: interrupted")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "the system refused memory"),  # Python's own says nothing
        (MemoryError("Unable to allocate 8 EiB"), "Unable to allocate 8 EiB"),  # numpy's does
    ],
)
def test_out_of_memory(run, monkeypatch, error, said):
    def fail():
        raise error

    monkeypatch.setattr("ktmoe.cli.config.show_config", fail)
    assert run("config") == (1, "", f"ktmoe: {said}\n")


def test_where_it_failed(run, monkeypatch, tmp_path):
    """KTMOE_TRACEBACK=1 says it, before the one line."""
    line = run("inspect", str(tmp_path / "absent"))[2]
    for value in ("0", "1"):
        monkeypatch.setenv("KTMOE_TRACEBACK", value)
        status, _, err = run("inspect", str(tmp_path / "absent"))
        assert (status, err.startswith("Traceback (most recent call last):\n")) == (1, value == "1")
        assert err.endswith(line)


def test_config(run):
    status, printed, _ = run("config")
    assert status == 0
    assert "fp32_lut: available" in printed
    status, out, err = run("config", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(config()))


def test_load(run, tmp_path):
    synthetic.write_deepseek_v4(tmp_path, num_experts=3, hidden=64, intermediate=32, layers=2, mtp_layers=1)
    status, out, err = run("load", str(tmp_path), "--layers", "0,mtp.0", "--backend", "fp32_lut", "--json")
    assert (status, err) == (0, "")
    data = json.loads(out)
    assert (data["path"], data["layers"], data["backends"]) == (str(tmp_path), 2, ["fp32_lut"])
    with ktmoe.MoEModel.from_checkpoint(tmp_path, [0, "mtp.0"], "fp32_lut") as model:
        assert data["packed_bytes"] == model.nbytes
        assert data["checkpoint_bytes"] == model.loaded[1]
    assert data["gb_s"] == pytest.approx(data["checkpoint_bytes"] / data["seconds"] / 1e9)
    assert data["peak_rss_bytes"] > data["packed_bytes"]


def python(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options)


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize("module", ["ktmoe", pytest.param("ktmoe.cli", marks=EXHAUSTIVE)])
def test_as_a_module(module):
    done = python("-m", module, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ktmoe {ktmoe.__version__}\n", "")


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("click", "config"),
        pytest.param("rich", "demo", marks=EXHAUSTIVE),
        pytest.param("tomli_w", "bench", marks=EXHAUSTIVE),
        pytest.param("packaging", "doctor", marks=EXHAUSTIVE),
    ],
)
def test_without_the_extra(missing, command):
    code = f"import sys; sys.modules[{missing!r}] = None; from ktmoe.cli import main; sys.exit(main([{command!r}]))"
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (1, "")
    install = "pip install 'ktmoe[cli]', or '.[cli]' in a clone of ktmoe"
    assert done.stderr == f"ktmoe: the command needs {missing}, which is not installed: {install}\n"


def test_another_module_that_is_missing_is_no_matter_of_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ktmoe.cli.load", None)
    with pytest.raises(ModuleNotFoundError, match=r"ktmoe\.cli\.load"):
        cli.main(["load"])


@pytest.mark.parametrize("arguments", [["config"], pytest.param(["--help"], marks=EXHAUSTIVE)])
def test_a_broken_pipe_ends_quietly(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ktmoe", *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_closed_stdout():
    command = ["sh", "-c", 'exec "$0" -m ktmoe config >&-', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stderr():
    """What would go there does not go to stdout instead."""
    command = ["sh", "-c", 'exec "$0" -m ktmoe inspect nothing 2>&-', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_progress_is_for_terminals_alone(monkeypatch, stream):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    for what in ("steps", "bytes"):
        monkeypatch.setattr(sys, "stderr", stream())
        with ExitStack() as stack:
            step = stack.enter_context(progress_bar.steps()) if what == "steps" else progress_bar.bytes_done
            stack.enter_context(step("packing"))(1, 2)
        written = sys.stderr.getvalue()
        assert ("packing" in written) if stream is Terminal else (written == "")


def test_commands_draw_no_bars_where_stderr_is_no_terminal(run, monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")
    model = str(tmp_path / "model")
    synthetic.write_deepseek_v4(model, num_experts=2, hidden=64, intermediate=32, top_k=2)
    for command in (
        ["load", model],
        ["pack", model, str(tmp_path / "cache")],
        ["convert", model, str(tmp_path / "int8"), "--to", "int8", "--requantize"],
    ):
        status, _, err = run(*command)
        assert (status, err) == (0, ""), command


@pytest.mark.parametrize(
    ("variables", "coloured"), [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)]
)
def test_no_color(monkeypatch, capsys, variables, coloured):
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    measurements.console().print("[red]WRONG[/red]")
    assert ("\x1b[31m" in capsys.readouterr().out) == coloured


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123456, "0.01235"), (1.23456, "1.235"), (123456.0, "123456"), (0, "0"), (float("inf"), "-")]
)
def test_numbers(value, text):
    assert units.number(value) == text


def test_units():
    assert units.gb(3_422_552_064) == "3.42 GB"
    assert units.gb_s(20.3e9) == "20.3 GB/s"
    assert units.gflop_s(812.34e9) == "812 GFLOP/s"
    assert units.tokens_s(7.1234) == "7.12 tokens/s"
    assert units.ms(0.0041509) == "4.151 ms"
    assert [units.percent(share) for share in (0.6049, 0.0122)] == ["60%", "1.2%"]
    assert [units.count(number, "layer") for number in (1, 2)] == ["1 layer", "2 layers"]
