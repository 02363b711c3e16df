"""Synthetic checkpoints with true tensor names, dtypes and sizes, for the demo, tests and benches."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import TensorSpec, serialize_file

from ktmoe.activation import GatedActivation
from ktmoe.errors import InputError
from ktmoe.experts import ExpertWeights, Matrix
from ktmoe.formats import MXFP4

_INDEX_NAME = "model.safetensors.index.json"


def write_deepseek_v4(
    path: str | os.PathLike[str],
    *,
    num_experts: int = 32,
    hidden: int = 4096,
    intermediate: int = 2048,
    layers: int = 1,
    mtp_layers: int = 0,
    prefix: str = "",
    swiglu_limit: float | None = 10.0,
    top_k: int = 6,
    seed: int = 0,
    shard_bytes: int = 1 << 27,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write the routed experts of a DeepSeek-V4-shaped model, and its config.json, into a new or empty folder.

    path: the folder; made if need be. hidden, intermediate: multiples of 32. layers, mtp_layers: `layers.{L}` and `mtp.{M}`,
    each with `prefix` ("" or "model.") before it. swiglu_limit, top_k: go into config.json; None leaves swiglu_limit out.
    Codes are uniform, scales vary by a factor of 8 within a matrix, and weights have a standard deviation of about 1/sqrt(k),
    so that activations neither vanish nor blow up. A tensor's bytes depend on `seed`, its name and its shape alone.
    shard_bytes: most bytes of tensors in one file, and about the memory that writing takes; files beyond one get an index.
    progress: called with (bytes of tensors done, bytes of tensors in all), last with both equal.
    Raises InputError for a size that is not possible and for a folder that already holds a model. If it fails or is
    interrupted, the files that it wrote are removed.
    """
    for name, value, step in (("hidden", hidden, 32), ("intermediate", intermediate, 32), ("num_experts", num_experts, 1)):
        if value < 1 or value % step:
            raise InputError(f"{name}: expected a positive multiple of {step}, found {value}")
    for name, value, least in (("layers", layers, 0), ("mtp_layers", mtp_layers, 0), ("shard_bytes", shard_bytes, 1)):
        if value < least:
            raise InputError(f"{name}: expected at least {least}, found {value}")
    if not layers + mtp_layers:
        raise InputError("layers: expected at least one layer or MTP layer, found 0 and 0")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(folder.iterdir()):
        if file.name in ("config.json", _INDEX_NAME) or file.suffix == ".safetensors":
            raise InputError(f"{folder}: expected a folder without a model, found {file.name}")

    bases = [f"{prefix}layers.{i}" for i in range(layers)] + [f"{prefix}mtp.{i}" for i in range(mtp_layers)]
    shards = list(_shards(_plan(bases, num_experts, hidden, intermediate), shard_bytes))
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "n_routed_experts": num_experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": top_k,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": mtp_layers,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": swiglu_limit,
        "expert_dtype": "fp4",
        # model-wide, and true of the attention and the shared experts only: just as misleading as in the real files
        "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    }
    if swiglu_limit is None:
        del config["swiglu_limit"]
    written: list[Path] = []
    try:
        weight_map = _write_shards(folder, shards, seed, written, progress or (lambda done, total: None))
        if len(shards) > 1:
            total = sum(tensor.nbytes for shard in shards for tensor in shard)
            _write_json(folder / _INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map}, written)
        _write_json(folder / "config.json", config, written)
    except BaseException:  # an interrupt, too: half a model must not look like one
        for file in written:
            file.unlink(missing_ok=True)
        raise


def deepseek_v4_experts(
    *, num_experts: int = 32, hidden: int = 4096, intermediate: int = 2048, swiglu_limit: float = 10.0, seed: int = 0
) -> ExpertWeights:
    """What layer 0 of write_deepseek_v4's checkpoint loads as, without a file: a matrix is made when it is asked for."""
    stems = {"gate": "w1", "up": "w3", "down": "w2"}

    def read(expert: int, projection: str) -> Matrix:
        n, k = shape = (hidden, intermediate) if projection == "down" else (intermediate, hidden)
        name = f"layers.0.ffn.experts.{expert}.{stems[projection]}"
        codes, scales = np.empty(MXFP4.codes_shape(n, k), np.uint8), np.empty(MXFP4.scale.shape(n, k), np.uint8)
        for kind, array in (("weight", codes), ("scale", scales)):
            _fill(array.reshape(-1), _Tensor(f"{name}.{kind}", kind, array.shape, k), seed)
        return Matrix(name, MXFP4, shape, codes, scales)

    return ExpertWeights(
        num_experts, hidden, intermediate, read, MXFP4, GatedActivation(limit=swiglu_limit), "layers.0.ffn.experts"
    )


class _Tensor(NamedTuple):
    name: str
    kind: str  # "weight" or "scale"
    shape: tuple[int, int]
    k: int  # columns of the matrix that it belongs to

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1]


def _plan(bases: list[str], num_experts: int, hidden: int, intermediate: int) -> Iterator[_Tensor]:
    for base in bases:
        for expert in range(num_experts):
            for stem, n, k in (("w1", intermediate, hidden), ("w2", hidden, intermediate), ("w3", intermediate, hidden)):
                name = f"{base}.ffn.experts.{expert}.{stem}"
                yield _Tensor(f"{name}.weight", "weight", MXFP4.codes_shape(n, k), k)
                yield _Tensor(f"{name}.scale", "scale", MXFP4.scale.shape(n, k), k)


def _shards(tensors: Iterator[_Tensor], shard_bytes: int) -> Iterator[list[_Tensor]]:
    shard: list[_Tensor] = []
    used = 0
    for tensor in tensors:
        if shard and used + tensor.nbytes > shard_bytes:
            yield shard
            shard, used = [], 0
        shard.append(tensor)
        used += tensor.nbytes
    yield shard


def _write_shards(
    folder: Path, shards: list[list[_Tensor]], seed: int, written: list[Path], progress: Callable[[int, int], object]
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
            _fill(data, tensor, seed)
            dtype = "int8" if tensor.kind == "weight" else "float8_e8m0fnu"
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


def _fill(data: np.ndarray, tensor: _Tensor, seed: int) -> None:
    random = np.random.default_rng([seed, *tensor.name.encode()])
    words = random.integers(0, 2**64, -(-len(data) // 8), np.uint64)  # four times faster than as many bytes
    data[:] = words.view(np.uint8)[: len(data)]
    if tensor.kind == "scale":
        # rms of a uniform code times rms of 2**(-2..1) = 3.38, and 2**middle brings that to about 1/sqrt(k)
        rms = math.sqrt(np.mean(np.square(MXFP4.codebook)) * np.mean(np.exp2([-4, -2, 0, 2])))
        middle = round(-math.log2(rms * math.sqrt(tensor.k)))
        data &= 3
        data += np.uint8(127 + middle - 2)


def _write_json(file: Path, value: dict, written: list[Path]) -> None:
    written.append(file)
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
