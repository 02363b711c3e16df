"""README's table of weights, from weights.toml, the formats themselves and the results files."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.models import models
from bench.results_file import Results
from ktmoe import backends
from ktmoe.backends.native import NativeBackend, load_table
from ktmoe.weights.elements import E2M1, E4M3, INT4, INT8, INT8_PLUS_128, UINT4
from ktmoe.weights.formats import Minimum, WeightFormat
from ktmoe.weights.records import RecordOrder

PAGE = Path(__file__).resolve().parents[1] / "README.md"
FILE = Path(__file__).with_name("weights.toml")
HEADS = ("weights", "checkpoints", "loaders", "rounded besides sums", "backends")
NONE = "-"
#: Elements that stand in one row.
_SAME = {UINT4: INT4, INT8_PLUS_128: INT8}


@dataclass(frozen=True)
class Weights:
    """A row. name: of the weights. measured: a model of models.toml. The others: see weights.toml."""

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
    def rounded(self) -> str:
        """What mode bf16 rounds, besides adding in float32: docs/numerics.md, "Scales" and "Factors"."""
        scale = self.format.scale
        if isinstance(self.format.offset, Minimum):
            return "once per scale and minimum"
        scales = bool(scale and scale.kind != "ue8m0") + bool(self.format.factor)
        return ("nothing", "once per scale", "once per scale, once per output")[scales]

    @property
    def backends(self) -> str:
        """This package's backends that have kernels, whatever this CPU is; and their modes besides bf16."""
        built_in = [name for name in backends.names() if isinstance(backends.get(name), NativeBackend)]
        exact = [name for name in built_in if self._served(name, "bf16")]
        others = [mode for mode in ("int16", "int8") if any(self._served(name, mode) for name in built_in)]
        names = "all" if exact == built_in else ", ".join(f"`{name}`" for name in exact)
        return f"{names}; also {', '.join(others)}" if others else names

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
    """Figures are of the CPU that most rows were measured on, and of these the last."""
    measured = [(results.label, _measured(results)) for results in found]
    label, calls = max(measured, key=lambda pair: len(pair[1]), default=("", {}))
    rows = []
    for row in weights():
        loaders = ", ".join(f"`{loader}`" for loader in row.loaders)
        figures = calls.get(row.name, (NONE, NONE))
        rows.append((row.name, row.checkpoints, loaders, row.rounded, row.backends, *figures))
    return (*HEADS, f"decode on {label}" if calls else "decode", "prefill there"), rows


def _measured(results: Results) -> dict[str, tuple[str, str]]:
    """Decode of 1 token, and prefill of the largest batch that was measured, as "auto" runs it."""
    calls = {}
    for row in weights():
        for layer in results.entries("layer"):
            by_default = layer["rounding"] == "exact" and layer.get("tuned_for", "decode") == "decode"
            if layer["model"] == row.measured and by_default and row.name not in calls:
                decode = next((call for call in layer.get("decode", ()) if call["tokens"] == 1), None)
                prefill = max(layer.get("prefill", ()), key=lambda call: call["tokens"], default=None)
                if decode and prefill and "gb_s" in decode and "gflop_s" in prefill:
                    read = _rate(decode, "gb_s", "GB/s", "of_read", of_what(results))
                    calls[row.name] = read, _rate(prefill, "gflop_s", "GFLOP/s", "of_peak")
    return calls


def of_what(results: Results) -> str:
    """What follows a share of the read bandwidth in a table: shares of one stream alone do not compare with others."""
    return " of 1 stream" if results.of_one_stream() else ""


def _rate(call: dict, rate: str, unit: str, of: str, what: str = "") -> str:
    return f"{float(f'{call[rate]:.3g}'):g} {unit}" + (f", {100 * call[of]:.0f} %{what}" if of in call else "")


def _kind(weight_format: WeightFormat) -> tuple:
    """What tells rows apart: of integers neither how scales are stored nor how many weights share one; of records nothing."""
    if isinstance(weight_format.order, RecordOrder):
        return ("records",)
    name = _SAME.get(weight_format.element, weight_format.element).name
    scale = weight_format.scale
    if weight_format.element in (E2M1, E4M3) and scale:
        return name, "block" if scale.extent[0] > 1 else scale.kind
    return name, bool(weight_format.offset)
