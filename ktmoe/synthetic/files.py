"""A model as data, written to a folder or loaded without one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import TensorSpec, serialize_file

from ktmoe import loaders
from ktmoe.errors import InputError
from ktmoe.experts import ExpertWeights
from ktmoe.loaders.checkpoint import INDEX_NAME
from ktmoe.loaders.tensor_file import TensorInfo
from ktmoe.synthetic.tensors import DTYPES, Tensor

_CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class Model:
    """loader: the name of the one that reads it. config: what config.json holds. tensors: in the order of the files."""

    loader: str
    config: dict[str, Any]
    tensors: list[Tensor]


def check(**sizes: tuple[int, int]) -> None:
    """Raise InputError if a size, given as (value, step), is not a positive multiple of step."""
    for name, (value, step) in sizes.items():
        if value < 1 or value % step:
            raise InputError(f"{name}: expected a positive multiple of {step}, found {value}")


def write(
    path: str | os.PathLike[str],
    model: Model,
    *,
    seed: int = 0,
    shard_bytes: int = 1 << 27,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write a model into a new or empty folder.

    path: the folder; made if need be. A tensor's bytes depend on `seed`, its name and its shape alone.
    shard_bytes: most bytes of tensors in one file, unless one alone has more, and about the memory that writing takes;
    files beyond one get an index. progress: called with (bytes of tensors done, bytes in all), last with both equal.
    Raises InputError for a folder that already holds a model. If it fails or is interrupted, what it wrote is removed.
    """
    if shard_bytes < 1:
        raise InputError(f"shard_bytes: expected at least 1, found {shard_bytes}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(folder.iterdir()):
        if file.name in (_CONFIG_NAME, INDEX_NAME) or file.suffix == ".safetensors":
            raise InputError(f"{folder}: expected a folder without a model, found {file.name}")
    shards = list(_shards(model.tensors, shard_bytes))
    written: list[Path] = []
    try:
        weight_map = _write_shards(folder, shards, seed, written, progress or (lambda done, total: None))
        if len(shards) > 1:
            total = sum(tensor.nbytes for tensor in model.tensors)
            _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map}, written)
        _write_json(folder / _CONFIG_NAME, model.config, written)
    except BaseException:  # an interrupt, too: half a model must not look like one
        for file in written:
            file.unlink(missing_ok=True)
        raise


def load(model: Model, seed: int) -> ExpertWeights:
    """What its loader makes of layer 0, without a file."""
    return loaders.get(model.loader).load(_SyntheticCheckpoint(model, seed), 0)


class _SyntheticCheckpoint:
    """What a loader uses of a Checkpoint; tensors are made when they are read."""

    def __init__(self, model: Model, seed: int):
        self.path = Path("synthetic")
        self.config = model.config
        self._seed = seed
        self._tensors = {tensor.name: tensor for tensor in model.tensors}

    def names(self) -> KeysView[str]:
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        tensor = self._tensors[name]
        return TensorInfo(name, tensor.dtype, tensor.shape, self.path, 0, tensor.nbytes)

    def read(self, name: str, *, byte_range: tuple[int, int] | None = None, release: bool = False) -> np.ndarray:
        tensor = self._tensors[name]
        return tensor.read(*(byte_range or (0, tensor.nbytes)), self._seed)


def _shards(tensors: list[Tensor], shard_bytes: int) -> Iterator[list[Tensor]]:
    shard: list[Tensor] = []
    used = 0
    for tensor in tensors:
        if shard and used + tensor.nbytes > shard_bytes:
            yield shard
            shard, used = [], 0
        shard.append(tensor)
        used += tensor.nbytes
    yield shard


def _write_shards(
    folder: Path, shards: list[list[Tensor]], seed: int, written: list[Path], progress: Callable[[int, int], object]
) -> dict[str, str]:
    """Write each shard from one reused buffer; the index's weight_map."""
    sizes = [sum(tensor.nbytes for tensor in shard) for shard in shards]
    buffer = np.empty(max(sizes), np.uint8)
    done, total = 0, sum(sizes)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = folder / ("model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors")
        specs, start = {}, 0
        for tensor in shard:
            data = buffer[start : start + tensor.nbytes]
            tensor.fill(data, seed)
            dtype, _ = DTYPES[tensor.dtype]
            specs[tensor.name] = TensorSpec(
                dtype=dtype, shape=list(tensor.shape), data_ptr=data.ctypes.data, data_len=tensor.nbytes
            )
            weight_map[tensor.name] = file.name
            start += tensor.nbytes
            if tensor is not shard[-1]:
                progress(done + start, total)
        written.append(file)
        serialize_file(specs, file, {"format": "pt"})
        done += start
        progress(done, total)
    return weight_map


def _write_json(file: Path, value: dict[str, Any], written: list[Path]) -> None:
    written.append(file)
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
