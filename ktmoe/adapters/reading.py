"""import_adapter(): adapters of experts from PEFT's format."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ktmoe.adapters import fused
from ktmoe.adapters.config import AdapterConfig
from ktmoe.adapters.fused import Pair
from ktmoe.adapters.places import Model, Places
from ktmoe.adapters.tensors import WEIGHTS_NAME, AdapterFile, LayerTensors
from ktmoe.errors import CheckpointError, FormatError, InputError, memory_for
from ktmoe.experts import PROJECTIONS
from ktmoe.messages import show
from ktmoe.training.lora import Lora

#: Relative difference of scales that are the same number, computed in different ways.
_SAME = 1e-14


def import_adapter(folder: str | os.PathLike[str], model: Model, *, experts_only: bool = False) -> dict[int, Lora]:
    """The adapters of routed experts in a folder that PEFT 0.19 or newer wrote, or export_adapter(), by layer number.

    model: as for export_adapter(); it says whether rows of gate and up alternate. experts_only: leave out what the folder has
    of other modules, such as attention.
    Numbers stay as they are; float16 becomes float32. The pair of gate_up_proj becomes one of gate and one of up. Where its B
    is in two blocks, each has half of the rank, else all of A and its own rows of B. A projection whose B is 0 beside another's
    that is not is left out. A pair of a smaller rank than another of its layer is filled up with zeros. If its alpha / rank
    differs by a power of two, its B is multiplied by that.
    Raises CheckpointError for files that are malformed, do not fit each other or change meanwhile, FormatError for an adapter
    that is not of experts alone or that a Lora cannot be, InputError for a model that does not serve, OutOfMemoryError.

    Examples:
        >>> qwen3 = ktmoe.load_experts("Qwen3-30B-A3B", 0)
        >>> export_adapter("adapter", {0: ktmoe.training.Lora.initial(qwen3.spec, rank=8, alpha=16)}, "Qwen3-30B-A3B")
        >>> import_adapter("adapter", "Qwen3-30B-A3B")
        {0: Lora(rank=16, alpha=32, gate, up, down, 8 experts)}
    """
    folder, places = Path(folder), Places(model)
    config = AdapterConfig(folder)
    with AdapterFile(folder / WEIGHTS_NAME) as file:
        if file.others and not experts_only:
            raise FormatError(
                f"{file.path}: expected an adapter of routed experts alone, found {len(file.others)} other tensors, "
                f"{show(file.others[0])} among them; experts_only=True leaves them out"
            )
        if not file.layers:
            raise FormatError(f"{file.path}: expected an adapter of routed experts, found none")
        with memory_for(f"{file.path}: the adapters of {len(file.layers)} layers"):
            loras = {layer: _LayerAdapter(file, config, places, found).lora() for layer, found in sorted(file.layers.items())}
    config.check_unchanged()
    return loras


class _LayerAdapter:
    """What an adapter's two files say of one layer."""

    def __init__(self, file: AdapterFile, config: AdapterConfig, places: Places, found: LayerTensors):
        self._file, self._config, self._places, self._found = file, config, places, found
        self._name = f"{file.path}: {found.module}"

    def lora(self) -> Lora:
        if self._found.parameters and self._found.modules:
            raise FormatError(f"{self._name}: expected adapters of parameters or of each expert's modules, found both")
        pairs, scales = {}, {}
        for projection, pair, scale in self._of_parameters() if self._found.parameters else self._of_modules():
            pairs[projection], scales[projection] = pair, scale
        self._check(pairs)
        rank, first = max(a.shape[1] for a, _ in pairs.values()), next(iter(pairs))
        for projection, (a, b) in pairs.items():
            pairs[projection] = fused.padded((a, self._with_scale(projection, b, scales[projection], scales[first])), rank)
        try:
            return Lora(pairs, scales[first] * rank)
        except InputError as error:
            raise CheckpointError(f"{self._name}: {error}") from None

    def _of_parameters(self) -> Iterator[tuple[str, Pair, float]]:
        """(projection, pair, scale) of the adapters of the layer's two parameters."""
        self._config.check_version()
        module, names = self._found.module, self._found.parameters
        targets = [each for each in ("gate_up_proj", "down_proj") if self._config.targets(module, each)]
        if len(targets) != len(names) or False not in names:
            raise CheckpointError(
                f"{self._name}: expected adapters of target_parameters {targets}, nested where there are two, "
                f"found {len(names)} of them"
            )
        for parameter, key in zip(targets, sorted(names, reverse=True), strict=True):  # the first one is the innermost
            rank, scale = self._config.rank_and_scale(f"{module}.{parameter}")
            of_a, of_b = self._file.both(names[key])
            a, b = self._file.matrix(of_a), self._file.matrix(of_b)
            if len(a) % rank or b.shape[1] != len(a):
                raise CheckpointError(
                    f"{self._name}: {parameter}: expected lora_A [experts * {rank}, inputs] and "
                    f"lora_B [outputs, {rank} * experts], found {list(a.shape)} and {list(b.shape)}"
                )
            pair = fused.restored(a, b, rank)
            if parameter == "down_proj":
                yield "down", pair, scale
            elif len(b) % 2:
                raise CheckpointError(f"{self._name}: {parameter}: expected an even number of outputs, found {len(b)}")
            else:
                for projection, half in fused.separated(pair, self._places.interleaved).items():
                    yield projection, half, scale

    def _of_modules(self) -> Iterator[tuple[str, Pair, float]]:
        stems = {stem: projection for projection, stem in self._places.stems.items()}
        if unknown := [stem for stem in self._found.modules if stem not in stems]:
            raise FormatError(f"{self._name}: expected modules {', '.join(stems)}, found {show(unknown[0])}")
        for stem, projection in stems.items():
            if stem in self._found.modules:
                yield projection, *self._stacked(stem, self._found.modules[stem])

    def _stacked(self, stem: str, experts: dict[int, dict[str, str]]) -> tuple[Pair, float]:
        """One projection's pair of all experts, and its scale."""
        if sorted(experts) != list(range(len(experts))):
            missing = next(expert for expert in range(len(experts)) if expert not in experts)
            raise CheckpointError(f"{self._name}: {stem}: expected an adapter of every expert, found none of expert {missing}")
        rank, scale = self._config.rank_and_scale(f"{self._found.module}.0.{stem}")
        made: list[list[np.ndarray]] = [[], []]
        for expert in range(len(experts)):
            if self._config.rank_and_scale(f"{self._found.module}.{expert}.{stem}") != (rank, scale):
                raise FormatError(f"{self._name}: {stem}: expected one rank and alpha for all, found others in {expert}")
            for arrays, name in zip(made, self._file.both(experts[expert]), strict=True):
                arrays.append(self._file.matrix(name))
                if arrays[-1].shape != arrays[0].shape or arrays[-1].dtype != arrays[0].dtype:
                    raise CheckpointError(f"{self._name}: {show(name)}: expected shape and dtype of expert 0, found others")
        if made[0][0].shape[0] != rank or made[1][0].shape[1] != rank:
            found = f"{list(made[0][0].shape)} and {list(made[1][0].shape)}"
            raise CheckpointError(f"{self._name}: {stem}: expected lora_A and lora_B of rank {rank}, found {found}")
        return (np.stack(made[0]), np.stack(made[1])), scale

    def _check(self, pairs: dict[str, Pair]) -> None:
        """Raise CheckpointError if the pairs are not of the same experts."""
        shapes = {
            projection: (len(a), b.shape[1], a.shape[2]) if projection != "down" else (len(a), a.shape[2], b.shape[1])
            for projection, (a, b) in pairs.items()
        }
        if len(set(shapes.values())) > 1:
            found = ", ".join(f"{projection} {list(shapes[projection])}" for projection in PROJECTIONS if projection in shapes)
            raise CheckpointError(f"{self._name}: expected [experts, intermediate, hidden] alike, found {found}")

    def _with_scale(self, projection: str, b: np.ndarray, scale: float, wanted: float) -> np.ndarray:
        """B, so that `wanted` is what multiplies it. Raises FormatError if that would round."""
        if math.isclose(scale, wanted, rel_tol=_SAME):
            return b
        ratio = scale / wanted if wanted else 0.0
        power = math.copysign(2.0 ** round(math.log2(abs(ratio))), ratio) if 2.0**-60 < abs(ratio) < 2.0**60 else 0.0
        made = fused.scaled(b, power) if power and math.isclose(ratio, power, rel_tol=_SAME) else None
        if made is None:
            raise FormatError(
                f"{self._name}: {projection}: expected alpha / rank of {wanted:g}, as the layer's first, or that times a power "
                f"of two, found {scale:g}"
            )
        return made
