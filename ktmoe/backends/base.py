"""Backend: packs ExpertWeights for one way to compute and runs them; and the choice between backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ktmoe import backends
from ktmoe.errors import UnavailableError, UnknownNameError
from ktmoe.experts import ExpertWeights, Matrix
from ktmoe.machine import environment
from ktmoe.machine.numa import UNBOUND, Placement

Progress = Callable[[int, int], None]
#: The checkpoint's bytes of some matrices, by projection: codes, and scales where the format has them.
Stored = Mapping[str, tuple[np.ndarray, np.ndarray | None]]


@dataclass(frozen=True)
class Plan:
    """How a layer's experts are packed and computed.

    router_weight: a value of ktmoe.layer.ROUTER_WEIGHTS. activations: the mode, one of Backend.modes(experts).
    rounding: "exact", or "folded": weights may be rounded to bfloat16, as docs/numerics.md has it.
    placement: the NUMA nodes that hold the shards; a backend that does not know nodes ignores it.
    """

    router_weight: str = "down_output"
    activations: str = "bf16"
    rounding: str = "exact"
    placement: Placement = UNBOUND


class Packed(Protocol):
    """One layer's experts, ready to compute: what Backend.pack returns. replace() and export() may be missing."""

    nbytes: int
    rounding: str  # "folded" if any scaled weight is rounded, else "exact"

    def forward(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
        """Write y into out. x, out: uint16 (bfloat16 bits) or float32, alike, [tokens, hidden]; ids: int64 [tokens, top_k];
        weights: float32 [tokens, top_k]; mask: uint8 [num_experts], 0 = skip. C-contiguous; tokens and top_k at least 1."""

    def close(self) -> None:
        """Give the memory back once running forward calls are done."""

    def replace(self, expert: int, matrices: Mapping[str, Matrix]) -> None:
        """Put all three matrices in the place of an expert's; a forward call sees all of the old ones or all of the new."""

    def export(self, expert: int, parts: Sequence[Stored]) -> Mapping[str, np.ndarray]:
        """Fill the arrays, C-contiguous and of Matrix's dtypes, with the checkpoint's own bytes: part i has the i-th rows of
        gate and up and the i-th columns of down, as many as their shapes say. Returns whole biases by projection, if any."""


class Backend(ABC):
    """One way to compute. rank: "auto" takes the highest available. activations: the modes it has, its own choice first."""

    rank: int = 0
    activations: tuple[str, ...] = ("bf16",)

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why it cannot run here (the CPU, the build), or None if it can."""

    def admit(self, activations: str = "auto") -> str | None:
        """Ask the operating system for what that mode needs of it, now that this is chosen; why it cannot run, or None."""
        return self.unavailable()

    @abstractmethod
    def unsupported(self, experts: ExpertWeights) -> str | None:
        """Why it cannot run these weights (their format), or None if it can."""

    def modes(self, experts: ExpertWeights) -> list[str]:
        """The activation modes in which it can run these weights; the first is what "auto" means."""
        return list(self.activations)

    def lacks(self, activations: str) -> str | None:
        """What a mode needs that is not here (the CPU, the build), whatever the weights are; None if nothing is known."""
        return None

    @abstractmethod
    def pack(self, experts: ExpertWeights, plan: Plan, progress: Progress | None = None) -> Packed:
        """Read and pack all matrices. progress(done_bytes, total_bytes) may raise to cancel; nothing is kept then."""

    def packed_nbytes(self, experts: ExpertWeights, placement: Placement = UNBOUND) -> int:
        """Bytes of memory that these experts take once they are packed; nothing is read."""
        return experts.nbytes

    def details(self) -> dict:
        """For show_config(): {"note": text}."""
        return {"note": ""}


def choose(name: str = "auto", experts: ExpertWeights | None = None, activations: str = "auto") -> tuple[str, str]:
    """(name, why) of the backend to use. "auto": KTMOE_BACKEND if set, else the best that this CPU and these weights allow.

    activations: the mode that it has to have for these weights, or "auto" for its own choice.

    Raises UnknownNameError for a name that does not exist, UnavailableError for one that cannot run; both say what can.
    """
    why = "asked for by name"
    if name == "auto":
        name, why = environment.backend_override() or "auto", "KTMOE_BACKEND"
    if name != "auto":
        try:
            reason = _obstacle(name, experts, activations)
        except UnknownNameError as error:
            raise UnknownNameError(f"{error} ({why})") from None
        if reason:
            raise UnavailableError(
                f"backend {name!r} ({why}) cannot be used: {reason}. Available: {', '.join(backends.available()) or 'none'}"
            )
        return name, why
    reasons = {}
    for candidate in backends.ranked():
        reasons[candidate] = _obstacle(candidate, experts, activations)
        if reasons[candidate] is None:
            passed_over = "; ".join(f"{other}: {reason}" for other, reason in reasons.items() if reason)
            return candidate, f"the best available{'; ' if passed_over else ''}{passed_over}"
    raise UnavailableError("no backend can be used: " + "; ".join(f"{other}: {reason}" for other, reason in reasons.items()))


def _obstacle(name: str, experts: ExpertWeights | None, activations: str) -> str | None:
    backend = backends.get(name)
    # Looking comes first, since asking cannot be undone; and again, since what it would have used may have been refused.
    return _unfit(backend, experts, activations) or backend.admit(activations) or _unfit(backend, experts, activations)


def _unfit(backend: Backend, experts: ExpertWeights | None, activations: str) -> str | None:
    reason = backend.unavailable() or (backend.unsupported(experts) if experts is not None else None)
    if reason or experts is None or activations == "auto":
        return reason
    modes = backend.modes(experts)
    if activations in modes:
        return None
    why = backend.lacks(activations)
    return f"it has no activation mode {activations!r} for these weights, only {', '.join(modes)}{f' ({why})' if why else ''}"
