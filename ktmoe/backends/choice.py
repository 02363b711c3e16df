"""The choice between backends."""

from __future__ import annotations

from typing import Any, NamedTuple

from ktmoe import backends
from ktmoe.backends.base import Backend, Found, Missing, mode_by
from ktmoe.errors import UnavailableError, UnknownNameError
from ktmoe.experts import ExpertWeights
from ktmoe.linear_weights import LinearWeights
from ktmoe.machine import environment

#: What is to be computed; None for anything.
Weights = ExpertWeights | LinearWeights | None


class Choice(NamedTuple):
    """A backend's name, why it was chosen, and the activation mode in which it computes."""

    name: str
    why: str
    activations: str


def choose_backend(name: str = "auto", experts: Weights = None, activations: str = "auto") -> Choice:
    """The backend to use. "auto": KTMOE_BACKEND if that is set, else the best that this CPU and these weights allow.

    activations: the mode that it has to have for these weights, or "auto" for its own choice.
    Raises UnknownNameError for a name that does not exist, UnavailableError for one that cannot run; both say what can.
    """
    why = "asked for by name"
    if name == "auto":
        name, why = environment.backend_override() or "auto", "KTMOE_BACKEND"
    if name == "auto":
        return _best(experts, activations)
    try:
        backend = backends.get(name)
    except UnknownNameError as error:
        raise UnknownNameError(f"{error} ({why})") from None
    found = _claim(backend, experts, activations)
    if isinstance(found, Missing):
        others = ", ".join(backends.available()) or "none"
        raise UnavailableError(f"backend {name!r} ({why}) cannot be used: {found.reason}. Available: {others}")
    return Choice(name, why, found.activations)


def _claim(backend: Backend, weights: Any, activations: str) -> Found | Missing:
    if isinstance(weights, LinearWeights) and not backend.linear:
        return Missing("it computes no dense matrices")
    return backend.claim(weights, activations)


def _best(experts: Weights, activations: str) -> Choice:
    passed_over: list[str] = []
    ranked = backends.ranked()
    for name in ranked:
        found = _claim(backends.get(name), experts, activations)
        if isinstance(found, Found):
            return Choice(name, "; ".join(["the best available", *passed_over]), found.activations)
        passed_over.append(f"{name}: {found.reason}")
    somebodys = activations == "auto" or any(activations in backends.get(name).modes for name in ranked)
    unknown = "" if somebodys else mode_by(activations)[1]  # once, not for each backend
    raise UnavailableError(f"no backend can be used: {unknown or '; '.join(passed_over)}")
