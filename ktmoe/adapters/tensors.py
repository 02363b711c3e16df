"""adapter_model.safetensors of PEFT: which of its tensors are adapters of routed experts, and their numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

from ktmoe.errors import CheckpointError, FormatError, memory_for
from ktmoe.loaders import checks
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show

WEIGHTS_NAME = "adapter_model.safetensors"
#: What PEFT writes before the names of a model's modules.
PREFIX = "base_model.model."
_NUMBER = "(0|[1-9][0-9]{0,5})"
#: (1) the module of experts, (2) its layer, (3) whether another parameter's adapter is around this one, or (4) the expert and
#: (5) its module, (6) which matrix. Each is short, since all patterns of a config are matched with them.
_NAME = re.compile(
    rf"{re.escape(PREFIX)}((?:[a-z_]{{1,64}}\.){{0,4}}layers\.{_NUMBER}\.[a-z_]{{1,64}}\.experts)"
    rf"\.(?:(base_layer)\.|{_NUMBER}\.([a-z0-9_]{{1,64}})\.)?lora_([AB])\.weight"
)
_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}


@dataclass
class LayerTensors:
    """A layer's tensors by name. module: of the experts.

    parameters: {inner: {"A" or "B": name}} of adapters of parameters; PEFT nests that of down_proj around that of gate_up_proj.
    modules: {stem: {expert: {"A" or "B": name}}} of adapters of an expert's modules.
    """

    module: str
    parameters: dict[bool, dict[str, str]] = field(default_factory=dict)
    modules: dict[str, dict[int, dict[str, str]]] = field(default_factory=dict)


class AdapterFile:
    """An open adapter_model.safetensors. layers: what it has of routed experts. others: names of all other tensors.

    Raises CheckpointError, FormatError for tensors of experts that no adapter of them has.
    """

    def __init__(self, path: Path):
        self.path = path
        self._checkpoint = Checkpoint(path)
        try:
            self.layers: dict[int, LayerTensors] = {}
            self.others: list[str] = []
            for name in self._checkpoint.names():
                self._sort(name)
        except BaseException:
            self.close()
            raise

    def matrix(self, name: str) -> np.ndarray:
        """[rows, columns], float32 or bfloat16, exactly as the file has it. Raises FormatError for other dtypes and shapes."""
        info = self._checkpoint.info(name)
        checks.dtype(info, *_DTYPES)
        checks.dimensions(info, 2)
        array = self._checkpoint.read(name).view(_DTYPES[info.dtype]).reshape(info.shape)
        with memory_for(f"{self.path}: tensor {show(name)}"):
            return array.astype(np.float32) if info.dtype == "F16" else array

    def both(self, names: dict[str, str]) -> tuple[str, str]:
        """The names of A and B. Raises CheckpointError if one is missing."""
        if len(names) < 2:
            (name,) = names.values()
            raise CheckpointError(f"{self.path}: tensor {show(name)}: expected lora_A and lora_B, found one of both")
        return names["A"], names["B"]

    def close(self) -> None:
        self._checkpoint.close()

    def __enter__(self) -> AdapterFile:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _sort(self, name: str) -> None:
        match = _NAME.fullmatch(name)
        if match is None:
            if ".experts." in name:
                raise FormatError(
                    f"{self.path}: tensor {show(name)}: expected lora_A and lora_B of gate_up_proj and down_proj, "
                    "or of an expert's modules"
                )
            self.others.append(name)
            return
        module, layer, inner, expert, stem, letter = match.groups()
        found = self.layers.setdefault(int(layer), LayerTensors(module))
        if found.module != module:
            raise FormatError(
                f"{self.path}: layer {layer}: expected one module of experts, found {show(found.module)} and {show(module)}"
            )
        if expert is None:
            found.parameters.setdefault(inner is not None, {})[letter] = name
        else:
            found.modules.setdefault(stem, {}).setdefault(int(expert), {})[letter] = name
