"""README's tables: of weights, from weights.toml and the formats themselves, and of a whole model, from the results files."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.models import models
from bench.results_file import Results, newest
from ktmoe import backends
from ktmoe.backends.native import NativeBackend, load_table
from ktmoe.weights.elements import E2M1, E4M3, INT4, INT8, INT8_PLUS_128, UINT4
from ktmoe.weights.formats import WeightFormat
from ktmoe.weights.records import RecordOrder

PAGE = Path(__file__).resolve().parents[1] / "README.md"
FILE = Path(__file__).with_name("weights.toml")
HEADS = ("weights", "checkpoints", "loaders", "activations besides bfloat16")
LIBRARIES = ("ktmoe in transformers", "llama.cpp")
#: Elements that stand in one row.
_SAME = {UINT4: INT4, INT8_PLUS_128: INT8}


@dataclass(frozen=True)
class Weights:
    """A row. name: of the weights. measured: a model of models.toml that has them. The others: see weights.toml."""

    name: str
    checkpoints: str
    loaders: list[str]
    measured: str

    @property
    def format(self) -> WeightFormat:
        (weight_format,) = set(models()[self.measured].make(1).formats.values())
        return weight_format

    def covers(self, loader: str, weight_format: WeightFormat) -> bool:
        """Whether what a loader reads belongs in this row."""
        return loader in self.loaders and _kind(weight_format) == _kind(self.format)

    @property
    def modes(self) -> str:
        """Those that some backend of this package has kernels for, whatever this CPU is."""
        built_in = [name for name in backends.names() if isinstance(backends.get(name), NativeBackend)]
        return ", ".join(mode for mode in ("int16", "int8") if any(self._served(name, mode) for name in built_in))

    def _served(self, backend: str, mode: str) -> bool:
        return any(load_table(isa).serves(self.format, mode) for isa in backends.get(backend).isas.get(mode, ()))


@cache
def weights() -> list[Weights]:
    """All rows. Raises ValueError, which names the row, for fields that are wrong."""
    found = []
    for name, fields in tomllib.loads(FILE.read_text()).items():
        try:
            found.append(Weights(name, **fields))
        except TypeError as error:  # a field that is missing or unknown, which the text names
            raise ValueError(f"{FILE.name} [{name}]: {error}") from None
    return found


def table(found: list[Results]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The weights that are read. It depends on the package alone, not on what was measured."""
    rows = [(row.name, row.checkpoints, ", ".join(f"`{name}`" for name in row.loaders), row.modes) for row in weights()]
    return HEADS, rows


def text(found: list[Results]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A whole model beside llama.cpp, with the most layers that both were measured on, and the same bytes in both."""
    last = newest(found, "whole")
    if last is None:
        return (), []
    label, whole = last
    both = [comparison for comparison in whole["comparison"] if _ways(comparison)]
    if not both:
        return (), []
    comparison = max(both, key=lambda of: of["layers"])
    ours, peer = _ways(comparison)
    rows = []
    for work, words in (("decode", "{texts} text{s} after {after} tokens"), ("prefill", "a prompt of {tokens} tokens")):
        for row, other in zip(ours[work], peer[work], strict=True):
            what = words.format(**row, s="s" * (row.get("texts", 1) > 1))
            rows.append((what, _speed(row), _speed(other), f"{row['ratio']:.2f} x"))
    memory = [f"{way['resident_gb']:.3g} GB" for way in (ours, peer)]
    rows.append(("memory after loading", *memory, f"{ours['resident_gb'] / peer['resident_gb']:.2f} x"))
    return (
        f"{comparison['model']}, {comparison['layers']} of {comparison['of_layers']} layers, on {label}",
        *LIBRARIES,
        "ratio",
    ), rows


def _ways(comparison: dict) -> tuple[dict, dict] | None:
    """ktmoe's way that keeps all weights' bytes, and llama.cpp's with the same; None if one is missing or read no prompt."""
    ways = {way["name"]: way for way in comparison["way"] if way["prefill"]}
    ours = next((way for name, way in ways.items() if name.startswith("ktmoe") and name.endswith("dense packed")), None)
    peer = next((way for name, way in ways.items() if name.startswith("llama.cpp") and name.endswith("dense BF16")), None)
    return (ours, peer) if ours and peer else None


def _speed(row: dict) -> str:
    return f"{row['tokens_s']:.3g} tokens/s"


def of_what(results: Results) -> str:
    """What follows a share of the read bandwidth in a table: shares of one stream alone do not compare with others."""
    return " of 1 stream" if results.of_one_stream() else ""


def _kind(weight_format: WeightFormat) -> tuple:
    """What tells rows apart: of integers neither how scales are stored nor how many weights share one; of records nothing."""
    if isinstance(weight_format.order, RecordOrder):
        return ("records",)
    name = _SAME.get(weight_format.element, weight_format.element).name
    scale = weight_format.scale
    if weight_format.element in (E2M1, E4M3) and scale:
        return name, "block" if scale.extent[0] > 1 else scale.kind
    return name, bool(weight_format.offset)
