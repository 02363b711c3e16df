"""Whether ktmoe or vLLM computes a dense layer in bfloat16: by what `make bench-vllm` has measured, or as the user says."""

from __future__ import annotations

import math
import os

from ktmoe.backends.choice import choose_backend
from ktmoe.errors import UnknownNameError
from ktmoe.linear_weights import LinearWeights
from ktmoe.matrix import Matrix
from ktmoe.weights.formats import BF16, WeightFormat

#: auto: by SMALLEST. all: ktmoe computes every dense layer that it can. quantized: only those whose checkpoint is quantized.
#: none: vLLM computes all of them.
SWITCH = "KTMOE_VLLM_DENSE"
MODES = ("auto", "all", "quantized", "none")
#: Bytes of a matrix from which on ktmoe is faster with 1 to 64 tokens, by the backend that computes it. Other backends were not
#: measured: vLLM keeps such layers.
SMALLEST = {"avx512_bf16": 1 << 19, "fp32_lut": 1 << 19, "avx2": 1 << 17}


def mode() -> str:
    """The user's. Raises UnknownNameError for another one."""
    found = os.environ.get(SWITCH) or "auto"
    if found not in MODES:
        raise UnknownNameError(f"{SWITCH} must be one of {', '.join(MODES)}, found {found!r}")
    return found


def is_faster(n: int, k: int) -> bool:
    """Whether ktmoe computes a matrix [n, k] of bfloat16."""
    if (chosen := mode()) != "auto":
        return chosen == "all"
    return 2 * n * k >= SMALLEST.get(backend_of(BF16, (n, k)), math.inf)


def backend_of(weight_format: WeightFormat, shape: tuple[int, int]) -> str:
    """The backend that computes such a matrix [n, k]. Raises UnavailableError if none does."""
    return choose_backend("auto", LinearWeights.of_headers("", weight_format, shape, _unread), "auto").name


def _unread() -> Matrix:
    raise AssertionError("the matrix is asked for before there are weights")
