"""Dense layers that vLLM makes and fills with made-up matrices, and what ktmoe's own Linear makes of the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import layers_of_vllm
import numpy as np
import pytest
import torch
from dense_schemes import NAME, Case, K
from helpers import BF16
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from ktmoe import Matrix


@dataclass(frozen=True)
class Kind:
    """A class of vLLM's layers. rows: of the matrices that it merges. shards: what loaders call them."""

    make: type
    rows: tuple[int, ...]
    arguments: dict
    shards: tuple[object, ...] = (None,)

    @property
    def cuts(self) -> int | None:
        """The axis of the matrices that processes divide, or None."""
        return None if self.make is ReplicatedLinear else int(self.make is RowParallelLinear)


#: With sizes that every scheme takes, halved, too.
KINDS = {
    "replicated": Kind(ReplicatedLinear, (256,), {"input_size": K, "output_size": 256}),
    "column": Kind(ColumnParallelLinear, (256,), {"input_size": K, "output_size": 256}),
    "merged": Kind(MergedColumnParallelLinear, (512, 256), {"input_size": K, "output_sizes": [512, 256]}, (0, 1)),
    "qkv": Kind(
        QKVParallelLinear,
        (512, 256, 256),
        {"hidden_size": K, "head_size": 128, "total_num_heads": 4, "total_num_kv_heads": 2},
        ("q", "k", "v"),
    ),
    "row": Kind(RowParallelLinear, (256,), {"input_size": K, "output_size": 256}),
    "head": Kind(ParallelLMHead, (256,), {"num_embeddings": 256, "embedding_dim": K}),
}


def resized(kind: Kind, k: int) -> Kind:
    """The same with k inputs."""
    return replace(kind, arguments={name: k if size == K else size for name, size in kind.arguments.items()})


def make(case: Case, kind: Kind, **arguments) -> torch.nn.Module:
    """A layer in bfloat16."""
    layers_of_vllm.model_says()
    config = layers_of_vllm.quantization(case.quantization, case.stated) if case.quantization else None
    own = {} if kind.make is ParallelLMHead else {"bias": False}
    torch.set_default_dtype(torch.bfloat16)  # as while vLLM makes a model
    try:
        return kind.make(**{"quant_config": config, "prefix": NAME, **kind.arguments, **own, **arguments})
    finally:
        torch.set_default_dtype(torch.float32)


def of_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int = 2) -> None:
    """Let vLLM make layers of one of several processes."""
    for module in (linear, parameter, vocab_parallel_embedding):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)


def fill(case: Case, kind: Kind, layer: torch.nn.Module, parts: Sequence[Matrix], bias: np.ndarray | None = None) -> None:
    """Fill a layer as vLLM's models do: each tensor by its parameter's loader."""
    for number, (part, shard) in enumerate(zip(parts, kind.shards, strict=True)):
        tensors = case.tensors(part)
        if bias is not None:
            first = sum(each.shape[0] for each in parts[:number])
            tensors["bias"] = "BF16", bias[first : first + part.shape[0]].astype(BF16)
        for name, tensor in tensors.items():
            target = getattr(layer, name)
            target.weight_loader(target, layers_of_vllm.tensor(*tensor), *(() if shard is None else (shard,)))


def process(layer: torch.nn.Module) -> None:
    layer.quant_method.process_weights_after_loading(layer)


def loaded(case: Case, kind: Kind, parts: Sequence[Matrix], bias: np.ndarray | None = None, **arguments) -> torch.nn.Module:
    """A layer that vLLM has made, filled and processed. It has a bias if there is one."""
    layer = make(case, kind, **arguments, **({} if bias is None else {"bias": True}))
    fill(case, kind, layer, parts, bias)
    process(layer)
    return layer


def ours(layer: torch.nn.Module) -> bool:
    """Whether ktmoe computes the layer."""
    return type(layer.quant_method).__module__.startswith("ktmoe.")


def applied(layer: torch.nn.Module, x: np.ndarray) -> np.ndarray:
    """What a layer's method computes when its class calls it in one of several processes, before results are added up."""
    bias = None if not isinstance(layer, RowParallelLinear) or layer.tp_rank else layer.bias
    x = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return layer.quant_method.apply(layer, x, bias).view(torch.int16).numpy().view(BF16)


def product(layer: torch.nn.Module, x: np.ndarray) -> np.ndarray:
    """What vLLM's model gets of a layer for x, bfloat16 like it."""
    x = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    y = layer(x) if isinstance(layer, LinearBase) else layer.quant_method.apply(layer, x)
    return (y[0] if isinstance(y, tuple) else y).view(torch.int16).numpy().view(BF16)
