"""The peers: what to install for each, and its ways to run the experts. ktmoe's own ways are found out at run time."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

#: A way's numerics, and the error that they explain: see check.py.
BF16, INT8 = "bf16", "int8"


@dataclass(frozen=True)
class Way:
    """numerics: of x and h. bits: of memory for a weight, in all copies that it has for its settings."""

    name: str
    numerics: str
    bits: float = 4.25


@dataclass(frozen=True)
class Peer:
    """name: of its environment. installs: pip's arguments, one command each. notes: what it cannot do, and why."""

    name: str
    title: str
    worker: str
    installs: tuple[tuple[str, ...], ...]
    ways: tuple[Way, ...]
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


TORCH = "torch==2.13.0"
PEERS = (
    Peer(
        "kt-kernel",
        "kt-kernel",
        "worker_kt_kernel.py",
        # alone, since it would bring another torch, triton and a command line
        (("numpy", TORCH, "safetensors", "gguf"), ("--no-deps", "kt-kernel==0.7.2")),
        (Way("MXFP4", BF16, 9), Way("BF16", BF16, 16)),
        notes=("kt-kernel's LLAMAFILE class is left out: the extension's ggml_type ends at BF16, and MXFP4 tensors crash it",),
    ),
    Peer(
        "ggml",
        "ggml",
        "worker_ggml.py",
        (("numpy",), ("--no-deps", "llama-cpp-python==0.3.36")),
        (Way("repack", INT8), Way("plain", INT8)),
        # for the build of its sdist: neither multimodal models nor more compilers than CPUs
        {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0)))},
        notes=("ggml's buffer type AMX is left out: it has no MXFP4 and no mul_mat_id",),
    ),
    Peer(
        "torch",
        "torch",
        "worker_torch.py",
        (("numpy", TORCH, "transformers==5.23.0"),),
        (Way("BF16", BF16, 16),),
    ),
)
