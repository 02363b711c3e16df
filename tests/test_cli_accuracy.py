"""`ktmoe accuracy` as far as it needs no torch: its options, and what is refused before anything is loaded."""

from __future__ import annotations

import sys

import pytest

from ktmoe import cli


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """A function of the text's bytes and of options -> (exit status, the one line on stderr)."""
    monkeypatch.setitem(sys.modules, "torch", None)

    def call(data: bytes, *options: str) -> tuple[int, str]:
        file = tmp_path / "text"
        file.write_bytes(data)
        status = cli.main(["accuracy", str(tmp_path), "--text", str(file), *options])
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("ktmoe: ")
        assert captured.err.count("\n") == 1
        return status, captured.err

    return call


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected a text, found an empty file"),
        (b" \n\n", "expected a text, found white space alone"),
        (b"abc\xffdef", "expected text in UTF-8, found byte 0xff at 3"),
    ],
)
def test_what_is_no_text(run, data, message):
    status, err = run(data)
    assert status == 1
    assert message in err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--backend none", "unknown backend 'none'"),
        ("--activations int8,int4", "'int4'"),
        ("--activations int8,", "''"),
        ("--backend fp32_lut --activations int16", "it has no activation mode 'int16', only bf16, int8"),
    ],
)
def test_modes_that_no_backend_has(run, options, named):
    status, err = run(b"a text", *options.split())
    assert status == 1
    assert named in err


@pytest.mark.parametrize("options", ["--context 1", "--tokens 1", "--rounding up", "--layers 3"])
def test_wrong_usage(run, options):
    assert run(b"a text", *options.split())[0] == 2


def test_the_text_has_to_be_given(capsys):
    assert cli.main(["accuracy", "folder"]) == 2
    assert "--text" in capsys.readouterr().err


def test_no_such_file(capsys, tmp_path):
    for file, found in ((tmp_path / "absent", "No such file or directory"), (tmp_path, "Is a directory")):
        assert cli.main(["accuracy", str(tmp_path), "--text", str(file)]) == 1
        assert capsys.readouterr().err == f"ktmoe: {file}: expected a file with a text, found {found}\n"


def test_without_torch(run):
    status, err = run(b"a text")
    assert status == 1
    assert "ktmoe.transformers needs " in err
    assert "install" in err
