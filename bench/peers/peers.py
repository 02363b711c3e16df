"""The peers: what to install for each, and its ways to run the experts. ktmoe's own ways are found out at run time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.peers.environments import TORCH, Environment
from bench.peers.formats import GGUF
from ktmoe.weights.ggml import TYPES

#: A way's numerics, and the error that they explain: see check.py.
BF16, INT8, INT8_PER_256 = "bf16", "int8", "int8, per 256"


#: The package whose source has llama.cpp, and ggml in it.
LLAMA_CPP = "llama-cpp-python==0.3.36"
#: For CMake: no more compilers than CPUs.
PARALLEL = {"CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0)))}


@dataclass(frozen=True)
class Way:
    """numerics: of x and h. bits: of memory for a weight, in all copies that it has for its settings."""

    name: str
    numerics: str
    bits: float


@dataclass(frozen=True)
class Peer(Environment):
    """worker: the script that its interpreter runs. ways: by the format of the weights. notes: what it cannot do, and why."""

    worker: str = ""
    ways: Mapping[str, tuple[Way, ...]] = field(default_factory=dict)
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_DEQUANTISED = Way("BF16", BF16, 16)
_ROUNDED = "weights that a peer has in bfloat16 are rounded to it: a code times its scale has more bits"

#: The types of GGUF whose rows ggml interleaves on x86-64. It does so with Q2_K if it was built for AVX-512; else the worker
#: says that it cannot.
_REPACKED = ("Q2_K", "Q4_K")


def _of_gguf(name: str) -> tuple[Way, ...]:
    """ggml's ways for records of a GGUF type, which it takes as they are."""
    of = next(of for of in TYPES.values() if of.name == name)
    ways = ("repack", "plain") if name in _REPACKED else ("plain",)
    return tuple(Way(way, INT8_PER_256, 8 * of.nbytes / of.weights) for way in ways)


PEERS = (
    Peer(
        "kt-kernel",
        "kt-kernel",
        # alone, since it would bring another torch, triton and a command line
        (("--no-deps", "kt-kernel==0.7.2"),),
        base=TORCH,
        worker="worker_kt_kernel.py",
        ways={
            "MXFP4": (Way("MXFP4", BF16, 9), _DEQUANTISED),
            "BF16": (_DEQUANTISED,),
            "FP8": (Way("FP8", BF16, 16),),
            "INT4": (Way("INT4", INT8, 9),),
            "GGUF Q4_K": (),
        },
        notes={
            "MXFP4": (
                "kt-kernel's LLAMAFILE class is left out: the extension's ggml_type ends at BF16, and MXFP4 tensors crash it",
            ),
            "INT4": ("kt-kernel's AVX2RawInt4_MOE is left out: its first call ends with a segmentation fault",),
            "GGUF Q4_K": (
                "kt-kernel's LLAMAFILE class is left out: driven as its other classes are, it ends with a segmentation fault",
            ),
        },
    ),
    Peer(
        "ggml",
        "ggml",
        (("numpy",), ("--no-deps", LLAMA_CPP)),
        # for the build of its sdist: neither multimodal models nor more compilers than CPUs
        {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF", **PARALLEL},
        worker="worker_ggml.py",
        ways={
            "MXFP4": (Way("repack", INT8, 4.25), Way("plain", INT8, 4.25)),
            "BF16": (_DEQUANTISED,),
            "FP8": (_DEQUANTISED,),
            "INT4": (Way("repack", INT8, 4.5), Way("plain", INT8, 4.5)),
            **{f"GGUF {name}": _of_gguf(name) for name in GGUF},
        },
        notes={
            "MXFP4": ("ggml's buffer type AMX is left out: it has no MXFP4 and no mul_mat_id",),
            "FP8": ("ggml has no FP8, so that it has BF16", _ROUNDED),
            "INT4": ("ggml has INT4 as Q4_0, whose float16 scales are the same numbers",),
            **{f"GGUF {name}": (f"ggml's repack has no {name} on x86-64",) for name in GGUF if name not in _REPACKED},
        },
    ),
    Peer(
        TORCH.name,
        TORCH.title,
        TORCH.installs,
        worker="worker_torch.py",
        ways={
            "MXFP4": (_DEQUANTISED,),
            "BF16": (_DEQUANTISED,),
            "FP8": (_DEQUANTISED,),
            "INT4": (_DEQUANTISED, Way("INT4", BF16, 4.5)),
            "GGUF Q4_K": (_DEQUANTISED,),
        },
        notes={
            "FP8": ("torch's _scaled_mm for CPUs is left out: it wants activations in FP8, too, and one scale a row", _ROUNDED),
            "INT4": (_ROUNDED,),
            "GGUF Q4_K": (_ROUNDED,),
        },
    ),
)

#: llama-cpp-python's own module, of which the peer ggml has the libraries alone: what importing it needs.
LLAMA = Environment(
    "llama",
    "llama.cpp",
    (("diskcache", "jinja2", "typing_extensions"),),
    base=next(peer for peer in PEERS if peer.name == "ggml"),
)

_SOURCE = LLAMA_CPP.replace("-", "_").replace("==", "-")
_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",  # one file, which can be moved
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",  # building the web page needs npm, and the built one is downloaded
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
#: llama.cpp's server, for this CPU and with OpenMP where there is one, as the peer ggml: both are llama.cpp's defaults.
LLAMA_SERVER = Environment(
    "llama-server",
    "llama.cpp's server",
    (("cmake", "ninja"),),
    PARALLEL,
    builds=(
        # describing the package needs its build system, but builds nothing
        ("python", "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", LLAMA_CPP),
        ("python", "-m", "tarfile", "-e", f"{_SOURCE}.tar.gz", "source"),
        (
            *("cmake", "-G", "Ninja", "-S", f"source/{_SOURCE}/vendor/llama.cpp", "-B", "made"),
            *(f"-D{name}={value}" for name, value in _OPTIONS.items()),
        ),
        ("cmake", "--build", "made", "--target", "llama-server"),
        ("cmake", "-E", "copy", "made/bin/llama-server", "bin/llama-server"),
        ("cmake", "-E", "rm", "-r", "made", "source", f"{_SOURCE}.tar.gz"),
    ),
)
