"""What a user may choose for the experts of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ktmoe import backends
from ktmoe.backends.base import Progress
from ktmoe.distributed.layer import Distribution
from ktmoe.errors import InputError
from ktmoe.linear_weights import LinearWeights
from ktmoe.machine.threads import set_num_threads
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.progress_bar import bytes_done
from ktmoe.quantization import TARGETS, Quantizer
from ktmoe.transformers.gpu_experts import choose

if TYPE_CHECKING:
    from ktmoe.transformers.modules import Experts

#: Who computes dense matrices without rounding them: ktmoe, or torch.
EXACT = ("packed", "torch")
#: What `dense` may be: one of these, or the format that packed matrices are rounded to.
DENSE = (*EXACT, *TARGETS)
#: Of formats to round dense matrices to, what shares a scale where it is not the format's own. INT8 as in ggml's Q8_0.
_GROUPS: dict[str, dict[str, Any]] = {"int8": {"group": 32, "scales": "fp16"}}
#: Matrices whose weights have fewer bits are not rounded.
_FROM_BITS = 16

#: bytes of a layer -> what MoELayer reports its progress to.
Reporting = Callable[[int], Progress | None]


def on_cpu(device_map: object) -> bool:
    """Whether transformers puts a whole model on the CPU. device_map: from_pretrained()'s."""
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    return all(str(place or "cpu") == "cpu" for place in places)


@dataclass(frozen=True)
class Options:
    """backend, activations, rounding, tuned_for, numa_nodes: as MoELayer has them.

    threads: of ktmoe in this process; None leaves them as they are.
    gpu_experts: which experts are on the GPU, as ktmoe.transformers.load() has it. None: none is.
    progress: called with (done_bytes, total_bytes), from threads, one at a time. True: a bar on stderr, which needs rich.
    cache: a folder that `ktmoe pack` has made of the checkpoint, to map weights from; only where loaders read the checkpoint.
    dense: what computes the dense matrices, as ktmoe.transformers.load() has it. Raises InputError for another name.
    distributed: how the experts are divided among processes, as ktmoe.transformers.load() has it; None: not at all.
    """

    backend: str = "auto"
    activations: str = "auto"
    rounding: str = "exact"
    tuned_for: str = "decode"
    threads: int | None = None
    numa_nodes: Sequence[int] | None = None
    gpu_experts: np.ndarray | Sequence[Any] | int | None = None
    progress: Progress | bool | None = None
    cache: str | os.PathLike[str] | None = None
    dense: str = "packed"
    distributed: Distribution | None = None

    def __post_init__(self) -> None:
        if self.dense not in DENSE:
            raise InputError(f"dense must be one of {', '.join(DENSE)}, found {show(self.dense)}")
        if self.distributed is not None and not (
            isinstance(self.distributed, Distribution) and self.distributed.tokens == "same"
        ):
            raise InputError(f'distributed must be a Distribution with tokens="same", found {show(self.distributed)}')
        if self.distributed is not None and self.cache is not None:
            raise InputError(f"cache must be None for a distributed model, found {show(self.cache)}")
        if self.distributed is not None and self.gpu_experts is not None and np.any(self.gpu_experts):
            raise InputError(f"gpu_experts must be None for a distributed model, found {show(self.gpu_experts)}")

    @property
    def dense_backend(self) -> str:
        """The backend of dense matrices: the experts', if it has them."""
        return self.backend if self.backend == "auto" or backends.get(self.backend).linear else "auto"

    def rounded(self, weights: LinearWeights) -> LinearWeights:
        """A dense matrix as it is to be packed: in the format that `dense` names, if it has more bits and fits in there."""
        if self.dense in EXACT or weights.formats["weight"].element.bits < _FROM_BITS:
            return weights
        quantizer, (n, k) = Quantizer(self.dense, **_GROUPS.get(self.dense, {})), weights.shape()
        rows, columns = quantizer.format.code_unit
        if n % rows or k % columns:
            return weights

        def read() -> Matrix:
            return quantizer.matrix(weights.matrix(0, "weight"))[0]

        return LinearWeights.of_headers(weights.name, quantizer.format, (n, k), read)

    @property
    def packing(self) -> dict[str, Any]:
        """Arguments of MoELayer and MoEModel."""
        return {
            "backend": self.backend,
            "activations": self.activations,
            "rounding": self.rounding,
            "tuned_for": self.tuned_for,
            "numa_nodes": self.numa_nodes,
        }

    def set_threads(self) -> None:
        if self.threads is not None:
            set_num_threads(self.threads)

    def on_gpu(self, found: Sequence[Experts], model: torch.nn.Module) -> list[np.ndarray]:
        """The ids of the experts on the GPU, for each of a model's modules of experts. Raises InputError."""
        return choose(self.gpu_experts, model, {experts.name: experts.num_experts for experts in found})

    @contextmanager
    def reporting(self, total: int) -> Iterator[Reporting]:
        """A function that makes the progress of one layer, of so many bytes, into that of all layers, of `total` bytes."""
        with ExitStack() as resources:
            report = resources.enter_context(bytes_done("loading")) if self.progress is True else self.progress or None
            done = 0

            def of_layer(nbytes: int) -> Progress | None:
                nonlocal done
                before, done = done, done + nbytes
                return (lambda now, _: report(before + now, total)) if report else None

            yield of_layer
