"""tools/guest.py where no guest can be had: it says why, and that is no failure. No guest is started here."""

import os

import pytest

from tools import avx2_guest, guest


@pytest.fixture(autouse=True)
def nothing_there(monkeypatch, tmp_path):
    """With nothing installed, for a user who is not root."""
    monkeypatch.setattr(guest, "FOLDER", tmp_path / "guest")
    monkeypatch.setattr(guest.shutil, "which", lambda program: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(guest.signal, "signal", lambda *arguments: None)


def only_apt_get(monkeypatch):
    monkeypatch.setattr(guest.shutil, "which", lambda program: "/usr/bin/apt-get" if program == "apt-get" else None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.fixture
def kernel(tmp_path):
    """What was fetched before."""
    (tmp_path / "guest" / "boot").mkdir(parents=True)
    (tmp_path / "guest" / "boot" / "vmlinuz-1").touch()
    (tmp_path / "guest" / "taken").write_text("\n".join(guest.TAKEN))


def test_not_root(capsys):
    assert avx2_guest.main(["true"]) == 0
    expected = "ktmoe: nothing ran in a guest: only root can install qemu-system-x86, busybox-static, kmod\n"
    assert capsys.readouterr().out == expected


def test_not_debian(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert avx2_guest.main(["true"]) == 0
    assert "there is no apt-get" in capsys.readouterr().out


def test_a_package_cannot_be_had(monkeypatch, capsys):
    def quietly(command):
        raise guest.Missing(f"{command} failed: E: no network")

    only_apt_get(monkeypatch)
    monkeypatch.setattr(guest, "quietly", quietly)
    assert avx2_guest.main(["true"]) == 0
    assert "E: no network" in capsys.readouterr().out


@pytest.mark.usefixtures("kernel")
def test_a_kernel_with_fewer_drivers_is_fetched_again(monkeypatch, tmp_path):
    """An earlier version of the tool took other drivers."""
    assert guest.fetched()
    (tmp_path / "guest" / "taken").write_text("\n".join(guest.TAKEN[:-1]))
    assert not guest.fetched()
    (tmp_path / "guest" / "taken").unlink()
    assert not guest.fetched()


@pytest.mark.usefixtures("kernel")
def test_the_guest_ends_too_early(monkeypatch, capsys):
    """Its kernel's last lines are shown, and it is a failure."""
    monkeypatch.setattr(guest, "initramfs", lambda folder, command, modules: (folder / "kernel").write_text("Kernel panic"))
    monkeypatch.setattr(guest, "qemu", lambda folder, accelerator, arguments: ["true"])
    assert guest.run("true") == 1
    assert "Its kernel said last:\nKernel panic\n" in capsys.readouterr().out


@pytest.mark.usefixtures("kernel")
def test_the_commands_exit_code(monkeypatch):
    monkeypatch.setattr(guest, "initramfs", lambda folder, command, modules: (folder / "kernel").touch())
    monkeypatch.setattr(guest, "qemu", lambda folder, accelerator, arguments: ["sh", "-c", f"echo 7 >{folder}/code"])
    assert guest.run("exit 7") == 7
