"""Other projects' writers, each run once in an environment of its own: tools/test_writers.py installs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

#: The folder of the environments; read at import, since the suite clears such variables.
ENVIRONMENTS = os.environ.get("KTMOE_TEST_WRITERS")
PATIENCE_SECONDS = 300


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """(environment, script, what it prints to NAMES) -> a folder in which the script has made one for each of its cases.

    Skips if the environment is not there. Fails if the script does.
    """
    folders = {}

    def write(environment: str, script: str) -> Path:
        home = Path(ENVIRONMENTS or "none") / environment
        if not (home / "installed").exists():
            pytest.skip(f"{environment} is not installed: make test-writers")
        if script not in folders:
            folders[script] = tmp_path_factory.mktemp(script)
            command = [home / "bin" / "python", Path(__file__).with_name(f"write_{script}.py"), folders[script]]
            shared = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}  # tiny_models.py
            done = subprocess.run(command, env=shared, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
            (folders[script] / "log").write_text(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return folders[script]

    return write


@pytest.fixture
def case(written):
    """(environment, script, case) -> the folder of that case. Fails with what the writer said if it could not write it."""

    def folder(environment: str, script: str, name: str) -> Path:
        found = written(environment, script) / name
        if not (found / "expected.npz").exists():
            error, log = found / "error", found.parent / "log"
            pytest.fail(f"{environment} did not write {name}: {(error if error.exists() else log).read_text()[-3000:]}")
        return found

    return folder
