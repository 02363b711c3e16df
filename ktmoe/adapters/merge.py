"""merge_adapter(): a checkpoint whose experts have an adapter added to their weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ktmoe.adapters import sums
from ktmoe.adapters.reading import import_adapter
from ktmoe.conversion import stated
from ktmoe.conversion.convert import SHARD_BYTES
from ktmoe.conversion.jobs import Unit, copied
from ktmoe.conversion.plan import ConversionPlan, check_result, own_names, shards, tensors_of
from ktmoe.conversion.source import Source
from ktmoe.conversion.writing import Progress, Task, version, write
from ktmoe.errors import FormatError, InputError, memory_for
from ktmoe.experts import ExpertSpec
from ktmoe.files.output import output_folder
from ktmoe.loaders import checks, naming
from ktmoe.loaders.base import find_layers, find_loader
from ktmoe.quantization import Error
from ktmoe.training.lora import Lora
from ktmoe.weights.formats import BF16


@dataclass(frozen=True)
class Merged:
    """What a merge did.

    path: of the result. layers: of each layer that was merged, what bfloat16 lost of the adapter: Error.relative is the root
    mean square of what rounding changed beside that of s B A. nbytes: of all tensors. kept: files that were finished before
    this run. left_out: files and folders of the checkpoint that were not copied, the latter with a "/" in the end.

    Examples:
        >>> qwen3 = ktmoe.load_experts("Qwen3-30B-A3B", 0)
        >>> merged = merge_adapter("Qwen3-30B-A3B", {1: ktmoe.training.Lora.initial(qwen3.spec, rank=8, alpha=16)}, "merged-1")
        >>> list(merged.layers), merged.left_out
        ([1], [])
    """

    path: str
    layers: dict[int | str, Error]
    nbytes: int
    kept: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def merge_adapter(
    path: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | Mapping[int, Lora],
    out: str | os.PathLike[str],
    *,
    experts_only: bool = False,
    dequantize: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Merged:
    """Write a checkpoint whose experts are W + s B A, and whose other tensors and files are the same bytes.

    path: a folder, or a .safetensors file, with bfloat16 experts. adapter: a folder in PEFT's format (import_adapter()), or
    {layer: Lora}. out: a new or empty folder, or one in which this merge was interrupted: files that were finished stay then.
    experts_only: leave out what the adapter has of other modules. shard_bytes: most bytes of tensors in one file.
    dequantize: let experts of other formats become bfloat16, too, in all layers; all else must be unquantized already.
    progress: called with (done, total) bytes of the source.
    Computed in float32: B A is added up in ascending rank, multiplied by s and added to W; then it is rounded to bfloat16 once.
    Memory: the adapter; for each thread and one more, one matrix, gate and up being one where the checkpoint has them in one,
    in float64 where it is dequantized.

    The index is written last. Until then ktmoe refuses to load the folder.
    Raises FormatError for experts that are not bfloat16, and for sums that are not finite; MissingTensorError for a layer that
    the checkpoint has not; InputError for an adapter of other shapes; OutputError, OutOfSpaceError and OutOfMemoryError; what
    import_adapter() raises.

    Examples:
        >>> qwen3 = ktmoe.load_experts("Qwen3-30B-A3B", 0)
        >>> merged = merge_adapter("Qwen3-30B-A3B", {0: ktmoe.training.Lora.initial(qwen3.spec, rank=8, alpha=16)}, "merged-0")
        >>> merged.path, merged.layers[0].relative  # B is 0 in a new adapter: it changes nothing
        ('merged-0', 0.0)
    """
    if shard_bytes < 1:
        raise InputError(f"shard_bytes: expected at least 1, found {shard_bytes}")
    folder = output_folder(out)
    with memory_for(f"{path}: merging"), Source(path, folder) as source:
        if not isinstance(adapter, Mapping):
            given: Mapping[int, Lora] = import_adapter(adapter, source.checkpoint.config, experts_only=experts_only)
        elif adapter and all(isinstance(lora, Lora) for lora in adapter.values()):
            given = adapter
        else:
            raise InputError("adapter: expected a folder or {layer: Lora}")
        loras = {naming.layer_key(layer): lora for layer, lora in given.items()}
        made = _plan(source, loras, dequantize, shard_bytes)
        dropped = source.quantized if made.layers else []
        task = Task(
            "merge",
            "merge",
            made.shards,
            made.config,
            source.others + ([] if dropped else source.quantized),
            {"adapter": _digest(loras), "options": [dequantize, shard_bytes]},
            loras,
            lambda errors: _data(loras, errors),
        )
        written = write(source, task, folder, progress)
    return Merged(str(folder), written.errors, written.nbytes, written.kept, sorted(source.left_out + dropped))


def _plan(source: Source, loras: Mapping[int | str, Lora], dequantize: bool, shard_bytes: int) -> ConversionPlan:
    """What to write; the plan's layers are those that are dequantized.

    Raises FormatError, InputError, UnavailableError, MissingTensorError.
    """
    checkpoint = source.checkpoint
    units: dict[str, list[Unit]] = {}  # by the first of the tensors in whose place they come
    gone: set[str] = set()
    plain = {}
    for layer in dict.fromkeys([*loras, *(find_layers(checkpoint) if dequantize else ())]):
        reader, lora = find_loader(checkpoint, layer=layer), loras.get(layer)
        experts = reader.load(checkpoint, layer)
        if lora is not None:
            lora.check(experts)
            lora.check_dtypes(experts.name)
        if _is_bf16(experts):
            if lora is not None:
                of_layer = sums.in_place(checkpoint, reader, layer, experts, lora)
                units |= {name: [unit] for name, unit in of_layer.items()}
            continue
        if not dequantize:
            found = next(each for each in experts.formats.values() if each.element != BF16.element)
            raise FormatError(
                f"{experts.name}: expected bfloat16 experts, found {found.description}; merge into the bfloat16 model that "
                "these were made of, or pass --dequantize, or dequantize=True"
            )
        if experts.matrix(0, "down").bias is not None:
            raise FormatError(f"{experts.name}: expected experts without biases to dequantize, found biases")
        names = set(tensors_of(source, layer, experts.name))
        first = next(info.name for info in source.infos if info.name in names)
        units[first] = sums.dequantized(layer, experts, own_names(source, experts), lora)
        gone |= names
        plain[layer] = experts
    if plain and (rest := next((each for each in source.infos if each.name not in gone and stated.quantized(each)), None)):
        raise FormatError(
            f"{checkpoint.path}: expected all but the experts unquantized, as config.json will say, "
            f"found {checks.describe(rest)} in {rest.name}"
        )
    made = []
    for info in source.infos:
        if info.name in units:
            made += units[info.name]
        elif info.name not in gone:
            made.append(copied(checkpoint, info))
    config = stated.without(checkpoint.config) if plain else checkpoint.config
    result = ConversionPlan(plain, shards(made, shard_bytes), config, "")
    check_result(source, result, BF16)
    return result


def _is_bf16(experts: ExpertSpec) -> bool:
    return all(each.element == BF16.element and not each.scales and each.factor is None for each in experts.formats.values())


def _digest(loras: Mapping[int | str, Lora]) -> str:
    """A digest of all numbers of an adapter, which a merge that goes on must find again."""
    found = hashlib.sha256()
    for layer, lora in loras.items():
        found.update(repr((layer, lora.alpha, lora.rank)).encode())
        for projection, pair in lora.pairs.items():
            for array in pair:
                found.update(repr((projection, str(array.dtype), array.shape)).encode())
                found.update(array.view(np.uint8).data)
    return found.hexdigest()


def _data(loras: Mapping[int | str, Lora], errors: Mapping[int | str, Error]) -> dict[str, Any]:
    """What is kept beside the weights: the same whether the merge was interrupted or not."""
    return {
        "ktmoe": version(),
        "adapter": {
            str(layer): {"rank": lora.rank, "alpha": lora.alpha, "projections": list(lora.projections)}
            for layer, lora in loras.items()
        },
        "relative_rms_lost": {str(layer): error.relative for layer, error in errors.items()},
    }
