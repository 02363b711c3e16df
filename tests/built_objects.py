"""The objects that the build linked, as objdump shows them.

They are under build/native. Where nothing was built in this checkout, objdump finds no files, and tests of them fail.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from environments import ROOT

from ktmoe._native import isa

#: What every CPU runs has these folders, the second one of this Python; those of the instruction sets are named as they are.
DRIVER, PYTHON = "driver", f"python/{sysconfig.get_config_var('SOABI')}"


def objects(folder: str) -> list[str]:
    """The files of a folder of build/native, relative to that, one for each source: what else lies there is of older builds."""
    native = Path(isa.__file__).parent
    if folder == DRIVER:
        return [f"{DRIVER}/{room}/{file.stem}.o" for room in isa.DRIVER for file in sorted((native / room).glob("*.c"))]
    if folder == PYTHON:
        return [f"{PYTHON}/python/core.o"]
    return [f"{folder}/kernels/{source}.o" for source in isa.sources(folder)]


def objdump(*options: str, files: list[str]) -> str:
    if not shutil.which("objdump"):
        pytest.skip("objdump is not installed")
    done = subprocess.run(["objdump", *options, *files], cwd=ROOT / "build/native", capture_output=True, text=True, check=True)
    return done.stdout
