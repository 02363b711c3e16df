"""The results file that `ktmoe bench --output` writes: fields as bench/results has them, as far as this command knows them."""

from __future__ import annotations

import datetime
import math
import os
from pathlib import Path

import tomli_w

from ktmoe._native import core
from ktmoe.cli import measurements
from ktmoe.cli.measurements import Row
from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.files.atomic import AtomicFile
from ktmoe.machine import cpu as machine
from ktmoe.machine import threads
from ktmoe.version import installed_version
from ktmoe.weights.formats import FORMATS, WeightFormat


def check_writable(file: Path) -> None:
    """Raise InputError if a file could not be written there."""
    folder = file.expanduser().absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise InputError(f"{file}: expected a folder that can be written to, found {folder}")


def write(file: Path, data: dict) -> None:
    """Write a results file, whole or not at all. Raises OutputError."""
    with AtomicFile(file.expanduser(), overwrite=True) as written:
        written.write(tomli_w.dumps(data).encode())


def results(rows: list[Row], of_layer: dict) -> dict:
    """What the file holds. rows: of one backend. of_layer: layer()'s."""
    return {
        "date": datetime.date.today(),
        "commit": "unknown",  # an installed package does not know it
        "source": "ktmoe bench",
        "ktmoe": installed_version(),
        "cpu": cpu(),
        "limits": _limits(rows),
        "layer": [of_layer],
    }


def cpu() -> dict:
    numbers = {"family": "cpu family", "model": "model", "stepping": "stepping"}
    found = {name: machine.cpuinfo(field) for name, field in numbers.items()}
    caches = machine.cache_sizes()
    sizes = {"l2_bytes": caches.get(2), "llc_bytes": caches.get(max(caches)) if caches else None}
    return {
        "name": threads.cpu_name(),
        **{name: int(text) if (text or "").isdecimal() else 0 for name, text in found.items()},
        "features": [name for name, present in core.cpu_features().items() if present],
        "threads": threads.get_num_threads(),
        **{name: size for name, size in sizes.items() if size},
    }


def _limits(rows: list[Row]) -> dict:
    (found,) = measurements.limits(rows)
    return {
        "read_gb_s": _digits(found.read / 1e9),
        "read_streams": rows[0].result.streams,  # one layer's, the same in all
        "multiply_gflop_s": {found.isa: _digits(found.peak / 1e9)},
    }


def layer(rows: list[Row], experts: ExpertWeights, model: str, choices: dict[str, str]) -> dict:
    """A results file's entry for one layer. choices: the layer's attributes, by name. bound: of the first row, whose outputs
    are those of one token."""
    first, bound = rows[0], rows[0].check.bound
    calls = {work: [_call(row) for row in rows if row.work == work] for work in ("decode", "prefill")}
    return {
        "model": model,
        "weights": ", ".join(dict.fromkeys(_name(experts.formats[projection]) for projection in PROJECTIONS)),
        "backend": first.backend,
        "isa": first.isa,
        "activations": first.activations,
        **choices,
        "experts": experts.num_experts,
        "copies": 1,
        **({"bound": _digits(bound)} if math.isfinite(bound) else {}),
        **{work: found for work, found in calls.items() if found},
    }


def _call(row: Row) -> dict:
    return {name: _digits(value) if isinstance(value, float) else value for name, value in measurements.call(row).items()}


def _name(weight_format: WeightFormat) -> str:
    return next((name for name, known in FORMATS.items() if known == weight_format), weight_format.description)


def _digits(value: float) -> float:
    """The value rounded to four digits."""
    return float(f"{value:.4g}")
