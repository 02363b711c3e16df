"""Processes and interpreters that Python itself makes: pools of multiprocessing in each way, and a second interpreter."""

import subprocess
import sys

import pytest

from ktmoe import synthetic

POOL = """
import multiprocessing, sys
import numpy as np

def compute(folder):
    import ktmoe
    with ktmoe.MoELayer.from_checkpoint(folder, 0) as layer:
        x = np.random.default_rng(1).standard_normal((5, layer.hidden)).astype(np.float32)
        ids, weights = np.arange(10).reshape(5, 2) % layer.num_experts, np.ones((5, 2), np.float32)
        job = layer.submit(x, ids, weights)
        return layer.forward(x, ids, weights).tobytes() + job.result().tobytes()

if __name__ == "__main__":
    expected = compute(sys.argv[2])
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        assert pool.map(compute, [sys.argv[2]] * 4, chunksize=1) == [expected] * 4
    assert compute(sys.argv[2]) == expected
"""
SECOND = """
import sys, warnings
warnings.simplefilter("ignore")
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import ktmoe
second = interpreters.create()
interpreters.run_string(second, '''
try:
    import ktmoe
except ImportError as error:
    print("ImportError", flush=True)
''')
interpreters.destroy(second)
ktmoe.set_num_threads(1)
print(ktmoe.get_num_threads())
"""


@pytest.mark.exhaustive
def test_pools_of_processes(repeat, tmp_path):
    """The parent computes before and after; with fork the children have its layers' threads no more."""
    synthetic.write_deepseek_v4(tmp_path, layers=1, num_experts=4, hidden=128, intermediate=128)
    program = tmp_path / "pool.py"
    program.write_text(POOL)
    for number in repeat("pools of two processes", 30):
        method = ("fork", "spawn", "forkserver")[number % 3]
        command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", program, method, tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), method


@pytest.mark.exhaustive
def test_a_second_interpreter():
    """numpy refuses to be imported there, and ktmoe with it; the first one goes on."""
    done = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ImportError\n1\n", "")
