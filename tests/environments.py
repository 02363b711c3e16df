"""Temporary virtual environments behind whose own packages stand those of the running interpreter: no network, no index."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
NEEDS_COMPILER = pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="there is no C compiler")
_PIP = [sys.executable, "-m", "pip"]
_OFFLINE = ["--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir"]


class Environment:
    """A virtual environment in a new folder. Its python, site (a folder), and what the tests do with it."""

    def __init__(self, folder: Path):
        run([sys.executable, "-m", "venv", "--without-pip", folder])
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
        behind = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
        # addsitedir, since an editable install of ktmoe is a .pth file there
        lines = [f"import site; site.addsitedir({path!r})\n" for path in behind]
        (self.site / "behind.pth").write_text("".join(lines))

    def wheel(self, project: Path, to: Path, *more: Path, **variables: str) -> str:
        """Build the wheels of a project, and of more, into a folder; returns what the builds printed."""
        command = [*_PIP, "--python", self.python, "wheel", "-v", *_OFFLINE, "-w", to, project, *more]
        done = run(command, cwd=self.folder, **variables)
        return done.stdout + done.stderr

    def install(self, *wheels: Path) -> None:
        """Install wheels, whatever stands behind under their names: pip would leave it at that if the versions are equal."""
        run([*_PIP, "--python", self.python, "install", "--ignore-installed", *_OFFLINE, *wheels], cwd=self.folder)

    def uninstall(self, *distributions: str) -> None:
        run([*_PIP, "--python", self.python, "uninstall", "--yes", *distributions], cwd=self.folder)

    def call(self, function: Callable, *arguments: object, cwd: Path | None = None, **variables: str):
        """What a test module's function returns in a new process of this environment; arguments and result pass as JSON.

        cwd: where it runs; None: beside the packages. variables: environment variables. A warning is an error there.
        """
        code = (
            f"import json, sys, {function.__module__} as module\n"
            f"print(json.dumps(module.{function.__name__}(*json.loads(sys.argv[1]))))"
        )
        command = [self.python, "-W", "error", "-c", code, json.dumps(arguments)]
        variables = {"PYTHONPATH": str(ROOT / "tests")} | variables
        return json.loads(run(command, cwd=cwd or self.folder, **variables).stdout.splitlines()[-1])


def run(command: list, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess:
    """Run a command that must succeed; of Python's, pip's and ktmoe's environment variables it has these alone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KTMOE_", "PIP_", "PYTHON"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done
