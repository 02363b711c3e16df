"""A Debian that has Python and nothing else: no compiler, no headers, no packages of Python's. debootstrap makes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench.peers.environments import SetUpError
from tools import guest
from tools.requirements import requirements

ROOT = Path(__file__).resolve().parents[1]
FOLDER, PACKAGES = ROOT / "build" / "wheels" / "debian", ROOT / "build" / "wheels" / "packages"
#: A release of Debian, and the version of its Python.
RELEASE, PYTHON = "trixie", "3.13"


def made(say: Callable[[str], object]) -> Path:
    """Its root. Raises guest.Missing, or SetUpError where this is not root."""
    if os.geteuid():
        raise SetUpError("only root can make a new Debian")
    if not shutil.which("debootstrap"):
        guest.quietly("apt-get update && apt-get install -y --no-install-recommends debootstrap")
    if not (FOLDER / "venv").exists():
        say(f"making a Debian of {RELEASE}")
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        guest.quietly(f"debootstrap --variant=minbase --include=python3,python3-venv {RELEASE} '{FOLDER}'")
    for absent in ("usr/bin/cc", "usr/bin/gcc", f"usr/include/python{PYTHON}/Python.h"):
        if (FOLDER / absent).exists():
            raise SetUpError(f"{RELEASE} has {absent}, so that it is not bare")
    return FOLDER


def install(root: Path, wheel: Path) -> None:
    """Install a wheel as on a machine without a network, from a folder of packages. Raises guest.Missing or SetUpError."""
    shutil.rmtree(PACKAGES, ignore_errors=True)
    # glibc 2.28 and older is what the newest packages of numpy ask for
    platforms = [word for glibc in (28, 27, 17) for word in ("--platform", f"manylinux_2_{glibc}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:", "--python-version", PYTHON, *platforms]
    done = subprocess.run([*command, "-d", PACKAGES, *requirements(("package",))], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetUpError(done.stderr.strip().rpartition("\n")[2])
    shutil.copy(wheel, PACKAGES)
    shutil.rmtree(root / "packages", ignore_errors=True)
    shutil.copytree(PACKAGES, root / "packages")
    guest.quietly(f"chroot '{root}' python3 -m venv --clear /venv")
    guest.quietly(f"chroot '{root}' /venv/bin/pip install --no-index --find-links /packages ktmoe")
