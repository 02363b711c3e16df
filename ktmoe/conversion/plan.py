"""ConversionPlan: which tensors the result has, in which files, and what makes each; by the source's headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, KeysView
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ktmoe import loaders
from ktmoe.conversion import jobs, stated
from ktmoe.conversion.computed import check_computed
from ktmoe.conversion.jobs import ResultTensor, Unit
from ktmoe.conversion.source import Source
from ktmoe.conversion.storage import DEEPSEEK_V4, Storage, storage
from ktmoe.errors import FormatError, InputError, MissingTensorError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.loaders import naming
from ktmoe.loaders.base import Loader, find_loader, load_layers
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.tensor_file import TensorInfo
from ktmoe.messages import show
from ktmoe.quantization import Quantizer
from ktmoe.weights.elements import INT8, INT8_PLUS_128
from ktmoe.weights.formats import MXFP4, WeightFormat

#: The ending of those of gpt-oss's tensors of experts that are kept as they are.
_BIAS = "_bias"


@dataclass(frozen=True)
class Shard:
    """A file of the result."""

    name: str
    units: list[Unit]

    @property
    def tensors(self) -> list[ResultTensor]:
        """Tensors in the file's order: the larger a tensor's numbers, the earlier; so each begins at a multiple of them."""
        return sorted((each for unit in self.units for each in unit.tensors), key=lambda each: -each.item_bytes)

    @property
    def nbytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)


@dataclass(frozen=True)
class ConversionPlan:
    """layers: experts of those that are converted. shards: the files. config: of the result. note: what is to be known."""

    layers: dict[int | str, ExpertWeights]
    shards: list[Shard]
    config: dict[str, Any]
    note: str


def plan(
    source: Source, quantizer: Quantizer, layers: Collection[int | str] | None, requantize: bool, shard_bytes: int
) -> ConversionPlan:
    """layers: to convert; None: all that have routed experts. requantize: also those of 4 bits.

    Raises FormatError for experts that are not to be converted, MissingTensorError for a layer that there is not, InputError
    for sizes that the format does not have and for formats that no backend computes, and what loaders raise.
    """
    checkpoint = source.checkpoint
    wanted = None if layers is None else dict.fromkeys(map(naming.layer_key, layers))
    read = load_layers(checkpoint, layers=wanted)
    if not read:
        raise InputError("layers: expected at least one layer to convert, found none")
    readers = {layer: reader for layer, (reader, _) in read.items()}
    experts = {layer: found for layer, (_, found) in read.items()}
    for each in experts.values():
        _check(each, quantizer, requantize)
    mine = {name: layer for layer, each in experts.items() for name in tensors_of(source, layer, each.name)}
    rest = [info for info in source.infos if info.name not in mine]
    partly = any(layer not in experts for layer in naming.layers(checkpoint))
    stored = _storages(source, quantizer, readers, rest)
    for each in experts.values():
        check_computed(quantizer, each)
    units: list[Unit] = []
    for info in source.infos:
        layer = mine.get(info.name)
        if layer is None:
            units.append(jobs.copied(checkpoint, info))
        elif layer in readers:  # the first tensor of a layer stands for all of it
            units += _units(source, layer, experts[layer], stored, quantizer)
            del readers[layer]
    config, note = stated.config(checkpoint.config, stored, list(experts), partly, rest)
    made = ConversionPlan(experts, shards(units, shard_bytes), config, note)
    written = quantizer.format
    if written.element == INT8:  # which is packed so
        written = replace(written, element=INT8_PLUS_128)
    check_result(source, made, written)
    return made


def tensors_of(source: Source, layer: int | str, base: str) -> list[str]:
    """The tensors of a layer's experts that are rounded: not biases, and not what else may have names of experts."""
    elsewhere = f"{base}.experts."
    return [
        name
        for name in naming.tensors(source.checkpoint, layer)
        if name.startswith(f"{base}.") and not name.startswith(elsewhere) and not name.endswith(_BIAS)
    ]


def _check(experts: ExpertWeights, quantizer: Quantizer, requantize: bool) -> None:
    for projection in PROJECTIONS:
        found = experts.formats[projection]
        if found == quantizer.format:
            raise FormatError(
                f"{experts.name}: {projection} is {found.description} already; choose other layers or another format"
            )
        if found.element.bits == 4 and not requantize:
            raise FormatError(
                f"{experts.name}: {projection} is {found.description}: rounding it again adds to the error of the first time; "
                "ask for that with --requantize, or requantize=True"
            )


def _storages(source: Source, quantizer: Quantizer, readers: dict[int | str, Loader], rest: list[TensorInfo]) -> Storage | None:
    """How all experts are stored; None: as gpt-oss has MXFP4. Raises FormatError for formats that a model cannot have."""
    kinds = {reader is loaders.get("gpt_oss") for reader in readers.values()}
    if kinds == {True} and quantizer.format == MXFP4:
        return None
    if True in kinds:
        raise FormatError(
            f"{source.checkpoint.path}: experts with biases, as gpt-oss has them: expected mxfp4, found {quantizer.to}"
        )
    v4 = all(reader is loaders.get("deepseek_v4") for reader in readers.values())
    if v4 and quantizer.format == MXFP4 and any(map(stated.quantized, rest)):
        return DEEPSEEK_V4
    return storage(quantizer.format)


def _units(
    source: Source, layer: int | str, experts: ExpertWeights, stored: Storage | None, quantizer: Quantizer
) -> list[Unit]:
    if stored is None:
        _check_columns(experts, 32)
        return [jobs.gpt_oss(layer, experts, quantizer)]
    _check_columns(experts, stored.unit)
    return [
        jobs.expert(layer, experts, number, names, stored, quantizer) for number, names in enumerate(own_names(source, experts))
    ]


def own_names(source: Source, experts: ExpertWeights) -> list[dict[str, str]]:
    """What each expert's matrices are called where they have tensors of their own, by projection."""
    base = experts.name
    numbered = any(name.startswith(f"{base}.0.w1.") for name in source.checkpoint.names())
    stems = naming.NUMBERED_STEMS if numbered else naming.PROJ_STEMS
    if base.rpartition(".")[2] != "experts":  # Granite's and Step-3's
        base += ".experts"
    return [{p: f"{base}.{number}.{stem}" for p, stem in stems.items()} for number in range(experts.num_experts)]


def _check_columns(experts: ExpertWeights, unit: int) -> None:
    for projection in PROJECTIONS:
        if experts.shape(projection)[1] % unit:
            found = list(experts.shape(projection))
            raise InputError(
                f"{experts.name}: {projection}: expected a multiple of {unit} columns for this format, found {found}"
            )


def shards(units: list[Unit], shard_bytes: int) -> list[Shard]:
    """Units in files of at most so many bytes, but for a unit that has more."""
    files: list[list[Unit]] = [[]]
    used = 0
    for unit in units:
        if files[-1] and used + unit.nbytes > shard_bytes:
            files.append([])
            used = 0
        files[-1].append(unit)
        used += unit.nbytes
    return [Shard(f"model-{number:05}-of-{len(files):05}.safetensors", each) for number, each in enumerate(files, 1)]


class _Result:
    """What loaders look at of a checkpoint, of the result: it is not written yet."""

    def __init__(self, path: Path, made: ConversionPlan):
        self.path, self.config = path, made.config
        tensors = [(shard.name, each) for shard in made.shards for each in shard.tensors]
        names = Counter(each.name for _, each in tensors)
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise FormatError(f"{path}: tensor {show(twice)}: expected none of that name beside the experts, found one")
        self._infos = {
            each.name: TensorInfo(each.name, each.dtype, each.shape, path / file, 0, each.nbytes) for file, each in tensors
        }

    def names(self) -> KeysView[str]:
        return self._infos.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def __len__(self) -> int:
        return len(self._infos)

    def info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise MissingTensorError(f"{self.path}: tensor {name}: expected in the result, found none")
        return self._infos[name]


def check_result(source: Source, made: ConversionPlan, wanted: WeightFormat) -> None:
    """Raise FormatError if ktmoe would not read the result as what it is to be: before a byte of it is written."""
    result = cast("Checkpoint", _Result(source.checkpoint.path, made))  # loaders ask no more of one here
    for layer, experts in made.layers.items():
        found = find_loader(result, layer=layer).load(result, layer)
        wrong = [each for each in found.formats.values() if each != wanted]
        same = "num_experts", "hidden", "intermediate", "activation", "router_weight"
        differ = [name for name in same if getattr(found, name) != getattr(experts, name)]
        if wrong or differ:
            what = wrong[0].description if wrong else ", ".join(differ)
            raise FormatError(
                f"{experts.name}: as {wanted.description} it would be read as another model's: {what}; choose another format"
            )
