"""The manifest of a packed cache: which checkpoint it is of, and what each layer's file holds. It is treated as hostile."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ktmoe._native import core
from ktmoe.cache.source import SourceFile
from ktmoe.errors import CacheError, CheckpointError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.files.atomic import write_json
from ktmoe.loaders.safetensors_file import read_json_object
from ktmoe.messages import show

NAME = "ktmoe-cache.json"
#: The version of the manifest and of the layers' files. Families have versions of their own, for the bytes in the files.
VERSION = 2
_KIND = "ktmoe packed cache"
#: The kind that a layer's file states.
_LAYER_KIND = "ktmoe packed layer"


@dataclass(frozen=True)
class PackedLayerFile:
    """What one layer's file holds.

    file: its name in the cache. nbytes: its size. experts, hidden, intermediate: sizes. shards: the columns of the intermediate
    dimension that each shard has, [(first, last)]. formats: the description of each projection's. layout: versions, of the
    arena and of each family in it. name: what messages call the layer. kind: a digest of all that a loader says of the experts
    but their number and sizes: layers of one kind have the same formats, activation and place of the router weight.
    """

    file: str
    nbytes: int
    experts: int
    hidden: int
    intermediate: int
    shards: tuple[tuple[int, int], ...]
    formats: Mapping[str, str]
    layout: Mapping[str, int]
    name: str
    kind: str


@dataclass(frozen=True)
class Manifest:
    """source: the checkpoint's files. all_layers: those of the checkpoint. layers: those that are packed, by name, as text."""

    source: tuple[SourceFile, ...]
    all_layers: tuple[str, ...]
    layers: Mapping[str, PackedLayerFile]

    @property
    def of_checkpoint(self) -> str:
        """A digest of all that it says of the checkpoint."""
        return _sha256([[asdict(file) for file in self.source], self.all_layers])

    def write(self, folder: Path) -> None:
        """Write the manifest in the place of the one that is there. Raises OutputError."""
        data = {
            "kind": _KIND,
            "version": VERSION,
            "all_layers": list(self.all_layers),
            "source": [asdict(file) for file in self.source],
            "layers": {name: asdict(layer) for name, layer in self.layers.items()},
        }
        write_json(folder / NAME, data, overwrite=True)


def expected(layer: int | str, experts: ExpertWeights, shards: list[tuple[int, int]], nbytes: int = 0) -> PackedLayerFile:
    """What the file of these experts holds, once it is packed by this version."""
    formats = {projection: experts.formats[projection] for projection in PROJECTIONS}
    families = sorted({weight_format.family for weight_format in formats.values()})
    return PackedLayerFile(
        file=f"layer-{re.sub(r'[^A-Za-z0-9._-]', '_', str(layer))}.safetensors",
        nbytes=nbytes,
        experts=experts.num_experts,
        hidden=experts.hidden,
        intermediate=experts.intermediate,
        shards=tuple(shards),
        formats={projection: weight_format.description for projection, weight_format in formats.items()},
        name=experts.name,
        kind=hashlib.sha256(repr((formats, experts.activation, experts.router_weight)).encode()).hexdigest(),
        layout={"arena": core.ARENA_VERSION} | {family: core.LAYOUT_VERSIONS[family] for family in families},
    )


def stated(layer: int | str, entry: PackedLayerFile, of_checkpoint: str) -> dict[str, str]:
    """What the file of a layer states in its header: that it has this layer of this checkpoint, and how that is packed.

    of_checkpoint: the manifest's digest.
    """
    packed = _sha256([of_checkpoint, str(layer), asdict(replace(entry, nbytes=0))])
    return {"kind": _LAYER_KIND, "layer": str(layer), "packed_from": packed}


def read(folder: str | os.PathLike) -> Manifest:
    """The manifest of a cache. Raises CacheError if the folder has none, or a damaged one, or one of another version."""
    path = Path(folder) / NAME
    if not os.path.lexists(path):
        raise CacheError(f"{folder}: expected a packed cache, which has {NAME}, found none; `ktmoe pack` makes one")
    try:
        data = read_json_object(path)
    except CheckpointError as error:
        raise CacheError(str(error)) from None
    if data.get("kind") != _KIND:
        raise CacheError(f"{path}: kind: expected {_KIND!r}, found {show(data.get('kind'))}")
    if data.get("version") != VERSION:
        raise CacheError(
            f"{path}: version: expected {VERSION}, found {show(data.get('version'))}; `ktmoe pack` makes one of this version"
        )
    source, layers, all_layers = data.get("source"), data.get("layers"), data.get("all_layers")
    if not (isinstance(all_layers, list) and all(isinstance(name, str) for name in all_layers)):
        raise CacheError(f"{path}: all_layers: expected a list of names, found {show(all_layers)}")
    if not (isinstance(source, list) and isinstance(layers, dict)):
        raise CacheError(
            f"{path}: expected a list of source files and an object of layers, found {show(source)}, {show(layers)}"
        )
    files = tuple(_record(SourceFile, entry, f"{path}: source") for entry in source)
    if len({file.name for file in files}) < len(files):
        raise CacheError(f"{path}: source: expected every file once, found {show([file.name for file in files])}")
    return Manifest(
        files,
        tuple(all_layers),
        {name: _record(PackedLayerFile, entry, f"{path}: layer {show(name)}") for name, entry in layers.items()},
    )


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and not re.search(r"[/\\\0]", value)


def _are_pairs(value: object) -> bool:
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    return pairs and all(_is_count(number) for pair in value for number in pair)


#: What a field of a record may be, by its name.
_FITS = {
    "name": _is_name,
    "file": _is_name,
    **dict.fromkeys(("digest", "kind"), lambda value: isinstance(value, str)),
    "mtime_ns": lambda value: value is None or type(value) is int,
    "shards": _are_pairs,
    "formats": lambda value: isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
    "layout": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
}


def _record(record: type, entry: object, what: str):
    """A dataclass of what is in an object. Raises CacheError."""
    names = [field.name for field in fields(record)]
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise CacheError(f"{what}: expected an object of {', '.join(names)}, found {show(entry)}")
    for name in names:
        if not _FITS.get(name, _is_count)(entry[name]):
            raise CacheError(f"{what}: {name}: found {show(entry[name])}")
    if "shards" in entry:
        entry = entry | {"shards": tuple(map(tuple, entry["shards"]))}
    return record(**entry)
