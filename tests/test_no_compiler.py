"""A build that lacks what has to be installed first: one line says what that is, the same as make's."""

import shutil
import subprocess
import sys

import pytest
from environments import NEEDS_COMPILER, ROOT

CHECK = ("sh", "tools/check_machine.sh")


@pytest.fixture
def source(tmp_path):
    """The tree as a source distribution has it; what Cython made of it is copied, since that takes long."""
    for name in ("ktmoe/_native", "build/cython"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "tools/check_machine.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def said(source, monkeypatch, *command):
    monkeypatch.chdir(source)
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_no_compiler(source, monkeypatch):
    monkeypatch.setenv("CC", "/nonexistent/cc")
    code, printed = said(source, monkeypatch, sys.executable, "setup.py", "build_ext")
    line = next(line for line in printed.splitlines() if "/nonexistent/cc" in line)
    assert code == 1
    assert line.startswith("error: ktmoe needs a working C compiler (tried: /nonexistent/cc). Debian, Ubuntu: apt install gcc")
    assert printed.splitlines()[-1] == line
    assert "built WITHOUT" not in printed
    assert said(source, monkeypatch, *CHECK, sys.executable) == (0, line.removeprefix("error: ") + "\n")


@NEEDS_COMPILER
@pytest.mark.parametrize("lacking", ["Python.h", "Python's venv and ensurepip"])
def test_what_python_lacks(tmp_path, monkeypatch, lacking):
    """A build needs Python.h; only make makes an environment."""
    python = tmp_path / "python"
    header = "import sysconfig; sysconfig.get_path = lambda name: '/nonexistent'" if lacking == "Python.h" else ""
    module = "import sys; sys.modules['ensurepip'] = None" if header == "" else ""
    (tmp_path / "sitecustomize.py").write_text(f"{header}\n{module}\n")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    told = {asked: said(ROOT, monkeypatch, *CHECK, python, *asked)[1] for asked in ((), ("venv",))}
    assert told["venv",].startswith(f"ktmoe needs {lacking}. Debian, Ubuntu: apt install python")
    assert told[()] == (told["venv",] if lacking == "Python.h" else "")


@NEEDS_COMPILER
def test_nothing_is_lacking(monkeypatch):
    assert said(ROOT, monkeypatch, *CHECK, sys.executable) == (0, "")


def test_another_platform(source, monkeypatch):
    """One line says what ktmoe needs. Only the variable that a cross build sets is another."""
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "macosx-14.0-arm64")
    code, printed = said(source, monkeypatch, sys.executable, "setup.py", "build_ext")
    assert code == 1
    assert printed.splitlines()[-1] == "error: ktmoe needs Linux on x86-64, and this Python is for macosx-14.0-arm64"
