"""Backend: packs ExpertWeights for one way to compute and runs them; and the choice between backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ktmoe import backends, config
from ktmoe.errors import UnavailableError, UnknownNameError
from ktmoe.experts import ExpertWeights

Progress = Callable[[int, int], None]


class Packed(Protocol):
    """One layer's experts, ready to compute: what Backend.pack returns."""

    nbytes: int
    scales: str  # "folded" if any scaled weight is rounded, else "exact"

    def forward(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
        """Write y into out. x, out: uint16 (bfloat16 bits) or float32, alike, [tokens, hidden]; ids: int64 [tokens, top_k];
        weights: float32 [tokens, top_k]; mask: uint8 [num_experts], 0 = skip. C-contiguous; tokens and top_k at least 1."""

    def close(self) -> None:
        """Give the memory back once running forward calls are done."""


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
    def pack(
        self, experts: ExpertWeights, router_weight: str, activations: str, scales: str, progress: Progress | None = None
    ) -> Packed:
        """Read and pack all matrices. progress(done_bytes, total_bytes) may raise to cancel; nothing is kept then.

        scales: "exact", or "folded": it may round scaled weights to bfloat16, as docs/numerics.md has it.
        """

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
        name, why = config.backend_override() or "auto", "KTMOE_BACKEND"
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
