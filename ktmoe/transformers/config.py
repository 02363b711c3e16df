"""ktmoe's quantization_config for transformers."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers.quantizers import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ktmoe.distributed.layer import Distribution
from ktmoe.errors import InputError
from ktmoe.messages import show
from ktmoe.transformers.function import NAME
from ktmoe.transformers.gpu_experts import read
from ktmoe.transformers.options import Options

#: Where the experts are taken from.
SOURCES = ("auto", "checkpoint", "parameters")


@register_quantization_config(NAME)
class Config(QuantizationConfigMixin):
    """A quantization_config for from_pretrained(): ktmoe computes the routed experts and the dense matrices.

    backend, activations, rounding, tuned_for, threads, numa_nodes, gpu_experts, progress, cache, dense,
    distributed: as ktmoe.transformers.load() has them. distributed is a Distribution or None, and what load() does to all
    processes besides, one seed and one end of loading, is the caller's.
    source: "checkpoint": ktmoe's loaders read the experts' own weights from the checkpoint's files. "parameters": transformers
    reads them in any naming that it knows, layer by layer, and ktmoe packs them; they must be bfloat16. "auto": the first, and
    the second where no loader reads an unquantized checkpoint.
    experts: another checkpoint of the same model, of which ktmoe reads the routed experts, as load() has it.
    path: the checkpoint of which ktmoe reads weights; None: where transformers finds its files. If the experts cannot be taken
    from there, loading raises why. inner: the checkpoint's own quantization_config, by which transformers reads the rest of the
    model. Those two are for a config.json that names ktmoe as its quant_method.
    Raises InputError.

    Examples:
        >>> config = ktmoe.transformers.Config(activations="bf16", dense="torch")
        >>> model = transformers.AutoModelForCausalLM.from_pretrained("Qwen3-30B-A3B", quantization_config=config)
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        activations: str = "auto",
        rounding: str = "exact",
        tuned_for: str = "decode",
        threads: int | None = None,
        numa_nodes: Sequence[int] | None = None,
        gpu_experts: np.ndarray | Sequence[Any] | int | None = None,
        progress: Any = None,
        source: str = "auto",
        cache: str | os.PathLike[str] | None = None,
        dense: str = "packed",
        distributed: Distribution | None = None,
        experts: str | os.PathLike[str] | None = None,
        path: str | os.PathLike[str] | None = None,
        inner: dict[str, Any] | None = None,
        quant_method: str = NAME,
    ):
        if source not in SOURCES:
            raise InputError(f"source must be one of {SOURCES}, found {show(source)}")
        self.quant_method = quant_method
        self.options = Options(
            backend, activations, rounding, tuned_for, threads, numa_nodes, gpu_experts, progress, cache, dense, distributed
        )
        self.source = source
        self.experts = experts
        self.path = path
        self.inner = inner

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold: all but progress and distributed.

        Examples:
            >>> ktmoe.transformers.Config(dense="torch").to_dict()["dense"]
            'torch'
        """
        options = {name: option for name, option in vars(self.options).items() if name not in ("progress", "distributed")}
        options["numa_nodes"] = None if options["numa_nodes"] is None else np.asarray(options["numa_nodes"]).tolist()
        gpu_experts = read(options["gpu_experts"])
        options["gpu_experts"] = gpu_experts if isinstance(gpu_experts, int) else gpu_experts.tolist()
        options["cache"] = None if options["cache"] is None else os.fspath(options["cache"])
        paths = {name: None if path is None else os.fspath(path) for name, path in self._paths.items()}
        own = {"quant_method": self.quant_method, "source": self.source, "inner": self.inner} | paths
        return copy.deepcopy(options | own)

    @property
    def _paths(self) -> dict[str, str | os.PathLike[str] | None]:
        return {"path": self.path, "experts": self.experts}

    def __deepcopy__(self, memo: dict[int, Any]) -> Config:
        """The same object, since nothing changes it: transformers copies configs, and a progress bar cannot be copied."""
        return self


def stated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Config's path and inner, by what a config.json says of the checkpoint's own quantization.

    Models of text and images may say it in text_config.
    """
    nested = config.get("text_config")
    found = config.get("quantization_config") or (nested.get("quantization_config") if isinstance(nested, dict) else None)
    if found and found.get("quant_method") == NAME:
        return {"path": found.get("path"), "inner": found.get("inner")}
    return {"path": None, "inner": found or None}
