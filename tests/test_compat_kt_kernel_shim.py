"""The module kt_kernel of extras/: never there by itself, and what an unchanged caller finds once it was asked for."""

import os
import subprocess
import sys

from environments import ROOT, Environment, run
from kt_wrappers import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, write

SHIM = ROOT / "extras" / "kt_kernel_shim"
ABSENT = "import importlib.util; print(importlib.util.find_spec('kt_kernel'))"
CALLER = f"""
import logging
import sys
import numpy
logging.basicConfig(level=logging.INFO, format="%(message)s")
try:
    from kt_kernel import KTMoEWrapper, generate_gpu_experts_masks
    AVAILABLE = True
except ImportError:
    AVAILABLE = False
assert AVAILABLE
import kt_kernel
assert kt_kernel.__version__.startswith("0.7.2")
mask = generate_gpu_experts_masks(numpy.ones((1, {EXPERTS})), 2)[0]
wrapper = KTMoEWrapper(
    layer_idx=0, num_experts={EXPERTS}, num_experts_per_tok={TOP_K}, hidden_size={HIDDEN}, moe_intermediate_size={INTERMEDIATE},
    gpu_experts_mask=mask, cpuinfer_threads=2, threadpool_count=1, weight_path=sys.argv[1], chunked_prefill_size=64,
    method="MXFP4", max_deferred_experts_per_token=0,
)
wrapper.load_weights(numpy.arange({EXPERTS}))
x = numpy.ones((2, {HIDDEN}), numpy.float32)
ids = numpy.array([[0, 1, 0, 1], [2, 3, 4, 5]])
y = wrapper.forward(x, ids, numpy.ones((2, 4), numpy.float32), None)
from kt_kernel.experts import SFT_METHODS
from kt_kernel.sft import AMXSFTMoEWrapper, BaseSFTMoEWrapper
tuned = AMXSFTMoEWrapper(0, {EXPERTS}, {TOP_K}, {HIDDEN}, {INTERMEDIATE}, 0, 2, 1, sys.argv[1], 64, method="MXFP4_SFT")
assert isinstance(tuned, BaseSFTMoEWrapper) and len(SFT_METHODS) == 16
print(y[0].any(), y[1].any(), "torch" in sys.modules)
"""


def python(*arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    command = [sys.executable, "-W", "error", "-c", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_not_there_unless_asked_for():
    done = python("import ktmoe; " + ABSENT)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_a_caller_finds_it(tmp_path):
    write("MXFP4", tmp_path)
    done = python(CALLER, tmp_path, PYTHONPATH=os.pathsep.join([str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])]))
    assert (done.stdout, done.stderr) == ("False True False\n", "experts on the CPU are computed by ktmoe\n")  # once


def test_its_distribution(tmp_path):
    """Installed, and taken away again."""
    environment, wheels = Environment(tmp_path / "environment"), tmp_path / "wheels"
    project = tmp_path / "project"
    project.mkdir()
    for file in ("pyproject.toml", "kt_kernel.py"):
        (project / file).write_text((SHIM / file).read_text())
    environment.wheel(project, wheels)
    environment.install(*wheels.glob("ktmoe_kt_kernel-*.whl"))
    code = "import kt_kernel.sft; print(kt_kernel.KTMoEWrapper.__module__)"
    assert run([environment.python, "-c", code]).stdout == "ktmoe.compat.kt_kernel\n"
    assert [path.name for path in environment.site.glob("kt_kernel*")] == ["kt_kernel.py"]
    environment.uninstall("ktmoe-kt-kernel")
    assert run([environment.python, "-c", ABSENT]).stdout == "None\n"
