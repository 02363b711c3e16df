"""Where a wrapper's weights come from: one open checkpoint a folder for all layers, or arrays in memory."""

from __future__ import annotations

import numbers
import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ktmoe import arrays
from ktmoe.compat.lock import FinalizerLock
from ktmoe.compat.methods import Method, check_formats
from ktmoe.errors import InputError
from ktmoe.experts import ExpertWeights
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show
from ktmoe.weights.activation import SILU, GatedActivation
from ktmoe.weights.formats import BF16


@dataclass
class _Shared:
    """A checkpoint, and the number of leases that hold it."""

    checkpoint: Checkpoint
    leases: int = 0


class Lease:
    """A lease of the one open Checkpoint of a folder, whose index and headers are read once; the last close() closes it."""

    leased: ClassVar[dict[str, _Shared]] = {}  # the process's
    lock = FinalizerLock()  # a finalizer may close a lease while one is taken

    def __init__(self, path: str | os.PathLike):
        self._key = os.path.realpath(path)
        with self.lock:
            shared = self.leased.get(self._key)
            if shared is None:
                shared = self.leased[self._key] = _Shared(Checkpoint(path))
            shared.leases += 1
        self._shared: _Shared | None = shared

    def experts(self, layer: int) -> ExpertWeights:
        """A layer's experts, by the loader that is surest of it. Raises what find_loader() and its load() raise."""
        checkpoint = self._shared.checkpoint
        return find_loader(checkpoint, layer=layer).load(checkpoint, layer)

    def close(self) -> None:
        """Give the lease back. A second call does nothing."""
        self.lock.soon(self._close)

    def _close(self) -> None:
        shared, self._shared = self._shared, None
        if shared is None:
            return
        shared.leases -= 1
        if not shared.leases:
            del self.leased[self._key]
            shared.checkpoint.close()


def from_tensors(gate, up, down, activation: GatedActivation | None, name: str) -> ExpertWeights:
    """bfloat16 [E, I, H], [E, I, H], [E, H, I]: ml_dtypes, uint16 bits or torch on the CPU; not copied where contiguous."""
    given = []
    for label, value in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        viewed = arrays.view(value, label)
        if viewed.array.dtype != np.uint16:
            raise InputError(f"{label} must be bfloat16, found a {viewed.kind}")
        given.append(np.ascontiguousarray(viewed.array).view(arrays.BF16))
    return ExpertWeights.from_arrays(*given, format=BF16, activation=activation or SILU, name=name)


def prepared(
    experts: ExpertWeights, name: str, method: Method, sizes: tuple[int, int, int], physical, activation: GatedActivation | None
) -> ExpertWeights:
    """The experts of a layer's slots, as a method has them. name: the method's. sizes: slots, hidden, intermediate.

    physical: as physical_map() has it. activation: None: the experts' own. Raises FormatError, InputError.
    """
    check_formats(name, method, experts.formats, experts.name)
    slots, *wanted = sizes
    found = experts.hidden, experts.intermediate
    if found != tuple(wanted):
        raise InputError(f"{experts.name}: hidden and intermediate size must be {tuple(wanted)} as given, found {found}")
    if method.rounds is not None:
        experts = method.rounds.experts(experts)
    experts = experts.take(physical_map(physical, slots, experts.num_experts))
    return experts if activation is None else experts.with_activation(activation)


def physical_map(value, slots: int, experts: int) -> np.ndarray:
    """The expert of the checkpoint that fills each slot, int64 [slots]; value None: each its own. Raises InputError."""
    if value is None:
        value = np.arange(slots)
    found = arrays.as_numpy(value, "physical_to_logical_map")
    if found.dtype.kind not in "iu" or found.shape != (slots,):
        raise InputError(
            f"physical_to_logical_map must be integers [{slots}], one per expert of the layer, "
            f"found {found.dtype} {list(found.shape)}"
        )
    if wrong := [int(expert) for expert in found if not 0 <= expert < experts]:
        raise InputError(f"physical_to_logical_map must be in [0, {experts}), the checkpoint's experts; found {wrong[0]}")
    return found.astype(np.int64)


def gated_activation(limit: float | None, alpha: float) -> GatedActivation | None:
    """kt-kernel's swiglu_limit and swiglu_alpha as an activation; None: as the checkpoint says.

    limit: 0 = no clamp. alpha: 0 = SiLU, else gate * sigmoid(alpha * gate) * (up + 1). If alpha is set, kt-kernel clamps the
    gate from below, too; GPT-OSS, whose formula it is, does not, nor does this. They differ by at most
    limit * sigmoid(-alpha * limit) * (limit + 1).
    """
    for name, value in (("swiglu_limit", limit), ("swiglu_alpha", alpha)):
        if value is not None and not (isinstance(value, numbers.Real) and value >= 0):
            raise InputError(f"{name} must be 0 or more, found {show(value)}")
    if limit is None and not alpha:
        return None
    clamp = {"limit": float(limit)} if limit else {}
    return GatedActivation(alpha=float(alpha), up_offset=1.0, **clamp) if alpha else GatedActivation(**clamp)
