"""What the writers' scripts share. It runs in their environments: it needs numpy alone."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

TOKENS, TOP_K = 5, 2


def main(cases: Mapping[str, Callable[[Path], dict[str, np.ndarray]]]) -> None:
    """Makes a folder for each case. A case writes its files there, and returns the arrays of expected.npz."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    for name, write in cases.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        try:
            np.savez(folder / "expected.npz", **write(folder))
        except Exception:
            (folder / "error").write_text(traceback.format_exc())


def routed(hidden: int, experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [tokens, hidden], ids and router weights [tokens, top_k]: float64 of few bits, int64, float64 of float32 numbers.

    A token has an expert once.
    """
    random = np.random.default_rng(1)
    x = random.integers(-127, 128, (TOKENS, hidden)) / 64  # bfloat16 numbers
    ids = np.stack([random.permutation(experts)[:TOP_K] for _ in range(TOKENS)])
    return x, ids, random.uniform(0.1, 0.9, ids.shape).astype(np.float32).astype(np.float64)


#: The sizes of the experts that quantizers write.
EXPERTS, HIDDEN, INTERMEDIATE = 2, 256, 128
STEMS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def experts(dtype=None):
    """A torch module whose linear maps are called model.layers.0.mlp.experts.{E}.{gate,up,down}_proj, with normal weights."""
    import torch
    from torch.nn import Linear, ModuleDict, ModuleList

    def expert() -> ModuleDict:
        shapes = {"gate": (HIDDEN, INTERMEDIATE), "up": (HIDDEN, INTERMEDIATE), "down": (INTERMEDIATE, HIDDEN)}
        made = {STEMS[projection]: Linear(*shape, bias=False, dtype=dtype) for projection, shape in shapes.items()}
        for linear in made.values():
            torch.nn.init.normal_(linear.weight)
        return ModuleDict(made)

    torch.manual_seed(1)
    layer = ModuleDict({"mlp": ModuleDict({"experts": ModuleList([expert() for _ in range(EXPERTS)])})})
    return ModuleDict({"model": ModuleDict({"layers": ModuleList([layer])})})


def linears(module) -> dict[str, object]:
    """The linear modules of experts(), by "{E}.{projection}"."""
    return {
        f"{number}.{projection}": expert[stem]
        for number, expert in enumerate(module["model"]["layers"][0]["mlp"]["experts"])
        for projection, stem in STEMS.items()
    }


def save(folder: Path, tensors: Mapping[str, object], quantization_config: Mapping | None = None) -> None:
    """tensors: torch's, by name."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    stated = {"hidden_act": "silu", "num_experts": EXPERTS}
    if quantization_config is not None:
        stated["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(stated))
