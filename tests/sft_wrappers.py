"""What the tests of KTMoEWrapper's mode "sft" share: wrappers on small checkpoints, adapters and batches."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from helpers import BF16
from kt_wrappers import write

from ktmoe import load_experts, synthetic
from ktmoe.compat import weights
from ktmoe.compat.kt_kernel import KTMoEWrapper
from ktmoe.compat.sft_lora import NAMES
from ktmoe.quantization import quantize
from ktmoe.training import Lora

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, RANK, ALPHA = 8, 4, 128, 128, 4, 6.0
#: method -> what writes such a checkpoint, and how its weights are rounded.
METHODS = {
    "AMXBF16_SFT": ("BF16", None),
    "AMXFP8_SFT": ("FP8", None),
    "MXFP4_SFT": ("MXFP4", None),
    "RAWINT4_SFT": ("RAWINT4", None),
    "AMXINT4_KGroup_SFT": ("RAWINT4", None),
    "INT8_SFT": ("BF16", ("int8", "amxint8")),
    "AMXINT8_SFT": ("BF16", ("int8", "amxint8")),
    "AMXINT4_SFT": ("BF16", ("int4", "amxint4")),
}
SKIPS = [f"{method}_SkipLoRA" for method in ("AMXBF16_SFT", "AMXINT8_SFT", "AMXINT4_SFT", "AMXINT4_KGroup_SFT")]


def checkpoint(method: str, folder):
    """The folder of a checkpoint whose weights a method takes."""
    kind = METHODS[method.removesuffix("_SkipLoRA")][0]
    if kind == "FP8":
        sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K}
        synthetic.write_fp8(folder, layers=1, **sizes)
        return folder
    return write(kind, folder)


def experts_of(method: str, folder):
    """The checkpoint's experts as the method has them."""
    experts, rounds = load_experts(folder, 0), METHODS[method.removesuffix("_SkipLoRA")][1]
    return experts if rounds is None else quantize(experts, rounds[0], rule=rounds[1])


def arguments(**changed) -> dict:
    """The arguments that kt-kernel's torch layers give."""
    return {
        "layer_idx": 0,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "gpu_experts_mask": None,
        "num_gpu_experts": 0,
        "cpuinfer_threads": 2,
        "threadpool_count": 1,
        "weight_path": "",
        "chunked_prefill_size": 4,
        "method": "MXFP4_SFT",
        "mode": "sft",
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "group_size": 32,
        "zero_point": False,
    } | changed


def matrices(seed: int = 0, rank: int = RANK) -> dict[str, np.ndarray]:
    """The matrices of an adapter, bfloat16, by NAMES."""
    rng = np.random.default_rng(seed)
    shapes = {"a": lambda n, k: (EXPERTS, rank, k), "b": lambda n, k: (EXPERTS, n, rank)}
    sizes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    made = {}
    for name in NAMES:
        projection, letter = name.split("_")[0], name[-1]
        made[name] = (0.1 * rng.standard_normal(shapes[letter](*sizes[projection]))).astype(BF16)
    return made


def lora(tensors: dict[str, np.ndarray], alpha: float = ALPHA) -> Lora:
    return Lora({p: (tensors[f"{p}_lora_a"], tensors[f"{p}_lora_b"]) for p in ("gate", "up", "down")}, alpha)


def dirty(tensors: dict) -> dict:
    """Gradient buffers that hold something."""
    return {name: np.full_like(tensor, np.nan) for name, tensor in tensors.items()}


def gradient(seed=0, tokens=5):
    return np.random.default_rng(seed + 100).standard_normal((tokens, HIDDEN)).astype(BF16)


def wrapper(folder, method: str = "MXFP4_SFT", tensors=None, gradients=None, **changed):
    """A wrapper with its weights, and an adapter if there are tensors."""
    made = KTMoEWrapper(**arguments(weight_path=str(folder), method=method, **changed))
    made.load_weights()
    if tensors is not None:
        made.init_lora_weights(*tensors.values(), *(gradients or dirty(tensors)).values())
    return made


@pytest.fixture
def nothing_is_leased():
    """Each test closes or drops its wrappers; then no checkpoint is open."""
    yield
    gc.collect()
    assert weights.Lease.leased == {}
