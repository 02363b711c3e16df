"""The CUDA runtime that KTMoEWrapper finds for CUDA graphs: every version, what may be missing, and a process that ends.

The runtimes are stand-ins (fake_cuda/) with the names of CUDA 11.2, 11.8, 12 and 13.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT
from fake_cuda.torch import Torch
from helpers import same_bits
from kt_graphs import Captured, on_device, value
from kt_wrappers import batch, eventually, wrapper

from ktmoe.compat import cuda_runtime
from ktmoe.compat.engine import ENGINE
from ktmoe.errors import UnavailableError

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def torch_on(fake_runtimes, fake_torch, monkeypatch):
    """Makes a torch on one of the runtimes; then it is the one that is imported and loaded."""

    def make(*which):
        made = Torch(fake_runtimes(*which))
        monkeypatch.setitem(sys.modules, "torch", made)
        monkeypatch.setattr(cuda_runtime, "loaded", lambda: [str(made.runtime.path)])
        return made

    return make


@pytest.mark.parametrize("version", [1102, 11, 12, 13])
def test_a_version(torch_on, folder, version):
    """CUDA 11.2 cannot say that a graph is gone: what it had is kept. Others give it back."""
    torch = torch_on(version)
    with wrapper(folder) as w:
        captured = Captured(torch, [w], [batch()])
        assert same_bits(captured.run([batch(1)])[0], w.forward(*batch(1)))
        pinned = torch.runtime.pinned()
        del captured
        if version == 1102:
            w.forward(*batch())
            assert len(ENGINE.captures.live) == 1
            ENGINE.captures.live.clear()  # so that nothing is left of this test
        else:
            assert eventually(lambda: (w.forward(*batch()), torch.runtime.pinned() < pinned)[1])
    assert torch.runtime.violations() == ""


def test_a_function_that_is_missing(torch_on, folder):
    torch = torch_on(12, "cudaLaunchHostFunc")
    with wrapper(folder) as w:
        with pytest.raises(UnavailableError, match=rf"{torch.runtime.path} has no cudaLaunchHostFunc"):
            Captured(torch, [w], [batch()])
        tensors = on_device(torch, batch())
        assert same_bits(value(w.forward(*tensors, 0)), w.forward(*batch()))  # which needs no such function


#: A process that loads a runtime, captures a graph of two layers, puts replays into a stream, and ends in one of several ways.
#: What was registered before the first capture runs after what that registered: it goes on using CUDA.
PROCESS = """
import atexit, os, sys, threading, time
library, folder, ending = sys.argv[1:]
from pathlib import Path
from fake_cuda.runtime import Runtime
from fake_cuda.torch import Torch
torch = sys.modules["torch"] = Torch(Runtime(Path(library)))
from kt_graphs import Captured, stack, value
from kt_wrappers import batch
from helpers import same_bits

def later():
    for _ in range(20):
        captured.graph.replay()
    if ending == "waits":
        stream.synchronize()

atexit.register(later)
wrappers = stack(folder, (2, 0))
expected = [w.forward(*batch(index)) for index, w in enumerate(wrappers)]
captured = Captured(torch, wrappers, [batch(0), batch(1)])
captured.graph.replay()
assert all(same_bits(value(y), e) for y, e in zip(captured.outputs, expected))
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    for _ in range(300):
        captured.graph.replay()
print("ready", flush=True)
if ending == "a thread launches":
    def launch():
        with torch.cuda.stream(torch.cuda.Stream()):
            while True:
                captured.graph.replay()
                time.sleep(0.0005)
    threading.Thread(target=launch, daemon=True).start()
    time.sleep(0.02)
"""


@pytest.mark.parametrize("ending", ["waits", "a thread launches"])
def test_a_process_that_ends_while_replays_run(fake_runtime, folder, tmp_path, ending):
    """Its runtime has the name of CUDA's, by which ktmoe finds it."""
    library = Path(shutil.copy(fake_runtime.path, tmp_path / "libcudart.so.12"))
    command = [sys.executable, "-c", PROCESS, library, folder, ending]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")


def test_the_runtime_that_torch_has(torch_on, monkeypatch):
    """Where a process has several, it is that of torch's version."""
    torch = torch_on(13)
    monkeypatch.setattr(cuda_runtime, "loaded", lambda: ["/a/libcudart.so.12", "/b/libcudart.so.13", "/c/libcudart.so.11.0"])
    monkeypatch.setattr(cuda_runtime, "opened", lambda path: path)
    for version, path in (("13.0", "/b/libcudart.so.13"), ("11.8", "/c/libcudart.so.11.0"), ("12.4", "/a/libcudart.so.12")):
        torch.version.cuda = version
        assert cuda_runtime.find() == path
