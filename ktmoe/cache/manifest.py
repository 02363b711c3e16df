"""The manifest of a packed cache: which checkpoint it is of, and what each file holds. It is treated as hostile."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ktmoe._native import core
from ktmoe.cache.source import SourceFile
from ktmoe.errors import CacheError, CheckpointError
from ktmoe.experts import ExpertWeights
from ktmoe.files.atomic import write_json
from ktmoe.loaders.safetensors_file import read_json_object
from ktmoe.messages import show
from ktmoe.weight_spec import WeightSpec

NAME = "ktmoe-cache.json"
#: The version of the manifest and of the files. Families have versions of their own, for the bytes in the files.
VERSION = 3
_KIND = "ktmoe packed cache"


@dataclass(frozen=True)
class Item:
    """What one file of a cache holds: a layer's experts, or a dense matrix.

    what: "layer" or "matrix". name: the layer's number or name, or the name of the matrix.
    """

    what: str
    name: int | str

    def __str__(self) -> str:
        return f"{self.what} {show(self.name)}"

    @property
    def file(self) -> str:
        """The name of its file. A name of a checkpoint cannot lead out of the cache: what is not plain in it is encoded."""
        return f"{self.what}-{quote(str(self.name), safe='', errors='surrogatepass')}.safetensors"


@dataclass(frozen=True)
class PackedFile:
    """What the manifest says of one file.

    file: its name in the cache. nbytes: its size. experts, hidden, intermediate: sizes, a WeightSpec's. shards: the columns of
    the intermediate dimension that each shard has, [(first, last)]. formats: the description of each projection's. layout:
    versions, of the arena and of each family in it. label: what messages call these weights. kind: a digest of all that a
    loader says of them but their number and sizes: layers of one kind have the same formats, activation and place of the
    router weight.
    """

    file: str
    nbytes: int
    experts: int
    hidden: int
    intermediate: int
    shards: tuple[tuple[int, int], ...]
    formats: Mapping[str, str]
    layout: Mapping[str, int]
    label: str
    kind: str


@dataclass(frozen=True)
class Manifest:
    """source: the checkpoint's files. all_layers: those of the checkpoint. layers: those that are packed, by name, as text.
    matrices: those that are packed, by name."""

    source: tuple[SourceFile, ...]
    all_layers: tuple[str, ...]
    layers: Mapping[str, PackedFile]
    matrices: Mapping[str, PackedFile]

    def of_checkpoint(self, what: str) -> str:
        """A digest of all that it says of the checkpoint and that Items of that `what` depend on: matrices on no layer."""
        return _sha256([[asdict(file) for file in self.source], self.all_layers if what == "layer" else ()])

    def entry(self, item: Item) -> PackedFile | None:
        """What is packed of an item."""
        return (self.layers if item.what == "layer" else self.matrices).get(str(item.name))

    def with_entry(self, item: Item, entry: PackedFile) -> Manifest:
        """The same with one file more."""
        one = {str(item.name): entry}
        if item.what == "layer":
            return replace(self, layers={**self.layers, **one})
        return replace(self, matrices={**self.matrices, **one})

    def write(self, folder: Path) -> None:
        """Write the manifest in the place of the one that is there. Raises OutputError."""
        data = {
            "kind": _KIND,
            "version": VERSION,
            "all_layers": list(self.all_layers),
            "source": [asdict(file) for file in self.source],
            "layers": {name: asdict(entry) for name, entry in self.layers.items()},
            "matrices": {name: asdict(entry) for name, entry in self.matrices.items()},
        }
        write_json(folder / NAME, data, overwrite=True)


def expected(item: Item, weights: WeightSpec, shards: list[tuple[int, int]], nbytes: int = 0) -> PackedFile:
    """What the file of these weights holds, once it is packed by this version."""
    formats = {projection: weights.formats[projection] for projection in weights.projections}
    computed = (weights.activation, weights.router_weight) if isinstance(weights, ExpertWeights) else ()
    families = sorted({weight_format.family for weight_format in formats.values()})
    return PackedFile(
        file=item.file,
        nbytes=nbytes,
        experts=weights.num_experts,
        hidden=weights.hidden,
        intermediate=weights.intermediate,
        shards=tuple(shards),
        formats={projection: weight_format.description for projection, weight_format in formats.items()},
        label=weights.name,
        kind=hashlib.sha256(repr((formats, *computed)).encode()).hexdigest(),
        layout={"arena": core.ARENA_VERSION} | {family: core.LAYOUT_VERSIONS[family] for family in families},
    )


def stated(item: Item, entry: PackedFile, of_checkpoint: str) -> dict[str, str]:
    """What the file of an item states in its header: that it has this item of this checkpoint, and how that is packed.

    of_checkpoint: the manifest's digest.
    """
    packed = _sha256([of_checkpoint, str(item.name), asdict(replace(entry, nbytes=0))])
    return {"kind": f"ktmoe packed {item.what}", item.what: str(item.name), "packed_from": packed}


def read(folder: str | os.PathLike[str]) -> Manifest:
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
    source, all_layers = data.get("source"), data.get("all_layers")
    packed: dict[str, Any] = {"layer": data.get("layers"), "matrix": data.get("matrices")}
    if not (isinstance(all_layers, list) and all(isinstance(name, str) for name in all_layers)):
        raise CacheError(f"{path}: all_layers: expected a list of names, found {show(all_layers)}")
    if not (isinstance(source, list) and all(isinstance(entries, dict) for entries in packed.values())):
        raise CacheError(
            f"{path}: expected a list of source files and objects of layers and of matrices, found "
            f"{', '.join(map(show, (source, *packed.values())))}"
        )
    files = tuple(_record(SourceFile, entry, f"{path}: source") for entry in source)
    if len({file.name for file in files}) < len(files):
        raise CacheError(f"{path}: source: expected every file once, found {show([file.name for file in files])}")
    layers, matrices = (
        {name: _record(PackedFile, entry, f"{path}: {what} {show(name)}") for name, entry in entries.items()}
        for what, entries in packed.items()
    )
    return Manifest(files, tuple(all_layers), layers, matrices)


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and not re.search(r"[/\\\0]", value)


def _are_pairs(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair)) for pair in value
    )


#: What a field of a record may be, by its name.
_FITS: dict[str, Callable[[Any], bool]] = {
    "name": _is_name,
    "file": _is_name,
    **dict.fromkeys(("digest", "kind", "label"), lambda value: isinstance(value, str)),
    "mtime_ns": lambda value: value is None or type(value) is int,
    "shards": _are_pairs,
    "formats": lambda value: isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
    "layout": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
}


def _record(record: type, entry: object, what: str) -> Any:
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
