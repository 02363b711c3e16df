"""tools/avx2_guest.py where no guest can be had: it says why, and that is no failure. No guest is started here."""

import importlib.util
import os
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "avx2_guest.py"


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """With nothing installed, for a user who is not root."""
    spec = importlib.util.spec_from_file_location("avx2_guest", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "guest")
    monkeypatch.setattr(module.shutil, "which", lambda program: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(module.signal, "signal", lambda *arguments: None)
    return module


def test_not_root(tool, capsys):
    assert tool.main(["true"]) == 0
    expected = "ktmoe: nothing ran in a guest: only root can install qemu-system-x86, busybox-static, kmod\n"
    assert capsys.readouterr().out == expected


def test_not_debian(tool, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert tool.main(["true"]) == 0
    assert "there is no apt-get" in capsys.readouterr().out


def test_a_package_cannot_be_had(tool, monkeypatch, capsys):
    def quietly(command):
        raise tool.Missing(f"{command} failed: E: no network")

    monkeypatch.setattr(tool.shutil, "which", lambda program: "/usr/bin/apt-get" if program == "apt-get" else None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(tool, "quietly", quietly)
    assert tool.main(["true"]) == 0
    assert "E: no network" in capsys.readouterr().out


def test_the_guest_ends_too_early(tool, monkeypatch, capsys, tmp_path):
    """Its kernel's last lines are shown, and it is a failure."""
    (tmp_path / "guest" / "boot").mkdir(parents=True)
    (tmp_path / "guest" / "boot" / "vmlinuz-1").touch()
    monkeypatch.setattr(tool, "initramfs", lambda folder, command: (folder / "kernel").write_text("Kernel panic"))
    monkeypatch.setattr(tool, "qemu", lambda folder, accelerator: ["true"])
    assert tool.run("true") == 1
    assert "Its kernel said last:\nKernel panic\n" in capsys.readouterr().out


def test_the_commands_exit_code(tool, monkeypatch):
    monkeypatch.setattr(tool, "initramfs", lambda folder, command: (folder / "kernel").touch())
    monkeypatch.setattr(tool, "qemu", lambda folder, accelerator: ["sh", "-c", f"echo 7 >{folder}/code"])
    assert tool.run("exit 7") == 7
