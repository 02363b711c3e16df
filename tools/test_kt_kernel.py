"""test_kt_kernel.py [pytest's arguments]: runs the tests that compare ktmoe with kt-kernel, which it installs in .venv-peers.

And, as torch is there, those that need torch. Ends well, and says why nothing was compared, where kt-kernel cannot be installed
or does not start.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peers import environments  # noqa: E402
from bench.peers.peers import PEERS  # noqa: E402

TESTS = (
    "original",
    "test_sglang_layer.py",
    "test_torch.py",
    "test_torch_experts.py",
    "test_torch_linear.py",
    "test_torch_embedding.py",
    "test_compat_kt_kernel_torch.py",
    "test_compat_kt_kernel_sft_torch.py",
    "test_two_stage_torch.py",
)
#: What prints its version if the extension for this CPU can be loaded.
STARTS = "import importlib.metadata, kt_kernel; print(importlib.metadata.version('kt-kernel'), kt_kernel.__cpu_variant__)"


def main(arguments: list[str]) -> int:
    peer = next(peer for peer in PEERS if peer.name == "kt-kernel")
    try:
        interpreter = environments.python(peer, lambda text: print(f"ktmoe: {text}", flush=True))
    except environments.SetUpError as error:
        return nothing(str(error))
    started = subprocess.run([interpreter, "-c", STARTS], capture_output=True, text=True, check=False)
    if started.returncode:
        return nothing(f"it does not start: {(started.stderr.strip().splitlines() or [f'exit code {started.returncode}'])[-1]}")
    print(f"ktmoe: comparing with kt-kernel {started.stdout.strip().splitlines()[-1]}", flush=True)
    os.environ["KTMOE_TEST_KT_KERNEL"] = str(interpreter)
    # at the end, so that of what both environments have this one's counts
    sys.path.append(str(environments.packages(environments.TORCH)))
    os.chdir(ROOT)
    return pytest.main(["-q", "--exhaustive", *(f"tests/{name}" for name in TESTS), *arguments])


def nothing(reason: str) -> int:
    print(f"ktmoe: nothing was compared with kt-kernel: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
