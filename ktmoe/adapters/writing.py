"""export_adapter(): adapters of experts in PEFT's format."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ktmoe.adapters import fused
from ktmoe.adapters.config import CONFIG_NAME, AdapterTarget, made
from ktmoe.adapters.fused import Pair
from ktmoe.adapters.places import Model, Places
from ktmoe.adapters.tensors import PREFIX, WEIGHTS_NAME
from ktmoe.arrays import BF16
from ktmoe.errors import InputError, OutputError
from ktmoe.files.atomic import AtomicFile, indented_json
from ktmoe.files.output import output_folder
from ktmoe.files.safetensors_writer import SafetensorsWriter
from ktmoe.messages import show
from ktmoe.training.lora import Lora

#: A header's name of each dtype.
_DTYPES = {np.dtype(np.float32): "F32", BF16: "BF16"}


@dataclass(frozen=True)
class _Item:
    """target: what adapter_config.json says. tensors: (name, dtype, shape) of each. arrays: makes them, in that order."""

    target: AdapterTarget
    tensors: list[tuple[str, str, tuple[int, ...]]]
    arrays: Callable[[], Iterable[np.ndarray]]


def export_adapter(
    folder: str | os.PathLike[str],
    loras: Mapping[int, Lora],
    model: Model,
    *,
    modules: str | None = None,
    fused_experts: bool = True,
    overwrite: bool = False,
) -> None:
    """Write adapters so that PEFT 0.19 or newer reads them (PeftModel.from_pretrained). All numbers stay as they are.

    folder: made if need be; it gets adapter_config.json and adapter_model.safetensors. loras: by layer number.
    model: the folder of the model or of its checkpoint, which has config.json; or a dict of its keys.
    modules: the name of a layer's module of experts in the model that PEFT will have, with "{layer}" for its number; None: as
    in the causal language models of transformers, "model.layers.{layer}.mlp.experts" for most.
    fused_experts: whether all experts are in the parameters gate_up_proj and down_proj, as in transformers 5. Otherwise each
    expert has modules of its own, {modules}.{E}.gate_proj and so on, or w1, w3 and w2 where the model has them. Where fused,
    gate and up share one A, so that two adapters become one of twice the rank, with zeros in B.
    overwrite: whether an adapter that is there may be replaced; it stays as it is until the new one is on the disk. Weights
    without adapter_config.json, which an interrupted call leaves, are replaced in any case.
    Raises InputError, CheckpointError for a config.json that cannot be read, OutputError.

    Examples:
        >>> qwen3 = ktmoe.load_experts("Qwen3-30B-A3B", 0)
        >>> lora = ktmoe.training.Lora.initial(qwen3.spec, rank=8, alpha=16)
        >>> export_adapter("adapter", {0: lora}, "Qwen3-30B-A3B")
        >>> sorted(os.listdir("adapter"))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    folder, places = output_folder(folder), Places(model, modules)
    listed = _parameters if fused_experts else _modules
    items = [
        item for layer, lora in _checked(loras).items() for item in listed(places.module(layer), _pairs(lora), lora, places)
    ]
    model_folder = None if places.folder is None else str(places.folder)
    config = made([item.target for item in items], fused_experts, model_folder)
    _make(folder, overwrite)
    tensors = sorted((each for item in items for each in item.tensors), key=lambda each: each[1] != "F32")
    with (
        AtomicFile(folder / CONFIG_NAME, overwrite=overwrite) as of_config,
        SafetensorsWriter(folder / WEIGHTS_NAME, tensors, {"format": "pt"}, overwrite=True) as writer,
    ):
        of_config.write(indented_json(config))
        for item in items:
            for (name, _, _), array in zip(item.tensors, item.arrays(), strict=True):
                writer.write(np.ascontiguousarray(array), name)
        of_config.finish()
        writer.finish()
        if overwrite:
            _remove_config(folder)  # from here on there is no adapter, until the config gets its name, as the last of both


def _checked(loras: Mapping[int, Lora]) -> dict[int, Lora]:
    """The loras, checked, in ascending order of layers. Raises InputError."""
    if not isinstance(loras, Mapping) or not loras:
        raise InputError(f"loras: expected {{layer: Lora}}, found {show(loras)}")
    found = {}
    for layer, lora in loras.items():
        try:
            number = operator.index(layer)
        except TypeError:
            number = -1
        if isinstance(layer, bool) or number < 0:
            raise InputError(f"loras: expected numbers of layers, which modules of transformers have, found {show(layer)}")
        if not isinstance(lora, Lora):
            raise InputError(f"loras: layer {number}: expected a Lora, found {type(lora).__name__}")
        lora.check_dtypes(f"loras: layer {number}")
        found[number] = lora
    return dict(sorted(found.items()))


def _pairs(lora: Lora) -> dict[str, Pair]:
    """The pairs of an adapter, with the dtype bfloat16 where they are its bits in uint16."""

    def typed(array: np.ndarray) -> np.ndarray:
        return array.view(BF16) if array.dtype == np.uint16 else array

    return {projection: (typed(a), typed(b)) for projection, (a, b) in lora.pairs.items()}


def _parameters(module: str, pairs: Mapping[str, Pair], lora: Lora, places: Places) -> Iterator[_Item]:
    """The items of each parameter that has an adapter. PEFT nests them: the module's first parameter is the innermost."""
    projections_of = {
        "gate_up_proj": [projection for projection in ("gate", "up") if projection in pairs],
        "down_proj": ["down"] if "down" in pairs else [],
    }
    for parameter, projections in projections_of.items():
        if not projections:
            continue
        name = f"{module}.{parameter}"
        rank = len(projections) * lora.rank  # and alpha likewise, so that alpha / rank stays
        target = AdapterTarget(re.escape(name), rank, len(projections) * lora.alpha, name)
        inner = "base_layer." if parameter == "gate_up_proj" and projections_of["down_proj"] else ""
        outputs, inputs = pairs[projections[0]][1].shape[1], pairs[projections[0]][0].shape[2]
        shapes = (lora.num_experts * rank, inputs), (outputs * (1 if parameter == "down_proj" else 2), rank * lora.num_experts)
        dtypes = [_DTYPES[fused.common_dtype([pairs[projection][which] for projection in projections])] for which in (0, 1)]
        names = [f"{PREFIX}{module}.{inner}lora_{letter}.weight" for letter in "AB"]

        def arrays(parameter: str = parameter) -> Pair:
            if parameter == "down_proj":
                return fused.stored(pairs["down"])
            return fused.stored(fused.joined(pairs.get("gate"), pairs.get("up"), places.interleaved))

        yield _Item(target, list(zip(names, dtypes, shapes, strict=True)), arrays)


def _modules(module: str, pairs: Mapping[str, Pair], lora: Lora, places: Places) -> Iterator[_Item]:
    """The items of each projection, whose experts have a module each."""
    for projection, pair in pairs.items():
        stem = places.stems[projection]
        tensors = [
            (f"{PREFIX}{module}.{expert}.{stem}.lora_{letter}.weight", _DTYPES[array.dtype], array.shape[1:])
            for expert in range(lora.num_experts)
            for letter, array in zip("AB", pair, strict=True)
        ]

        def arrays(pair: Pair = pair) -> Iterator[np.ndarray]:
            return (array[expert] for expert in range(lora.num_experts) for array in pair)

        yield _Item(AdapterTarget(rf"{re.escape(module)}\.\d+\.{stem}", lora.rank, lora.alpha), tensors, arrays)


def _make(folder: Path, overwrite: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        found = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{folder}: expected a folder that can be written, found {found}") from error
    if not overwrite and os.path.lexists(folder / CONFIG_NAME):
        raise OutputError(f"{folder / CONFIG_NAME}: expected no adapter, found one")


def _remove_config(folder: Path) -> None:
    """Remove what makes an adapter of the weights that are there."""
    try:
        with suppress(FileNotFoundError):
            os.unlink(folder / CONFIG_NAME)
    except OSError as error:
        raise OutputError(f"{folder / CONFIG_NAME}: expected a file that can be replaced, found {error.strerror}") from error
