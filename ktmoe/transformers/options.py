"""What a user may choose for the experts of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ktmoe.backends.base import Progress
from ktmoe.machine.threads import set_num_threads
from ktmoe.progress_bar import bytes_done
from ktmoe.transformers.gpu_experts import choose

if TYPE_CHECKING:
    from ktmoe.transformers.modules import Experts

#: bytes of a layer -> what MoELayer reports its progress to.
Reporting = Callable[[int], Progress | None]


@dataclass(frozen=True)
class Options:
    """backend, activations, rounding, tuned_for, numa_nodes: as MoELayer has them.

    threads: of ktmoe in this process; None leaves them as they are.
    gpu_experts: which experts are on the GPU, as ktmoe.transformers.load() has it. None: none is.
    progress: called with (done_bytes, total_bytes), from threads, one at a time. True: a bar on stderr, which needs rich.
    cache: a folder that `ktmoe pack` has made of the checkpoint, to map experts from; only where loaders read the checkpoint.
    """

    backend: str = "auto"
    activations: str = "auto"
    rounding: str = "exact"
    tuned_for: str = "decode"
    threads: int | None = None
    numa_nodes: Sequence[int] | None = None
    gpu_experts: np.ndarray | Sequence | int | None = None
    progress: Progress | bool | None = None
    cache: str | os.PathLike | None = None

    @property
    def packing(self) -> dict:
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
            report = self.progress or None
            if report is True:
                report = resources.enter_context(bytes_done("loading"))
            done = 0

            def of_layer(nbytes: int) -> Progress | None:
                nonlocal done
                before, done = done, done + nbytes
                return report and (lambda now, _: report(before + now, total))

            yield of_layer
