"""The rule of skips.py: a skip that nobody allowed is a failure; and what the summary says of each backend."""

import os
import subprocess
import sys
from pathlib import Path

import skips
import ways

TESTS = """
import pytest
def test_passes(): pass
@pytest.mark.skip(reason="objdump is not installed")
def test_allowed(): pass
@pytest.mark.skipif(True, reason="it is Tuesday")
def test_mark(): pass
def test_call(): pytest.skip("no such kernel")
@pytest.fixture
def backend(): pytest.skip("avx512_bf16 was not compiled into this build (no module)")
def test_fixture(backend): pass
def test_import(): pytest.importorskip("not_a_module")
@pytest.mark.parametrize("case", [])
def test_empty(case): pass
@pytest.mark.xfail(reason="known")
def test_xfail(): assert False
"""


def run_pytest(folder, *files):
    environment = os.environ | {"PYTHONPATH": str(Path(skips.__file__).parent)}
    alone = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "skips", *alone, *files]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_an_unexpected_skip_fails(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    result = run_pytest(tmp_path, "test_some.py")
    assert result.returncode == 1
    assert "2 failed, 1 passed, 1 skipped, 1 xfailed, 3 errors" in result.stdout
    assert "tests/skips.py does not allow: it is Tuesday" in result.stdout
    assert "tests/skips.py does not allow: avx512_bf16 was not compiled" in result.stdout


def test_a_file_that_skips_itself_fails(tmp_path):
    (tmp_path / "test_whole.py").write_text("import pytest\npytest.skip('not today', allow_module_level=True)\n")
    (tmp_path / "test_other.py").write_text("def test_passes(): pass\n")
    result = run_pytest(tmp_path, "test_whole.py", "test_other.py")
    assert result.returncode != 0
    assert "tests/skips.py does not allow: not today" in result.stdout


def test_the_portable_backend_runs_everywhere():
    """What no machine may skip."""
    assert ways.WAYS["portable"] == "native"
    assert "fp32_lut-portable" in ways.SUBJECTS


def test_every_way_is_one_that_may_be():
    for way in ways.WAYS.values():
        assert way in ("native", "emulated") or skips.allowed(way.removeprefix("skipped: "))
