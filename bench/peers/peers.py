"""The peers: what to install for each, and its ways to run the experts. ktmoe's own ways are found out at run time."""

from __future__ import annotations

import os
from dataclasses import dataclass

from bench.peers.environments import TORCH, Environment

#: A way's numerics, and the error that they explain: see check.py.
BF16, INT8 = "bf16", "int8"


@dataclass(frozen=True)
class Way:
    """numerics: of x and h. bits: of memory for a weight, in all copies that it has for its settings."""

    name: str
    numerics: str
    bits: float = 4.25


@dataclass(frozen=True)
class Peer(Environment):
    """worker: the script that its interpreter runs. notes: what it cannot do, and why."""

    worker: str = ""
    ways: tuple[Way, ...] = ()
    notes: tuple[str, ...] = ()


PEERS = (
    Peer(
        "kt-kernel",
        "kt-kernel",
        # alone, since it would bring another torch, triton and a command line
        (("--no-deps", "kt-kernel==0.7.2"),),
        base=TORCH,
        worker="worker_kt_kernel.py",
        ways=(Way("MXFP4", BF16, 9), Way("BF16", BF16, 16)),
        notes=("kt-kernel's LLAMAFILE class is left out: the extension's ggml_type ends at BF16, and MXFP4 tensors crash it",),
    ),
    Peer(
        "ggml",
        "ggml",
        (("numpy",), ("--no-deps", "llama-cpp-python==0.3.36")),
        # for the build of its sdist: neither multimodal models nor more compilers than CPUs
        {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0)))},
        worker="worker_ggml.py",
        ways=(Way("repack", INT8), Way("plain", INT8)),
        notes=("ggml's buffer type AMX is left out: it has no MXFP4 and no mul_mat_id",),
    ),
    Peer(TORCH.name, TORCH.title, TORCH.installs, worker="worker_torch.py", ways=(Way("BF16", BF16, 16),)),
)
