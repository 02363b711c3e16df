"""A scheduler of SGLang's: its module imports kt_kernel before its function loads plug-ins. The wheel's own, all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT

#: What multiprocessing does in a new process: import the function's module, call it. It ends at arguments that say nothing.
SCHEDULER = """
import json, sys
import sglang_edges
sglang_edges.stand_in(fork=False)
from sglang.srt.managers.scheduler import run_scheduler_process
modules = [sys.modules[name] for name in sys.argv[1:]]
before = [module.KTRANSFORMERS_AVAILABLE for module in modules]
try:
    run_scheduler_process(None, None, 0, 0, 0, None, None)
except AttributeError:
    pass
after = [module.KTRANSFORMERS_AVAILABLE for module in modules]
print(json.dumps([before, after, [getattr(module, "KTMoEWrapper", object).__module__ for module in modules]]))
"""
MODULES = ("sglang.srt.layers.moe.kt_ep_wrapper", "sglang.srt.model_executor.runner.decode_cuda_graph_runner")


@pytest.fixture
def distribution(tmp_path) -> Path:
    """A folder with what says that ktmoe is installed: its entry point."""
    import tomllib

    ((name, value),) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "sglang.srt.plugins"
    ].items()
    info = tmp_path / "ktmoe_here-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ktmoe-here\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {value}\n")
    return tmp_path


@pytest.mark.smoke
def test_a_scheduler(distribution):
    path = [str(ROOT), str(ROOT / "tests" / "in_sglang"), str(distribution)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-W", "ignore", "-c", SCHEDULER, *MODULES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[False, False], [True, True], ["ktmoe.compat.kt_kernel"] * 2]
